"""Aux layers of EAGLE-3 heads: the target's family decides what ids mean; a number overrides the list."""

from __future__ import annotations

import logging
import threading
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.toy_heads import (
    HIDDEN,
    LATENT,
    TARGET_LAYERS,
    VOCAB,
    base_config,
    eagle3_tensors,
    with_latent_attention,
    write_head,
)
from support.models.toys import make_toy_eagle3, make_toy_target

from outrider.services.draft.app import DraftService
from outrider.services.draft.heads.files.aux_layers import AuxLayers
from outrider.services.draft.heads.files.eagle3_config import Eagle3Config
from outrider.services.draft.heads.registry import load_head
from outrider.services.draft.settings import DraftSettings
from outrider.services.draft.target_info import TargetInfo
from outrider.services.target.draft_client.link import TargetIdentity
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.open import load_decoder, read_model_config
from outrider.shared.spec.drafter import DrafterState

torch.set_num_threads(1)
CPU = torch.device("cpu")
IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA = base_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=24)
KIMI = LLAMA | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "num_key_value_heads": 4,
    **LATENT,
}


def captured(folder: Path, family: str, **config: Any) -> tuple[int, ...]:
    count = config.get("num_aux_hidden_states") or len(config[IDS])
    latent = "kv_lora_rank" in config
    tensors = eagle3_tensors(num_aux=count)
    head = load_head(
        write_head(folder, LLAMA | config, with_latent_attention(tensors) if latent else tensors),
        CPU,
        torch.float32,
    )
    return tuple(head.feature_spec(TargetInfo("t", "f", VOCAB, HIDDEN, TARGET_LAYERS, family)).aux_layer_ids)


@pytest.mark.parametrize(
    ("family", "ids", "outputs"),
    [
        ("llama", [2, 4, 6], (2, 4, 6)),
        ("qwen3_moe", [2, 4, 6], (2, 4, 6)),
        ("deepseek_v2", [2, 4, 6], (1, 3, 5)),
        ("deepseek_v3", [2, 4, 6], (1, 3, 5)),
        ("kimi_k2", [2, 4, 6], (1, 3, 5)),
        ("deepseek_v3", [1, 3, 5], (1, 3, 5)),
        ("gpt_oss", [2, 5, 8], (1, 4, 7)),
        ("gpt_oss", [1, 4, 7], (1, 4, 7)),
        ("deepseek_v3", [1, 5, 8], (0, 4, 7)),
        ("", [2, 4, 6], (2, 4, 6)),
    ],
)
def test_ids_of_a_plain_head_are_counted_as_the_targets_family_does(
    family: str, ids: list[int], outputs: tuple[int, ...], tmp_path: Path
) -> None:
    assert captured(tmp_path / "head", family, **{IDS: ids}) == outputs


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3", "kimi_k2", ""])
def test_the_ids_that_name_layers_are_read_as_these_layers(family: str, latent: bool) -> None:
    """Checks every triple of layers.

    In the convention of DeepSeek and Kimi, no ids name a triple that begins with layer 0, unless it ends
    with the last layer.
    """
    target = TargetInfo("t", "f", VOCAB, HIDDEN, TARGET_LAYERS, family)
    inputs = family in ("deepseek_v3", "kimi_k2") or (latent and not family)
    for outputs in combinations(range(TARGET_LAYERS), 3):
        ids = AuxLayers(3, None).naming(outputs, target, latent=latent)
        if ids is None:
            assert inputs, "where ids count outputs, every triple has a name"
            assert outputs[0] == 0
            assert outputs[-1] < TARGET_LAYERS - 1
            continue
        config = LLAMA | {IDS: list(ids)} | ({"model_type": "kimi_k2", **LATENT} if latent else {})
        assert Eagle3Config.parse(config).check_target(target) == outputs


