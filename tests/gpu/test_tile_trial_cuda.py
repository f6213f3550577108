"""Tests of the tile trial at startup on a GPU: chosen tiles are stored, found again, and compute right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from outrider.kernels.skinny_gemm import choose_tile
from outrider.kernels.skinny_gemm.kept import read_tiles, tiles_file
from outrider.kernels.skinny_gemm.table import device_name, forget_trials
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.numerics import prepare_decoder
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.dummy import random_decoder
from outrider.shared.nn.fused.trial import ROW_COUNTS, try_products

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
SIZES: dict[str, Any] = {
    "vocab_size": 2003,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}
FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "vocab_size": 1003}
BF16 = torch.bfloat16
PLENTY_S = 600.0


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Store tiles in the test's own folder. Compiled kernels stay where they are."""
    compiled = knobs.cache.dir
    monkeypatch.setattr(
        "outrider.shared.nn.fused.trial.tiles_file", lambda name: tmp_path / tiles_file(name).name
    )
    forget_trials()
    yield
    forget_trials()
    assert knobs.cache.dir == compiled


def _decoder(family: str, dtype: torch.dtype = BF16) -> Decoder:
    return random_decoder(
        ModelConfig.parse({**SIZES, "model_type": family, "architectures": [FAMILIES[family]]}), DEVICE, dtype
    )


@pytest.mark.parametrize(("family", "dtype"), [("llama", BF16), ("qwen3", BF16), ("llama", torch.float16)])
def test_every_product_is_measured_and_its_tile_computes_it(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    decoder = _decoder(family, dtype)
    assert decoder.fused is not None
    uses = decoder.fused.uses()
    tried = try_products(uses, DEVICE, PLENTY_S)
    assert len(tried) == len(uses) * len(ROW_COUNTS)
    assert all(entry.microseconds > 0 and entry.library is not None for entry in tried)
    assert read_tiles(tmp_path / tiles_file(device_name(DEVICE)).name) == tried
    for use in uses:
        weight = use.linears[0].weight
        for entry in tried:
            if entry.product != use.of(entry.product.rows):
                continue
            rows = entry.product.rows
            assert (
                choose_tile(
                    use.epilogue, torch.empty(rows, weight.shape[1], dtype=dtype, device=DEVICE), weight
                )
                == entry.tile
            )


def test_small_matrices_are_not_worth_a_trial() -> None:
    decoder = random_decoder(
        ModelConfig.parse({**SIZES, **SMALL, "model_type": "llama", "architectures": [FAMILIES["llama"]]}),
        DEVICE,
        BF16,
    )
    assert decoder.fused is not None
    assert try_products(decoder.fused.uses(), DEVICE, PLENTY_S) == []


def test_a_later_start_tries_nothing_and_chooses_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = _decoder("llama")
    assert decoder.fused is not None
    first = try_products(decoder.fused.uses(), DEVICE, PLENTY_S)
    forget_trials()
    monkeypatch.setattr("outrider.shared.nn.fused.trial._run", _must_not_run)
    assert {entry.product: entry for entry in try_products(decoder.fused.uses(), DEVICE)} == {
        entry.product: entry for entry in first
    }


def test_what_there_was_no_time_for_is_tried_at_the_next_start() -> None:
    decoder = _decoder("llama")
    assert decoder.fused is not None
    assert try_products(decoder.fused.uses(), DEVICE, 0.0) == []
    assert len(try_products(decoder.fused.uses(), DEVICE, PLENTY_S)) == len(decoder.fused.uses()) * len(
        ROW_COUNTS
    )


@pytest.mark.parametrize(
    "values", [{}, {"quantization": "fp8"}, {"disable_tile_trial": True}, {"deterministic": True}], ids=str
)
def test_a_start_tries_tiles_unless_it_is_told_not_to(values: dict[str, object], tmp_path: Path) -> None:
    prepare_decoder(TargetSettings.load({"model": tmp_path, "device": "cuda", **values}), _decoder("llama"))
    tries = not values.keys() & {"disable_tile_trial", "deterministic"}
    assert (tmp_path / tiles_file(device_name(DEVICE)).name).exists() == tries


def _must_not_run(*_: object) -> None:
    raise AssertionError("everything is known")
