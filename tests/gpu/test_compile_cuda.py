"""Tests of `--enable-torch-compile` on a GPU: compiled modules produce the same text, also in graphs."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from support.engine.target_harness import (
    FakeDrafter,
    assert_same_tokens,
    generate_plain,
    make_harness,
    oracle_plan,
)
from support.models import generic_models

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.numerics import prepare_decoder
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.open import load_decoder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
PROMPT = [5, 9, 2, 33, 7]
COUNT = 30


@pytest.mark.parametrize("case", ["granite", "phi3"])
def test_text_is_that_of_uncompiled_modules(tmp_path: Path, case: str) -> None:
    path = generic_models.save(case, tmp_path)
    plain_decoder = load_decoder(path, "cuda", torch.float32)
    plain = generate_plain(plain_decoder, NoDrafter(), PROMPT, COUNT)
    settings = TargetSettings(model=path, device="cuda", enable_torch_compile=True)
    settings.check()
    calls = 0
    real = torch.compile

    def counting(run, **options):  # type: ignore[no-untyped-def]
        made = real(run, **options)

        def called(*arguments, **more):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            return made(*arguments, **more)

        return called

    with mock.patch.object(torch, "compile", counting):
        decoder = prepare_decoder(settings, load_decoder(path, "cuda", torch.float32))
    cache = GraphCache(decoder.device)
    drafter = FakeDrafter(oracle_plan([PROMPT + plain], generic_models.VOCAB, 0.7))
    harness = make_harness(decoder, drafter, graphs=cache, plan=LoopPlan(lookahead=1))
    harness.submit(PROMPT, COUNT, request_id="on", shape=(4, 3, 10))
    harness.submit(PROMPT, COUNT, request_id="off", mode=SpeculationMode.OFF)
    harness.run()
    for name in ("on", "off"):
        assert_same_tokens(plain_decoder, PROMPT, plain, harness.sink.tokens[name])
    assert calls > 0
    assert cache.keys, "compiled modules must be captured"
