"""The fused decoder equals the layers' own operations in fp32, with references and interpreted kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.family_models import Sequences, assert_near, save

from outrider.kernels import skinny_gemm
from outrider.kernels._dispatch import Backend, force_backend
from outrider.kernels.add_norm import add_sums
from outrider.kernels.skinny_gemm import Epilogue, Method, Tile
from outrider.kernels.stream import ResidualStream
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.fused import FusedForward, blocks
from outrider.shared.nn.layers import linear
from outrider.shared.nn.open import load_decoder

AUX = (0, 2, 3)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def _pair(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Decoder, Decoder]:
    """Load a decoder twice: in the form for CPUs, and in the fused form for GPUs."""
    path = save(case, folder)
    plain = load_decoder(path)
    monkeypatch.setattr(linear, "can_pack", lambda weight: False)
    fused = load_decoder(path)
    fused.fused = FusedForward(fused.layers, fused.embedding, fused.norm, linear.Linear(fused.lm_head))
    return plain, fused


@pytest.mark.parametrize(
    "case", ["llama", "mistral-narrow", "qwen2-tied-yarn", "qwen3", "qwen3-bias", "mimo"]
)
@pytest.mark.parametrize("backend", list(Backend))
def test_a_prompt_then_a_tree(
    case: str, backend: Backend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fused = _pair(case, folder, monkeypatch)
    masks = torch.tensor([[0b1], [0b11], [0b101], [0b1011], [0b1]], dtype=torch.int32)
    steps = [
        ([0, 0], [list(range(9)), [5, 3, 8]], None, None),
        ([9, 3], [[7, 1, 2, 3], [4]], [[9, 10, 10, 11], [3]], masks),
    ]
    reference, tested = Sequences(plain, 2), Sequences(fused, 2, backend="triton")
    for starts, rows, positions, ancestors in steps:
        want, want_aux = reference.run(starts, rows, positions, ancestors, AUX)
        with force_backend(backend):
            got, got_aux = tested.run(starts, rows, positions, ancestors, AUX)
        assert_near(got, want)
        assert want_aux is not None
        assert got_aux is not None
        assert_near(got_aux, want_aux)


def test_more_rows_than_the_skinny_kernels_take(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fused = _pair("llama", folder, monkeypatch)
    rows = [[(7 * i) % 97 for i in range(70)]]
    want, want_aux = Sequences(plain, 1).run([0], rows, aux=(1,))
    got, got_aux = Sequences(fused, 1, backend="triton").run([0], rows, aux=(1,))
    assert_near(got, want)
    assert got_aux is not None
    assert want_aux is not None
    assert_near(got_aux, want_aux)


class _OneRank:
    """Sum over a single rank that records the shapes of its inputs."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def add(self, parts: torch.Tensor, *arguments: Any, **named: Any) -> ResidualStream:
        self.seen.append(tuple(parts.shape[-2:]))
        return add_sums(parts, *arguments, **named)


def test_wide_tiles_from_a_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a measured tile per product, passes of more than `FEW_ROWS` rows match the plain decoder."""
    plain, fused = _pair("llama", folder, monkeypatch)
    asked: set[Epilogue] = set()

    def measured(epilogue: Epilogue, x: torch.Tensor, weight: torch.Tensor) -> Tile:
        asked.add(epilogue)
        return Tile(Method.WIDE, 32, 32, 2 if epilogue is Epilogue.ADD else 1, block_m=64)

    for module in (blocks, skinny_gemm):
        monkeypatch.setattr(module, "choose_tile", measured)
    rows = [[(7 * i) % 97 for i in range(70)]]
    want, _ = Sequences(plain, 1).run([0], rows, aux=(1,))
    with force_backend(Backend.TRITON):
        got, _ = Sequences(fused, 1, backend="triton").run([0], rows, aux=(1,))
    assert_near(got, want)
    assert asked >= {Epilogue.ADD, Epilogue.GATED, Epilogue.ROTATED}


def test_ranks_reduce_what_is_added(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensor parallelism, products added to the residual pass through `reduce`, in layer order."""
    plain, fused = _pair("llama", folder, monkeypatch)
    assert fused.fused is not None
    fused.fused.reduce = reduce = _OneRank()
    want, _ = Sequences(plain, 1).run([0], [[1, 2, 3]])
    with force_backend(Backend.TRITON):
        got, _ = Sequences(fused, 1, backend="triton").run([0], [[1, 2, 3]])
    assert_near(got, want)
    assert reduce.seen == [(3, 64)] * 2 * len(plain.layers)
