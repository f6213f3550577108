"""The parity check at start refuses planted faults in every type, and accepts rounding and near-ties."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models import generic_models
from support.models.family_models import CASES, save
from support.models.toys import make_toy_target
from support.outputs.parity_faults import FAULTS, check, planted, random_model, runner_of

from outrider.kernels._fp8 import FP8
from outrider.services.target import app
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup import parity_check
from outrider.shared.attn.deterministic import DeterministicAttention
from outrider.shared.base.errors import UnavailableError
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.deterministic import deterministic
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.nn.open import load_decoder
from outrider.shared.nn.quantized import RoundedLinear, quantize_decoder

torch.set_num_threads(1)
SEEDS = 8


def fp8_products(seed: int, layers: int = 6) -> Decoder:
    decoder = random_model(seed, "cpu", torch.bfloat16, layers=layers)
    quantize_decoder(decoder)
    return decoder


def fp8_cache(seed: int, layers: int = 6) -> Decoder:
    decoder = random_model(seed, "cpu", torch.bfloat16, layers=layers)
    decoder.kv_dtype = FP8
    return decoder


def fp8_as_on_a_gpu(seed: int, layers: int = 6) -> Decoder:
    """Return a model that rounds activations to 8 bits only in passes of more than two rows."""
    decoder = fp8_products(seed, layers)
    for layer in decoder.layers:
        for block, names in ((layer.attention, ("qkv", "o")), (layer.mlp, ("gate_up", "down"))):
            for name in names:
                setattr(block, name, _WideInFewRows(getattr(block, name)))
    return decoder


class _WideInFewRows(RoundedLinear):
    """An FP8 product that does not round the activations of one or two rows."""

    def __init__(self, linear: RoundedLinear) -> None:
        for slot in (*Linear.__slots__, *RoundedLinear.__slots__):
            if hasattr(linear, slot):
                setattr(self, slot, getattr(linear, slot))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            return super().__call__(x)
        return (self._wide(x.float()) * self._scale).to(x.dtype)


KINDS: dict[str, Callable[..., Decoder]] = {
    "fp32": lambda seed, **more: random_model(seed, "cpu", torch.float32, **more),
    "bf16": lambda seed, **more: random_model(seed, "cpu", torch.bfloat16, **more),
    "fp8 products": fp8_products,
    "fp8 products as on a GPU": fp8_as_on_a_gpu,
    "fp8 cache": fp8_cache,
}


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_accepted(kind: str) -> None:
    for seed in range(SEEDS):
        runner = runner_of(KINDS[kind](seed))
        result = check(runner)
        assert result is not None
        assert result.passed
        assert runner.pool.allocator.held_pages == 0


@pytest.mark.parametrize("kind", ["bf16", "fp8 products", "fp8 products as on a GPU"])
def test_rounding_of_a_deep_model_is_accepted(kind: str) -> None:
    result = check(runner_of(KINDS[kind](1, layers=32)))
    assert result is not None
    assert result.passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_every_family_is_accepted_and_checked(
    case: str, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = save(case, tmp_path_factory.getbasetemp() / "families")
    runner = runner_of(load_decoder(path, "cpu", dtype))
    result = check(runner)
    assert result is not None
    assert result.passed
    with planted(runner, FAULTS["no mask"]), pytest.raises(UnavailableError):
        check(runner)


@pytest.mark.parametrize("case", generic_models.CASES)
def test_every_model_of_transformers_is_accepted_and_checked(
    case: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = generic_models.save(case, tmp_path_factory.getbasetemp() / "generic")
    runner = runner_of(load_decoder(path, "cpu", torch.bfloat16))
    result = check(runner)
    assert result is not None
    assert result.passed
    with planted(runner, FAULTS["no mask"]), pytest.raises(UnavailableError):
        check(runner)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault_is_refused(kind: str, fault: str) -> None:
    for layers in (2, 6):
        # The faults of this seed stand far above the rounding of every kind, also on other processors.
        runner = runner_of(KINDS[kind](0, layers=layers))
        with (
            planted(runner, FAULTS[fault]),
            pytest.raises(UnavailableError, match="explains at most") as error,
        ):
            check(runner)
        assert error.value.reason == "parity_check_failed"
        assert runner.pool.allocator.held_pages == 0


@pytest.mark.parametrize(
    "limits", [{"slots": 1}, {"slots": 1, "max_nodes": 4}, {"max_packed_rows": 8}], ids=str
)
def test_low_limits_of_rounds_leave_a_check_that_can_fail(limits: dict[str, int]) -> None:
    runner = runner_of(KINDS["bf16"](3))
    result = check(runner, **limits)
    assert result is not None
    assert result.passed
    with planted(runner, FAULTS["no mask"]), pytest.raises(UnavailableError, match="a node of depth"):
        check(runner, **limits)


@pytest.mark.parametrize("limits", [{"slots": 1, "max_nodes": 1}, {"max_nodes": 1}], ids=str)
def test_rounds_without_room_for_trees_are_checked_too(limits: dict[str, int]) -> None:
    runner = runner_of(KINDS["bf16"](3))
    result = check(runner, **limits)
    assert result is not None
    assert result.passed
    fault = FAULTS["the newest token is invisible in rounds without trees"]
    with planted(runner, fault), pytest.raises(UnavailableError, match="explains at most"):
        check(runner, **limits)


def test_an_error_in_a_round_without_a_tree_names_no_depth() -> None:
    runner = runner_of(KINDS["bf16"](3))
    fault = FAULTS["doubled attention scale in rounds without trees"]
    with planted(runner, fault), pytest.raises(UnavailableError, match="of a sequence without a tree by"):
        check(runner)


@pytest.mark.parametrize("kind", KINDS)
def test_near_ties_are_accepted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of tokens, or all tokens, have the same logit: rounding alone decides which is larger."""
    for copies in (2, 512):
        decoder = KINDS[kind](5)
        logits = decoder.logits

        def tied(hidden: torch.Tensor, copies: int = copies, logits: object = logits) -> torch.Tensor:
            return logits(hidden)[:, : 512 // copies].repeat(1, copies)  # type: ignore[operator]

        monkeypatch.setattr(decoder, "logits", tied)
        result = check(runner_of(decoder))
        assert result is not None
        assert result.passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_kernels_must_give_equal_bits(dtype: torch.dtype) -> None:
    decoder = deterministic(random_model(2, "cpu", dtype))
    runner = runner_of(decoder, DeterministicAttention())
    assert check(runner) is None
    forward, calls = decoder.forward, 0

    def nudged(*arguments: object) -> object:
        nonlocal calls
        output = forward(*arguments)  # type: ignore[arg-type]
        batch = runner.attention.batch
        if batch is not None and batch.ancestors is not None:
            calls += 1
            output.aux[0, 0] = torch.nextafter(output.aux[0, 0], output.aux.new_tensor(float("inf")))
        return output

    decoder.forward = nudged  # type: ignore[assignment, method-assign]
    with pytest.raises(UnavailableError, match="must yield the bits") as error:
        check(runner)
    assert error.value.reason == "parity_check_failed"
    assert calls == 2, "two rounds have trees"


def test_an_unlucky_prompt_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(KINDS["bf16"](3))
    compare, prompts = parity_check._compare, 0

    def unlucky(passes: object, limits: object) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal prompts
        found, bound = compare(passes, limits)  # type: ignore[arg-type]
        found[0, prompts % 4, 3] = 1.0
        prompts += 1
        return found, bound

    monkeypatch.setattr(parity_check, "_compare", unlucky)
    result = check(runner)
    assert result is not None
    assert result.passed
    assert prompts == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_invalid_logits_are_refused(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = KINDS["fp32"](4)
    logits = decoder.logits
    monkeypatch.setattr(
        decoder, "logits", lambda hidden: logits(hidden).index_fill(1, torch.tensor([7]), value)
    )
    runner = runner_of(decoder)
    with pytest.raises(UnavailableError) as error:
        check(runner)
    assert error.value.reason == "nan_logits"
    assert runner.pool.allocator.held_pages == 0


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_random_weights_starts_in_fp8(
    options: dict[str, str], dtype: str, tmp_path: Path
) -> None:
    folder = make_toy_target(tmp_path / "target", vocab_size=64, seed=3)
    values = {"model": folder, "device": "cpu", "dtype": dtype, "kv_tokens": 4096, **options}
    app.Target(TargetSettings.load(values)).shutdown()
