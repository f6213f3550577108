"""Tests of tile trials: every rank of a target uses the same tiles, and the bench can request a trial."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from outrider.kernels.skinny_gemm import Epilogue, Method, Tile
from outrider.kernels.skinny_gemm.kept import Tried
from outrider.kernels.skinny_gemm.table import Product, forget_trials, measured_tile
from outrider.services.cli.commands import app
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.numerics import prepare_decoder
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.dummy import random_decoder
from outrider.shared.parallel import tiles

CPU = torch.device("cpu")
GPU = "Some GPU"
TRIED = [
    Tried(
        Product(Epilogue.PLAIN, 1000 + rows, 512, rows, torch.bfloat16),
        Tile(Method.DOT, 32, 64, 2, 4, 5),
        4.25,
        5.0,
        6.5,
    )
    for rows in (1, 16, 64)
]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiles, "device_name", lambda device: GPU)
    forget_trials()
    yield
    forget_trials()


class _Line:
    """Collectives of two ranks: stores rank 0's broadcasts for the other rank."""

    size = 2

    def __init__(self, rank: int, sent: list[torch.Tensor]) -> None:
        self.rank = rank
        self._sent = sent

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.rank == 0:
            self._sent.append(tensor.clone())
        else:
            tensor.copy_(self._sent.pop(0))


@pytest.mark.parametrize("tried", [TRIED, TRIED[:1], []], ids=len)
def test_every_rank_chooses_what_rank_0_does(tried: list[Tried]) -> None:
    sent: list[torch.Tensor] = []
    assert tiles.spread_tiles(_Line(0, sent), tried, CPU) == tried  # type: ignore[arg-type]
    forget_trials()
    assert tiles.spread_tiles(_Line(1, sent), TRIED[::-1], CPU) == tried  # type: ignore[arg-type]
    assert sent == []
    for entry in TRIED:
        assert measured_tile(entry.product, GPU) == (entry.tile if entry in tried else None)


def test_on_a_cpu_there_is_nothing_to_try(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["bench", "kernels", "--tune", "--shape", "tiny", "--device", "cpu", "--output", str(tmp_path)]
    )
    assert result.exit_code != 0
    assert "--tune" in result.output + str(result.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "said"),
    [({}, "torch's operations"), ({"deterministic": True}, "torch's operations, row by row")],
)
def test_the_log_says_what_computes_the_layers(values: dict[str, object], said: str, tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    raw = {
        **sizes,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    decoder = random_decoder(ModelConfig.parse(raw), "cpu", torch.float32)
    decoder = prepare_decoder(TargetSettings.load({"model": tmp_path, "device": "cpu", **values}), decoder)
    assert decoder.computed_by == said
