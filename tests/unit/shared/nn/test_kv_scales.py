"""FP8 cache scales in checkpoints: K/V beyond e4m3's range stay accurate, and other caches keep every bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.parallel_ranks import load_ranks, on_all
from support.models import family_models

from outrider.services.doctor.pair import expected_of
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.numerics import prepare_attention, prepare_decoder
from outrider.shared.attn.base import build_batch
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.open import load_decoder, read_model_config

TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 79]
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3-bias", "gpt-oss"]
LARGE = 2.0**14
"""Factor by which keys and values are enlarged: far beyond e4m3's maximum of 448."""

Tensors = dict[str, torch.Tensor]


def change(folder: Path, tensors: Callable[[Tensors], Tensors]) -> Path:
    file = folder / "model.safetensors"
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors(load_file(str(file))).items()}, str(file)
    )
    return folder


def enlarge(tensors: Tensors) -> Tensors:
    """Return weights that compute the same function with larger keys and values."""
    normed = any(".k_norm." in name for name in tensors)
    factors = {".v_proj.weight": LARGE, ".v_proj.bias": LARGE, ".o_proj.weight": 1 / LARGE}
    if normed:
        factors |= {".k_norm.weight": LARGE, ".q_norm.weight": 1 / LARGE}
    else:
        factors |= {
            f".{part}_proj.{kind}": by
            for part, by in (("k", LARGE), ("q", 1 / LARGE))
            for kind in ("weight", "bias")
        }
    ends = {
        name: next((factor for end, factor in factors.items() if name.endswith(end)), 1.0) for name in tensors
    }
    return {name: tensor * ends[name] for name, tensor in tensors.items()}


def with_scales(
    spelling: str = "{0}_scale", value: float = 0.9 * LARGE, shape: tuple[int, ...] = ()
) -> Callable[[Tensors], Tensors]:
    """Return a function that adds scales. They are slightly below `LARGE`, the next power of two."""
    names = [
        f"model.layers.{layer}.self_attn.{spelling.format(part)}"
        for layer in range(family_models.LAYERS)
        for part in "kv"
    ]
    return lambda tensors: tensors | {name: torch.full(shape, value) for name in names}


def logits(folder: Path, **settings: Any) -> torch.Tensor:
    return run(
        load_decoder(folder, "cpu"), TargetSettings.load({"model": folder, "device": "cpu", **settings})
    )


def run(decoder: Decoder, settings: TargetSettings) -> torch.Tensor:
    prepare_decoder(settings, decoder)
    attention = prepare_attention(settings, decoder)
    pool = decoder.make_pool(4, 16)
    lease = pool.lease(len(TOKENS))
    assert lease is not None
    attention.plan(build_batch(pool, [lease], [0], [len(TOKENS)]))
    ids = torch.tensor(TOKENS)
    return decoder.logits(decoder.forward(ids, torch.arange(len(TOKENS)), attention, pool).hidden)


@pytest.mark.parametrize("family", FAMILIES)
def test_large_keys_and_values_are_kept_in_fp8(tmp_path: Path, family: str) -> None:
    usual = logits(family_models.save(family, tmp_path / "usual"), kv_cache_dtype="fp8_e4m3")
    large = change(family_models.save(family, tmp_path / "large"), enlarge)
    assert not torch.allclose(logits(large, kv_cache_dtype="fp8_e4m3"), usual, atol=0.05), (
        "without scales they are cut off"
    )
    change(large, with_scales())
    torch.testing.assert_close(logits(large, kv_cache_dtype="fp8_e4m3"), usual, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3-bias"])
def test_ranks_of_a_spread_model_scale_their_heads_like_one_process(tmp_path: Path, family: str) -> None:
    large = change(change(family_models.save(family, tmp_path), enlarge), with_scales())
    want, wide = logits(large, kv_cache_dtype="fp8_e4m3"), logits(large)
    settings = TargetSettings(model=large, device="cpu", tp=2, kv_cache_dtype="fp8_e4m3")
    ranks = load_ranks(large, 2)
    columns = on_all(ranks, lambda rank: run(rank, settings))
    got = torch.cat(columns, dim=1)[:, : want.shape[1]]
    family_models.assert_near(got, want, 1e-3)
    assert float((got - wide).norm() / wide.norm()) > 0.01, "rounding must have an effect"
    assert [rank.token_bytes() for rank in ranks] == [
        load_decoder(large, "cpu").token_bytes() // 8
    ] * 2  # half the heads, and a quarter of the bits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wide_cache_keeps_every_bit(tmp_path: Path, family: str) -> None:
    folder = family_models.save(family, tmp_path)
    plain = logits(folder)
    change(folder, with_scales(value=0.013))
    assert torch.equal(logits(folder), plain)


@pytest.mark.parametrize("spelling", ["{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_every_spelling_of_the_scales_is_found(tmp_path: Path, spelling: str, shape: tuple[int, ...]) -> None:
    usual = logits(family_models.save("llama", tmp_path / "usual"), kv_cache_dtype="fp8_e4m3")
    large = change(
        change(family_models.save("llama", tmp_path / "large"), enlarge), with_scales(spelling, shape=shape)
    )
    assert torch.equal(logits(large, kv_cache_dtype="fp8_e4m3"), usual)
    with CheckpointReader(large) as reader:
        assert set(expected_of(reader, read_model_config(large)).shapes) == set(reader.names), (
            "the doctor accepts them too"
        )


@pytest.mark.parametrize(
    ("value", "shape"), [(0.0, ()), (-1.0, ()), (float("nan"), ()), (float("inf"), (1,)), (1.0, (2,))]
)
def test_an_invalid_scale_is_refused(tmp_path: Path, value: float, shape: tuple[int, ...]) -> None:
    folder = change(family_models.save("llama", tmp_path), with_scales(value=value, shape=shape))
    with pytest.raises(CheckpointError, match="scale") as refused:
        load_decoder(folder, "cpu")
    assert refused.value.field == "model.layers.0.self_attn.k_scale"


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor"}


@pytest.mark.parametrize(
    ("section", "served"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}, True),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": SCHEME}, True),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {}},
                "kv_cache_scheme": SCHEME,
            },
            False,
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": SCHEME}, False),
        ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": None}, False),
        ({"quant_method": "other", "kv_cache_scheme": SCHEME}, False),
    ],
)
def test_a_checkpoint_with_only_a_quantized_cache_is_served(
    tmp_path: Path, section: dict[str, Any], served: bool
) -> None:
    folder = change(family_models.save("llama", tmp_path), with_scales())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    if served:
        read_model_config(folder)
    else:
        with pytest.raises(CheckpointError, match="quantized weights"):
            read_model_config(folder)


def test_fp16_models_ignore_the_scales(tmp_path: Path) -> None:
    folder = change(family_models.save("llama", tmp_path), with_scales(value=1 / LARGE))
    stored = load_file(str(folder / "model.safetensors"))["model.layers.0.self_attn.o_proj.weight"]
    attention: Any = load_decoder(folder, "cpu", torch.float16).layers[0].attention
    assert torch.equal(attention.o.weight, stored.half())
