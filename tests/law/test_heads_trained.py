"""Trained heads in the whole engine reach the accept length of a plain implementation.

A head that is loaded or run slightly wrong still drafts some accepted tokens, and the output stays correct.
These tests therefore check the accept length itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.engine.target_harness import assert_same_tokens, generate_plain, load_toy, make_harness
from support.models import trained_heads
from support.models.plain_heads import PlainHead
from support.models.trained_heads import (
    AUX,
    TOKEN_MAP,
    plain_accept_length,
    prompts,
    served_accept_length,
    trained_target,
)
from support.suite.compute_device import DEVICE

from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.base.generation import SamplingParams

pytestmark = pytest.mark.xdist_group("heads_trained")

COUNT = 18
SHAPES = [(4, 2, 8), (3, 1, 4)]
SAMPLINGS = [
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.2, top_p=0.9, seed=(1 << 64) - 9),
]
HEADS: dict[str, tuple[Callable[[], Path], list[int]]] = {
    "EAGLE-2": (trained_heads.eagle2, []),
    "EAGLE-3": (trained_heads.eagle3, AUX),
    "EAGLE-3 of two layers over four": (trained_heads.eagle3_deep, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", HEADS)
def test_a_trained_head_accepts_what_the_plain_drafter_accepts(
    name: str, shape: tuple[int, int, int]
) -> None:
    make, aux = HEADS[name]
    target = trained_target()
    plain = PlainHead.read(make(), target.tensors, torch.float32)
    expected = plain_accept_length(plain, target, aux, shape, prompts(), COUNT)
    served = served_accept_length(make(), target, shape, prompts(), COUNT)
    print(f"{name} {shape}: accept length {served:.3f}, plain drafter {expected:.3f}")
    assert served >= 2.0
    assert served == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("suffix", [".pt", ".json"])
def test_a_token_map_keeps_the_accept_length_of_the_tokens_that_it_names(suffix: str, tmp_path: Path) -> None:
    token_map = tmp_path / f"freq{suffix}"
    if suffix == ".pt":
        torch.save(torch.tensor(TOKEN_MAP), token_map)
    else:
        token_map.write_text(json.dumps(TOKEN_MAP[::-1]))
    target, shape = trained_target(), SHAPES[0]
    plain = PlainHead.read(trained_heads.eagle2(), target.tensors, torch.float32).cut(TOKEN_MAP)
    expected = plain_accept_length(plain, target, [], shape, prompts(), COUNT)
    served = served_accept_length(
        trained_heads.eagle2(), target, shape, prompts(), COUNT, speculative_token_map=token_map
    )
    full = served_accept_length(trained_heads.eagle2(), target, shape, prompts(), COUNT)
    print(f"token map: accept length {served:.3f}, plain drafter {expected:.3f}, full vocabulary {full:.3f}")
    assert served >= 2.0
    assert served == pytest.approx(expected, rel=0.02)
    assert served < full


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=0.8", "T=1.2, top_p=0.9"])
@pytest.mark.parametrize("name", HEADS)
def test_sampled_output_is_that_of_plain_decoding(name: str, sampling: SamplingParams) -> None:
    decoder = load_toy(trained_target().folder)
    given = {"draft": HEADS[name][0](), "device": str(DEVICE), "kv_tokens": 4096}
    harness = make_harness(decoder, drafter_beside(decoder, DraftSettings.load(given)))
    starts = prompts(6, seed=5)
    for index, start in enumerate(starts):
        harness.submit(start, 20, request_id=str(index), shape=SHAPES[0], sampling=sampling)
    harness.run()
    for index, start in enumerate(starts):
        plain = generate_plain(decoder, NoDrafter(), start, 20, sampling=sampling)
        assert_same_tokens(decoder, start, plain, harness.sink.tokens[str(index)], sampling)
