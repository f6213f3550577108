"""Tests of FP8 products on several ranks: as accurate as on one process, and every product is in FP8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.parallel_ranks import load_ranks, on_all
from support.models.family_models import Sequences, save

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.layers.modules import Attention, GatedMLP
from outrider.shared.nn.open import load_decoder
from outrider.shared.nn.quantized import RoundedLinear, quantize_decoder
from outrider.shared.parallel.decoder import ShardedDecoder
from outrider.shared.parallel.linear import RowParallelLinear

torch.set_num_threads(1)
PROMPT = [(7 * place) % 31 for place in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def run(decoder: Decoder) -> torch.Tensor:
    return Sequences(decoder, 1).run([0], [PROMPT])[0]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("case", ["llama", "qwen3-bias"])
def test_ranks_round_as_finely_as_one_process(case: str, folder: Path) -> None:
    path = save(case, folder)
    plain = run(load_decoder(path))
    whole = load_decoder(path)
    quantize_decoder(whole)

    def rounded(decoder: ShardedDecoder) -> torch.Tensor:
        decoder.quantize()
        return run(decoder)

    ranks = load_ranks(path, 2)
    columns = on_all(ranks, rounded)
    got = torch.cat(columns, dim=1)[:, : plain.shape[1]]
    error = relative(run(whole), plain)
    assert error > 0.005, "rounding must be visible"
    assert 0.3 * error < relative(got, plain) < 1.5 * error
    for layer in ranks[1].layers:
        assert isinstance(layer.attention, Attention)
        assert isinstance(layer.mlp, GatedMLP)
        for linear in (layer.attention.o, layer.mlp.down):
            assert isinstance(linear, RowParallelLinear), "ranks must still sum"
            assert isinstance(linear.inner, RoundedLinear)
        assert isinstance(layer.attention.qkv, RoundedLinear)


@pytest.mark.parametrize("case", ["mixtral", "deepseek-v3"])
def test_experts_are_refused_and_still_sum(case: str, folder: Path) -> None:
    ranks = load_ranks(save(case, folder), 2)
    want = on_all(ranks, run)
    for rank in ranks:
        with pytest.raises(ConfigurationError, match="layers of an unsupported kind"):
            rank.quantize()
    assert all(torch.equal(got, before) for got, before in zip(on_all(ranks, run), want, strict=True))