@pytest.mark.parametrize(
    ("family", "outputs"), [("llama", (2, 4, 6)), ("kimi_k2", (1, 3, 5)), ("", (1, 3, 5))]
)
def test_a_head_with_latent_attention_counts_by_the_target_too(
    family: str, outputs: tuple[int, ...], tmp_path: Path
) -> None:
    """Older targets do not report their family. The head's own family is then the best guess."""
    assert captured(tmp_path / "head", family, **KIMI, **{IDS: [2, 4, 6]}) == outputs


def test_the_convention_is_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        captured(tmp_path / "head", "deepseek_v3", **{IDS: [2, 4, 6]})
    said = capsys.readouterr().out + caplog.text
    assert "ids count inputs, as they do for DeepSeek and Kimi targets" in said
    assert "[1, 3, 5]" in said


def test_the_same_layers_are_logged_once_and_others_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_head(tmp_path / "head", LLAMA | {IDS: [2, 4, 6]}, eagle3_tensors(num_aux=3))
    head = load_head(folder, CPU, torch.float32)
    with caplog.at_level(logging.INFO):
        for family in ("llama", "llama", "deepseek_v3"):
            head.feature_spec(TargetInfo("t", "f", VOCAB, HIDDEN, TARGET_LAYERS, family))
    assert (capsys.readouterr().out + caplog.text).count("aux layers selected") == 2


@pytest.mark.parametrize(
    ("count", "ids", "outputs"),
    [
        (2, [1, 3, 4], (1, 3)),
        (4, [0, 2, 4, 5, 6], (0, 2, 4, 5)),
        (3, [2, 5], (1, 3, 4)),
        (3, [0, 1, 2, 3], (0, 1, 2)),
    ],
)
def test_an_explicit_number_goes_before_the_list(
    count: int, ids: list[int], outputs: tuple[int, ...], tmp_path: Path
) -> None:
    """A longer list is cut. If a list is too short for three layers, the default triple is used."""
    assert captured(tmp_path / "head", "llama", **{"num_aux_hidden_states": count, IDS: ids}) == outputs


def test_a_number_without_enough_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="is 4, but eagle_aux_hidden_state_layer_ids names 3 layers; name 4"
    ) as caught:
        captured(tmp_path / "head", "llama", **{"num_aux_hidden_states": 4, IDS: [1, 3, 5]})
    assert caught.value.field == "num_aux_hidden_states"


def test_a_target_in_this_process_names_its_family(tmp_path: Path) -> None:
    config = read_model_config(make_toy_target(tmp_path / "target"))
    info = TargetInfo.of("t", config, "weights")
    assert (info.model_type, info.fingerprint) == ("llama", "weights")
    assert TargetInfo.of("t", config).fingerprint == config.fingerprint


@pytest.mark.parametrize(("family", "outputs"), [("llama", (2, 4, 6)), ("deepseek_v3", (1, 3, 5))])
def test_a_target_elsewhere_names_its_family_in_hello(
    family: str, outputs: tuple[int, ...], tmp_path: Path
) -> None:
    folder = make_toy_target(tmp_path / "target")
    head = make_toy_eagle3(tmp_path / "head", folder, aux_layers=[2, 4, 6])
    target = load_decoder(folder, CPU, torch.float32)
    known = TargetIdentity.of(target)
    assert known.model_type == "llama"
    service = DraftService(
        DraftSettings.load(
            {"draft": head, "listen": f"unix:{tmp_path}/d.sock", "device": "cpu", "kv_tokens": 4096}
        )
    )
    service.start()
    identity = TargetIdentity(
        known.target_id,
        known.fingerprint,
        known.vocab_size,
        known.hidden_size,
        known.num_layers,
        known.feature_dtype,
        family,
    )
    drafter = RemoteDrafter(service.address, identity, target.weight, CPU, fault_deadline_s=10.0)
    try:
        pause = threading.Event()
        for _ in range(2000):
            if drafter.state() is DrafterState.ON:
                break
            pause.wait(0.005)
        spec = drafter.feature_spec()
        assert spec is not None
        assert tuple(spec.aux_layer_ids) == outputs
    finally:
        drafter.shutdown()
        service.stop()
