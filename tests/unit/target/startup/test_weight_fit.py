"""Tests that a model too large for the GPU is refused before loading, with its size and possible fixes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import family_models, generic_models
from support.models.generic_models import VOCAB
from support.models.toys import make_toy_target

from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup import numerics, weight_fit
from outrider.services.target.startup.weight_fit import WeightSizes, check_weights_fit
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn import open as open_model
from outrider.shared.nn.open import load_decoder
from outrider.shared.nn.quantized import fp8_rounding, quantize_decoder

BF16 = torch.bfloat16
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=128, tie_word_embeddings=False)


def refusal(monkeypatch: pytest.MonkeyPatch, folder: Path, free: int, **values: object) -> str:
    """Return the refusal of a start on a GPU with `free` free bytes."""
    monkeypatch.setattr(weight_fit, "gpu_memory", lambda device: (free, 2 * free))
    with pytest.raises(ConfigurationError) as refused:
        check_weights_fit(TargetSettings.load({"model": folder, "device": "cuda:0", **values}))
    assert refused.value.field == "device"
    return refused.value.message


def mib(message: str, pattern: str) -> float:
    return float(re.search(pattern + r" ?\(?([0-9.]+) MiB", message)[1])  # type: ignore[index]


@pytest.mark.parametrize("rounded", [False, True])
def test_sizes_from_headers_are_those_of_the_loaded_model(model: Path, rounded: bool) -> None:
    decoder = load_decoder(model, CPU, BF16)
    if rounded:
        decoder.quantize_fp8()
    size = WeightSizes(model, BF16).of_rank(rounded=rounded)
    assert size == pytest.approx(decoder.weight_bytes, rel=0.01), "norms and the scales of the head are small"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_that_is_wide_until_it_is_rounded_is_counted(
    model: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = load_decoder(model, CPU, BF16).layers[0]
    wide = layer.attention.nbytes + layer.mlp.nbytes
    sizes = WeightSizes(model, BF16)
    held, needed = sizes.of_rank(ranks, rounded=True), sizes.while_loading(ranks, rounded=True)
    assert needed - held == pytest.approx(wide / ranks, rel=0.01)
    assert sizes.while_loading(ranks) == sizes.of_rank(ranks)
    message = refusal(monkeypatch, model, needed - 1, quantization="fp8", **({"tp": 2} if ranks == 2 else {}))
    assert "as FP8" in message
    assert mib(message, "its weights need") == pytest.approx(needed / 2**20, abs=0.06)


def test_a_rank_needs_memory_for_its_share_only(model: Path) -> None:
    sizes = WeightSizes(model, BF16)
    whole, half = sizes.of_rank(), sizes.of_rank(2)
    table = 2 * 128 * sizes.config.hidden_size
    assert half == pytest.approx((whole - table) / 2 + table, rel=0.01), "every rank has the embedding"
    assert not sizes.can_split(3)


def test_needs_and_fixes_are_reported_before_anything_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numerics, "load_decoder", lambda *_: pytest.fail("was loaded"))
    sizes = WeightSizes(model, BF16)
    needed = sizes.of_rank()
    monkeypatch.setattr(weight_fit, "gpu_memory", lambda device: (needed - 1, needed))
    with pytest.raises(ConfigurationError):
        numerics.load_target_model(TargetSettings.load({"model": model, "device": "cuda:0"}))
    message = refusal(monkeypatch, model, needed - 1)
    assert mib(message, "its weights need") == pytest.approx(needed / 2**20, abs=0.06)
    assert "as bfloat16, and cuda:0 has" in message
    assert mib(message, "cuda:0 has") == pytest.approx((needed - 1) / 2**20, abs=0.06)
    assert mib(message, "--tp 2") == pytest.approx(sizes.of_rank(2) / 2**20, abs=0.06)
    assert mib(message, "--quantization fp8") == pytest.approx(
        sizes.while_loading(rounded=True) / 2**20, abs=0.06
    )
    assert "--dtype" not in message
    assert "--dtype bfloat16" in refusal(monkeypatch, model, needed, dtype="float32")


def test_only_fixes_that_fit_are_suggested(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = WeightSizes(model, BF16)
    least = min(sizes.of_rank(ranks) for ranks in (2, 4, 8) if sizes.can_split(ranks))
    free = min(least, sizes.while_loading(rounded=True)) - 1
    both = next(ranks for ranks in (2, 4, 8) if sizes.while_loading(ranks, rounded=True) <= free)
    assert f"--tp {both} with --quantization fp8" in refusal(monkeypatch, model, free)
    message = refusal(monkeypatch, model, 1000)
    assert "Possible fixes: use another device, or stop other processes on this one." in message


def test_fp8_is_not_suggested_for_models_without_fp8_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family_models.save("mixtral", tmp_path)
    message = refusal(monkeypatch, folder, WeightSizes(folder, BF16).of_rank() - 1)
    assert "--tp 2" in message
    assert "--quantization" not in message


def test_running_out_of_memory_while_loading_reports_the_need(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(open_model, "_load", full)
    with pytest.raises(ConfigurationError, match=r"its weights need [0-9.]+ MiB as bfloat16") as caught:
        load_decoder(model, CPU, BF16)
    assert caught.value.field == "device"
    with pytest.raises(
        ConfigurationError, match=r"even with layers that are quantized as they are loaded"
    ) as caught:
        load_decoder(model, CPU, BF16, on_layer=lambda layer: None)
    assert "smaller dtype" not in caught.value.message


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_rounding_while_loading_is_rounding_afterwards_bit_for_bit(model: Path, dtype: torch.dtype) -> None:
    after = load_decoder(model, CPU, dtype)
    quantize_decoder(after)
    wide: list[int] = []
    round_layer = fp8_rounding(after.config, CPU, dtype)

    def on_layer(layer: object) -> None:
        wide.append(layer.attention.qkv.nbytes + layer.mlp.down.nbytes)  # type: ignore[attr-defined]
        round_layer(layer)  # type: ignore[arg-type]
        wide.append(layer.attention.qkv.nbytes + layer.mlp.down.nbytes)  # type: ignore[attr-defined]

    during = load_decoder(model, CPU, dtype, on_layer=on_layer)
    assert len(wide) == 2 * len(during.layers)
    assert all(narrow < 0.6 * before for before, narrow in zip(wide[::2], wide[1::2], strict=True))
    quantize_decoder(during)
    assert during.fingerprint == after.fingerprint
    assert during.weight_bytes == after.weight_bytes
    rows = torch.randn(5, during.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    for one, other in zip(during.layers, after.layers, strict=True):
        assert torch.equal(one.attention.qkv(rows), other.attention.qkv(rows))
        assert torch.equal(one.mlp(rows, rows), other.mlp(rows, rows))
    assert torch.equal(during.logits(rows), after.logits(rows))


def test_no_layer_is_loaded_while_another_is_wide(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TargetSettings.load({"model": model, "device": "cpu", "quantization": "fp8"})
    loaded = []
    load_layer = open_model.load_layer

    def noted(source: object, *rest: object) -> object:
        assert all(layer.attention.qkv.rounded and layer.mlp.down.rounded for layer in loaded)
        layer = load_layer(source, *rest)
        if layer.attention.qkv._weight.device.type != "meta":  # headers are first checked on the meta device
            loaded.append(layer)
        return layer

    monkeypatch.setattr(open_model, "load_layer", noted)
    decoder = numerics.prepare_decoder(settings, numerics.load_target_model(settings))
    assert len(loaded) == decoder.config.num_layers > 1


def test_unused_tensors_of_a_transformers_model_are_not_counted(tmp_path: Path) -> None:
    folder = generic_models.save("starcoder2", tmp_path)
    plain = WeightSizes(folder, BF16).of_rank()
    (file,) = folder.glob("*.safetensors")
    stored = load_file(file)
    left = {"lm_head.weight": torch.zeros(VOCAB, 64), "mask": torch.zeros(4096, 4096)}
    save_file({**left, **stored}, file, {"format": "pt"})
    assert WeightSizes(folder, BF16).of_rank() - plain <= 2 * left["lm_head.weight"].numel()
    save_file(
        {**left, **{name.removeprefix("model."): tensor for name, tensor in stored.items()}},
        file,
        {"format": "pt"},
    )
    assert WeightSizes(folder, BF16).of_rank() >= plain + 2 * left["mask"].numel(), (
        "tensors with unknown names must count"
    )
