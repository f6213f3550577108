"""The doctor on trained heads: no false alarm, and the same accept length before and after conversion.

The tests also check that the doctor names wrong auxiliary layers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models import trained_heads
from support.models.trained_heads import AUX, prompts, trained_target
from support.suite.compute_device import DEVICE

from outrider.services.convert.head import HeadLayout, rewrite_head
from outrider.services.doctor.examine import examine
from outrider.services.doctor.finding import Severity
from outrider.services.doctor.pair import Pair
from outrider.services.doctor.probe import judge_probe, run_probe
from outrider.shared.spec.algorithm import Algorithm
from outrider.shared.spec.tree import DraftShape

pytestmark = pytest.mark.xdist_group("doctor_trained")

torch.set_num_threads(1)
SHAPE = DraftShape(4, 2, 8)
COUNT = 18
HEADS: dict[str, Callable[[], Path]] = {
    "EAGLE-2": trained_heads.eagle2,
    "EAGLE-3": trained_heads.eagle3,
    "EAGLE-3 of two layers over four": trained_heads.eagle3_deep,
}


def pair_of(head: Path) -> Pair:
    return Pair(trained_target().folder, head, Algorithm.AUTO, DEVICE, torch.float32)


@pytest.mark.parametrize("name", HEADS)
def test_a_trained_head_raises_no_alarm_and_keeps_its_accept_length_when_converted(
    name: str, tmp_path: Path
) -> None:
    head = HEADS[name]()
    alarms = [finding for finding in examine(pair_of(head)).findings if finding.severity is not Severity.OK]
    assert [finding.message for finding in alarms if finding.check != "tokenizer"] == []
    configured, *others = run_probe(pair_of(head), prompts(), COUNT, SHAPE)
    print(name, configured, *others, sep="\n")
    assert configured.accept_length >= 2.0
    assert all(other.accept_length < configured.accept_length for other in others)
    rewrite_head(head, tmp_path / "ours", HeadLayout.OUTRIDER)
    converted = run_probe(pair_of(tmp_path / "ours"), prompts(), COUNT, SHAPE)[0]
    assert (converted.accept_length, converted.rounds) == (configured.accept_length, configured.rounds)


def test_aux_layers_counted_one_off_are_named_with_what_they_cost(tmp_path: Path) -> None:
    shifted = tmp_path / "head"
    shutil.copytree(trained_heads.eagle3(), shifted)
    config = json.loads((shifted / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in AUX]
    config.pop("eagle_config", None)
    (shifted / "config.json").write_text(json.dumps(config))
    (warning,) = (
        one
        for one in judge_probe(run_probe(pair_of(shifted), prompts(), COUNT, SHAPE))
        if one.severity is Severity.WARNING
    )
    assert "you lose" in warning.message
    assert f"those of {AUX}" in warning.message
    assert str(AUX) in warning.fix
