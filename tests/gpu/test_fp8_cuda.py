"""Tests of FP8 on a GPU: the cache with Triton kernels, and products and cache in a whole decoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fp8_cases import check_attention, check_compact, check_store
from support.engine.target_harness import make_harness
from support.models.toys import make_toy_target

from outrider.bench.measure.perplexity import measure_perplexity
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.numerics import prepare_attention, prepare_decoder
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.nn.open import load_decoder

pytestmark = pytest.mark.gpu

PROMPT = [3, 14, 15, 9, 26, 5]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(
        tmp_path_factory.mktemp("target"),
        hidden_size=256,
        intermediate_size=512,
        head_dim=64,
        seed=5,
        planted=2.5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache(dtype: torch.dtype) -> None:
    check_store("cuda", dtype)
    check_compact("cuda")
    check_attention("cuda", dtype)


PRODUCTS, CACHE = {"quantization": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}


@pytest.mark.parametrize("values", [PRODUCTS, CACHE, {**PRODUCTS, **CACHE}])
def test_a_target_with_fp8(target_dir: Path, values: dict[str, str]) -> None:
    """The FP8 model ranks tokens like the bf16 model, and serves."""
    settings = TargetSettings(model=target_dir, device="cuda", **values)  # type: ignore[arg-type]
    settings.check()
    plain = make_harness(load_decoder(target_dir, "cuda"), NoDrafter(torch.device("cuda")))
    plain.submit(PROMPT, 100, request_id="r", mode=SpeculationMode.OFF)
    plain.run()
    text = [PROMPT + plain.sink.tokens["r"]]
    decoder = prepare_decoder(settings, load_decoder(target_dir, "cuda"))
    expected, found = (
        measure_perplexity(load_decoder(target_dir, "cuda"), text),
        measure_perplexity(decoder, text),
    )
    assert found != expected, "FP8 must change the result"
    assert found == pytest.approx(expected, rel=0.05)
    harness = make_harness(decoder, NoDrafter(decoder.device))
    harness.runner.attention = prepare_attention(settings, decoder)
    harness.submit(PROMPT, 60, request_id="r", mode=SpeculationMode.OFF)
    harness.run()
    assert len(harness.sink.tokens["r"]) == 60
