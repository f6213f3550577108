"""Stored prefixes change nothing on a GPU: own kernels, FlashInfer, FP8 caches, windows, deterministic.

The test of FlashInfer needs the library and is marked `flashinfer` (see `test_flashinfer_cuda`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.target_harness import Harness, make_harness
from support.models.family_models import save
from support.models.toys import make_toy_target
from support.outputs.prefix_parity import ParityCase

from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.numerics import prepare_attention, prepare_decoder
from outrider.shared.nn.open import load_decoder
from outrider.shared.spec.drafter import Drafter

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FP8, DETERMINISTIC = {"kv_cache_dtype": "fp8_e4m3"}, {"deterministic": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "kernels": ("planted", {}),
    "window": ("mistral", {}),
    "latent": ("deepseek-v3", {}),
    "fp8 cache": ("planted", FP8),
    "deterministic": ("planted", DETERMINISTIC),
    "fp8 cache, deterministic": ("planted", {**FP8, **DETERMINISTIC}),
}
FLASHINFER: dict[str, tuple[str, dict[str, Any]]] = {
    "flashinfer": ("planted", {"attention_backend": "flashinfer", "dtype": "bfloat16"})
}


def case_of(family: str, values: dict[str, Any], folder: Path) -> ParityCase:
    planted = folder / "planted"
    if family == "planted" and not planted.is_dir():
        make_toy_target(
            planted, vocab_size=64, hidden_size=256, intermediate_size=512, head_dim=64, seed=5, planted=2.5
        )
    path = planted if family == "planted" else save(family, folder)
    settings = TargetSettings.load({"dtype": "float32", **values, "model": path, "device": "cuda"})
    settings.check()
    dtype = settings.torch_dtype()
    decoder = prepare_decoder(settings, load_decoder(path, "cuda", dtype))
    attention = prepare_attention(settings, decoder)

    def make(drafter: Drafter, **options: int) -> Harness:
        return make_harness(decoder, drafter, attention=attention, **options)

    # The planted models have no near-ties, so their tokens are equal in every dtype.
    return ParityCase(make, decoder, exact=settings.deterministic)


@pytest.mark.parametrize("name", CASES)
def test_hits_equal_misses(name: str, tmp_path: Path) -> None:
    case = case_of(*CASES[name], tmp_path)
    case.check_hits()
    case.check_preemption()


@pytest.mark.flashinfer
@pytest.mark.parametrize("name", FLASHINFER)
def test_hits_equal_misses_with_flashinfer(name: str, tmp_path: Path) -> None:
    case = case_of(*FLASHINFER[name], tmp_path)
    assert case.judge.dtype is torch.bfloat16
    case.check_hits()
    case.check_preemption()
