"""The parity check on a GPU: random weights in bf16 and FP8 start, and planted faults are refused."""

from __future__ import annotations

import pytest
import torch
from support.outputs.parity_faults import FAULTS, check, planted, random_model, runner_of

from outrider.services.target.model.model_runner import ModelRunner
from outrider.shared.attn.deterministic import DeterministicAttention
from outrider.shared.base.errors import UnavailableError
from outrider.shared.nn.deterministic import deterministic
from outrider.shared.nn.quantized import quantize_decoder

pytestmark = pytest.mark.gpu

KINDS = ["fp32", "fp16", "bf16", "fp8 products", "fp8 cache", "fp8 products and cache"]
TYPES = {"fp32": torch.float32, "fp16": torch.float16}


def runner(kind: str, seed: int, layers: int = 8) -> ModelRunner:
    """Return a runner on a random model that is large enough for fused kernels."""
    decoder = random_model(seed, "cuda", TYPES.get(kind, torch.bfloat16), layers=layers, hidden=1024)
    if "products" in kind:
        quantize_decoder(decoder)
    if "cache" in kind:
        decoder.kv_dtype = torch.float8_e4m3fn
    return runner_of(decoder)


@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_are_accepted(kind: str) -> None:
    for seed in range(8):
        result = check(runner(kind, seed))
        assert result is not None
        assert result.passed
        print(f"{kind}: error {result.error:.2e}, bound {result.bound:.2e}, stage {result.stage}")


@pytest.mark.parametrize("kind", ["bf16", "fp8 products"])
def test_a_deep_model_is_accepted(kind: str) -> None:
    result = check(runner(kind, 1, layers=48))
    assert result is not None
    assert result.passed


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault_is_refused(kind: str, fault: str) -> None:
    target = runner(kind, 3)
    with planted(target, FAULTS[fault]), pytest.raises(UnavailableError) as error:
        check(target)
    assert error.value.reason == "parity_check_failed"


def test_deterministic_kernels_have_equal_bits() -> None:
    decoder = deterministic(random_model(2, "cuda", torch.bfloat16, hidden=1024))
    assert check(runner_of(decoder, DeterministicAttention())) is None
