"""Tests the settings that change how the target computes, and the refusal of unsupported combinations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.engine.target_harness import FakeDrafter, Harness, make_harness, oracle_plan
from support.models import family_models, generic_models
from support.models.toys import make_toy_target
from typer.testing import CliRunner

import outrider.bench
from outrider.bench.measure.perplexity import cut_windows, measure_perplexity, read_texts
from outrider.services.cli.commands import app
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup import numerics
from outrider.services.target.startup.numerics import idle_preparation, prepare_attention, prepare_decoder
from outrider.shared.attn.create import waits_for_device
from outrider.shared.attn.deterministic import DeterministicAttention
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.nn.open import load_decoder
from outrider.shared.nn.quantized import RoundedLinear, quantize_decoder, round_rows
from outrider.shared.parallel.decoder import ShardedDecoder

HELD_OUT = Path(outrider.bench.__path__[0]) / "prompts" / "heldout.jsonl"
PROMPT = [3, 14, 15, 9, 26, 5]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(tmp_path_factory.mktemp("target"), seed=5, planted=2.5)


def settings_of(path: Path, **values: Any) -> TargetSettings:
    settings = TargetSettings(model=path, device="cpu", **values)
    settings.check()
    return settings


def serving(path: Path, drafter: NoDrafter | FakeDrafter | None = None, **values: Any) -> Harness:
    """Return an engine assembled as the target does it."""
    settings = settings_of(path, **values)
    decoder = prepare_decoder(settings, load_decoder(path, "cpu"))
    harness = make_harness(decoder, drafter or NoDrafter())
    harness.runner.attention = prepare_attention(settings, decoder)
    return harness


def generate(harness: Harness, tokens: int = 20, **options: Any) -> list[int]:
    harness.submit(PROMPT, tokens, request_id="r", **options)
    harness.run()
    assert "r" in harness.sink.finished
    return harness.sink.tokens["r"]


@pytest.mark.parametrize(
    "values",
    [
        {"deterministic": True},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"deterministic": True, "kv_cache_dtype": "fp8_e4m3", "quantization": "fp8"},
    ],
)
def test_every_option_serves_with_speculation_and_without(target_dir: Path, values: dict[str, Any]) -> None:
    plain = generate(serving(target_dir, **values), mode=SpeculationMode.OFF)
    assert plain[:3] == generate(serving(target_dir), mode=SpeculationMode.OFF)[:3], (
        "a planted rule must survive the rounding"
    )
    drafter = FakeDrafter(oracle_plan([PROMPT + plain], 64, 0.8))
    assert generate(serving(target_dir, drafter, **values), shape=(4, 2, 9)) == plain


def test_the_cache_takes_half_of_bf16_and_features_keep_their_type(target_dir: Path) -> None:
    decoder = load_decoder(target_dir, "cpu", torch.bfloat16)
    whole = decoder.token_bytes(64)
    decoder = prepare_decoder(settings_of(target_dir, kv_cache_dtype="fp8_e4m3"), decoder)
    assert decoder.token_bytes(64) - 128 == (whole - 128) // 2
    pool = decoder.make_pool(4, 16, 64)
    assert pool.bytes_per_token == decoder.token_bytes(64)
    assert {plane.dtype for plane in pool.k_planes + pool.v_planes} == {torch.float8_e4m3fn}
    assert pool.features is not None
    assert pool.features.dtype is torch.bfloat16
    assert isinstance(
        prepare_attention(settings_of(target_dir, kv_cache_dtype="fp8_e4m3"), decoder), KernelAttention
    )


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"deterministic": True, "tp": 2}, "deterministic"),
        ({"attention_backend": "flashinfer", "tp": 2}, "attention_backend"),
        ({"deterministic": True, "attention_backend": "reference"}, "attention_backend"),
        ({"kv_cache_dtype": "fp8_e4m3", "attention_backend": "reference"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8_e4m3", "attention_backend": "flashinfer"}, "kv_cache_dtype"),
        ({"overlap_schedule": "on", "attention_backend": "flashinfer"}, "overlap_schedule"),
        ({"overlap_schedule": "on", "disable_overlap_schedule": True}, "overlap_schedule"),
        ({"torch_compile_max_bs": 4}, "torch_compile_max_bs"),
        ({"tp_all_reduce": "one-shot"}, "tp_all_reduce"),
        ({"draft_rounds": "device"}, "draft_rounds"),
        ({"draft_rounds": "host", "draft": "unix:/d", "speculative_algorithm": "NONE"}, "draft_rounds"),
        ({"mem_fraction_static": 0.5}, "mem_fraction_static"),
    ],
)
def test_unsupported_combinations_are_refused(target_dir: Path, values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TargetSettings.load({"model": target_dir, "device": "cpu", **values}).check()
    assert caught.value.field == field


@pytest.mark.parametrize(
    "values",
    [
        {"overlap_schedule": "on"},
        {"torch_compile_max_bs": 4, "enable_torch_compile": True},
        {"tp_all_reduce": "one-shot", "tp": 2},
        {"draft_rounds": "device", "draft": "unix:/d"},
        {"mem_fraction_static": 0.5, "device": "cuda"},
    ],
)
def test_effective_options_are_accepted(
    target_dir: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    TargetSettings.load({"model": target_dir, "device": "cpu", **values}).check()


def test_tiles_are_tried_for_a_quarter_of_the_ranks_timeout_only_where_ranks_wait(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[float] = []
    monkeypatch.setattr(
        numerics, "try_products", lambda uses, device, budget_s: budgets.append(budget_s) or []
    )
    monkeypatch.setattr(numerics, "spread_tiles", lambda *_: None)
    fused = mock.Mock(uses=list)
    settings = settings_of(target_dir, tp_timeout_s=8.0)
    numerics._choose_tiles(settings, load_decoder(target_dir, "cpu"), fused)
    ranked = mock.Mock(spec=ShardedDecoder, device=torch.device("cpu"), collectives=mock.Mock(rank=0))
    numerics._choose_tiles(settings, ranked, fused)
    assert budgets == [numerics.BUDGET_S, 2.0]


def test_an_unknown_attention_backend_is_refused_with_the_valid_names() -> None:
    with pytest.raises(ConfigurationError, match=r"'auto', 'reference', 'triton' or 'flashinfer'") as caught:
        TargetSettings.load({"model": "m", "attention_backend": "fast"})
    assert caught.value.field == "attention_backend"


def test_flashinfer_fits_no_draft() -> None:
    with pytest.raises(ConfigurationError, match="Use auto, reference or triton") as caught:
        DraftSettings.load({"speculative_algorithm": "NGRAM", "attention_backend": "flashinfer"}).check()
    assert caught.value.field == "attention_backend"


def test_flashinfer_needs_a_gpu(target_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs a CUDA device"):
        serving(target_dir, attention_backend="flashinfer")


def test_backends_report_whether_they_wait_for_the_device(target_dir: Path) -> None:
    decoder = load_decoder(target_dir, "cpu")
    assert waits_for_device(prepare_attention(settings_of(target_dir), decoder))
    assert not waits_for_device(
        prepare_attention(settings_of(target_dir, attention_backend="triton"), decoder)
    )
    assert not waits_for_device(DeterministicAttention())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_products_are_those_of_rounded_operands(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 40, generator=generator), torch.randn(5, 40, generator=generator)
    x[3] *= 1e4  # each row has its own scale
    x[4] = 0
    bias, residual = (
        torch.randn(24, generator=generator).to(dtype),
        torch.randn(5, 24, generator=generator).to(dtype),
    )
    weight, x = weight.to(dtype), x.to(dtype)
    linear = RoundedLinear(Linear(weight.clone(), bias))
    (rows, row_scale), (columns, column_scale) = round_rows(x), round_rows(weight)
    assert rows.dtype is columns.dtype is torch.float8_e4m3fn
    expected = (rows.float() * row_scale) @ (columns.float() * column_scale).t() + bias.float()
    torch.testing.assert_close(
        linear(x).float(), expected, rtol=1e-2, atol=1e-4 if dtype is torch.float32 else 2e-2
    )
    torch.testing.assert_close(linear.plus(residual, x), residual + linear(x))
    torch.testing.assert_close(
        linear(x)[0].float(), (x @ weight.t())[0].float() + bias.float(), rtol=0.2, atol=0.5
    )
    assert linear.nbytes == 24 * 40 + 24 * 4


@pytest.mark.parametrize("case", ["mixtral", "deepseek-v2"])
def test_quantization_refuses_other_layers(tmp_path: Path, case: str) -> None:
    decoder = load_decoder(family_models.save(case, tmp_path), "cpu")
    with pytest.raises(ConfigurationError, match="unsupported kind") as caught:
        quantize_decoder(decoder)
    assert caught.value.field == "quantization"


GENERIC = sorted(generic_models.CASES)[0]


def test_compiled_modules_compute_the_same(tmp_path: Path) -> None:
    path = generic_models.save(GENERIC, tmp_path)
    plain = measure_perplexity(load_decoder(path, "cpu"), [PROMPT, PROMPT[:3]])
    decoder = load_decoder(path, "cpu")
    settings = settings_of(path, enable_torch_compile=True, torch_compile_max_bs=4)
    compiled = []
    real = torch.compile

    def counting(run: Any, **options: Any) -> Any:
        made = real(run, **options)

        def called(*arguments: Any, **more: Any) -> Any:
            compiled.append(arguments[0].shape[-2])
            return made(*arguments, **more)

        return called

    with mock.patch.object(torch, "compile", counting):
        decoder = prepare_decoder(settings, decoder)
    assert measure_perplexity(decoder, [PROMPT, PROMPT[:3]]) == pytest.approx(plain, rel=1e-4)
    assert set(compiled) == {3}, "six rows exceed the limit"


def test_compilation_is_refused_where_it_has_no_effect(target_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="decoder of its own") as caught:
        serving(target_dir, enable_torch_compile=True)
    assert caught.value.field == "enable_torch_compile"
    path = generic_models.save(GENERIC, tmp_path)
    with (
        mock.patch.object(shutil, "which", return_value=None),
        pytest.raises(ConfigurationError, match=r"C\+\+ compiler"),
    ):
        serving(path, enable_torch_compile=True)


def test_perplexity_matches_transformers(tmp_path: Path) -> None:
    path = family_models.save("llama", tmp_path)
    tokens = [*PROMPT, 1, 2, 3, 40, 50, 60]
    logits = family_models.reference_logits("llama", tokens)[:-1]
    expected = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(tokens[1:])).exp()
    assert measure_perplexity(load_decoder(path, "cpu"), [tokens]) == pytest.approx(float(expected), rel=1e-4)


def test_fp8_costs_little_perplexity(target_dir: Path) -> None:
    """Uses text that the model itself finds likely; random text would measure noise."""
    answers = [generate(serving(target_dir), 60, mode=SpeculationMode.OFF)]
    plain = measure_perplexity(load_decoder(target_dir, "cpu"), answers)
    for values in ({"quantization": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}):
        decoder = prepare_decoder(settings_of(target_dir, **values), load_decoder(target_dir, "cpu"))
        found = measure_perplexity(decoder, answers)
        assert found != plain, "rounding must change the result"
        assert found == pytest.approx(plain, rel=0.05)


def test_texts_are_cut_into_windows(tmp_path: Path) -> None:
    assert list(cut_windows([[1, 2, 3, 4, 5], [6], [7, 8, 9]], 2, 4)) == [[1, 2], [3, 4], [7, 8]]
    assert list(cut_windows([[1, 2, 3, 4, 5]], 8, 3)) == [[1, 2, 3, 4]]
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"question": "a?", "answer": "b."}) + "\n" + json.dumps({"text": "c"}))
    assert list(read_texts(file)) == ["a?\nb.", "c"]
    file.write_text("{}")
    with pytest.raises(ConfigurationError, match="line 1"):
        list(read_texts(file))


def test_the_command_measures_the_embedded_target(tmp_path: Path) -> None:
    arguments = [
        "bench",
        "perplexity",
        "--text",
        str(HELD_OUT),
        "--tokens",
        "60",
        "--device",
        "cpu",
        "--output",
        str(tmp_path),
    ]
    result = CliRunner().invoke(app, [*arguments, "--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3"])
    assert result.exit_code == 0, result.output
    plain, rounded = json.loads((tmp_path / "perplexity-cpu.json").read_text())["rows"]
    assert plain["tokens"] == rounded["tokens"] == 60
    assert rounded["increase_percent"] == pytest.approx(
        100 * (rounded["value"] / plain["value"] - 1), abs=1e-3
    )
    with pytest.raises(ConfigurationError, match="--quantization int4"):
        CliRunner().invoke(app, [*arguments, "--quantization", "int4"], catch_exceptions=False)


def test_the_bench_builds_a_target_with_these_settings(tmp_path: Path) -> None:
    sizes = [
        "--shape",
        "tiny",
        "--device",
        "cpu",
        "--prompt",
        "8",
        "--new-tokens",
        "6",
        "--repeats",
        "1",
        "--prefill",
        "none",
    ]
    arguments = [
        "bench",
        "latency",
        *sizes,
        "--rounds",
        "chain3@2.0",
        "--batch",
        "1",
        "--output",
        str(tmp_path),
    ]
    result = CliRunner().invoke(
        app, [*arguments, "--set", "deterministic=true", "--set", "kv_cache_dtype=fp8_e4m3"]
    )
    assert result.exit_code == 0, result.output
    assert [row["case"] for row in json.loads((tmp_path / "latency-cpu.json").read_text())["rows"]] == [
        "round chain 3, batch 1"
    ]


@pytest.mark.parametrize(
    ("device", "config", "kv_dtype", "prepared"),
    [
        ("cuda", {}, None, True),
        ("cuda", {"windows": (0, 64)}, None, True),
        ("cuda", {"windows": (64, 64)}, None, False),
        ("cuda", {"sinks": True}, None, False),
        ("cuda", {"latent": object()}, None, False),
        ("cuda", {}, torch.float8_e4m3fn, False),
        ("cpu", {}, None, False),
    ],
)
def test_the_library_for_prompts_is_prepared_for_models_it_supports(
    target_dir: Path, device: str, config: dict[str, Any], kv_dtype: torch.dtype | None, prepared: bool
) -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    fixed = {"latent": None, "sinks": False, "windows": (0, 0)}
    decoder: Any = SimpleNamespace(
        cached=SimpleNamespace(**{**sizes, **fixed, **config}),
        device=torch.device(device),
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
    )
    attention = KernelAttention()
    settings = settings_of(target_dir, prefill_chunk=2048)
    with mock.patch.object(numerics, "Library") as library:
        library.return_value.prepare.side_effect = lambda use: iter([use("chunks")])
        assert len(list(idle_preparation(settings, decoder, attention))) == prepared
    assert attention.chunks == ("chunks" if prepared else None)
    if prepared:
        library.assert_called_once_with(8, 2, 64, torch.bfloat16, torch.device("cuda"), 2048)


def test_deterministic_attention_never_uses_the_library() -> None:
    decoder: Any = SimpleNamespace(cached=None)
    assert not list(idle_preparation(mock.Mock(), decoder, DeterministicAttention()))
