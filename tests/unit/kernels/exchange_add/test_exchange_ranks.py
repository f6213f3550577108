"""Tests of exchange_add's reference between concurrent processes, which share inboxes in a mapped file."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from outrider.kernels.add_norm import normalise
from outrider.kernels.exchange_add import Boxes, exchange_add, inbox_shape

RANKS, WIDTH, EPS = 2, 600, 1e-5
CALLS = [(1 + call % 3, call % 2) for call in range(24)]
"""Rows and splits of each call. The rows vary, so that tiles change slots at different times."""


def part(rank: int, call: int) -> torch.Tensor:
    rows, splits = CALLS[call]
    numbers = torch.Generator().manual_seed(100 * rank + call)
    return torch.randn(*((2, rows, WIDTH) if splits else (rows, WIDTH)), generator=numbers)


def constants(call: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(10_000 + call)
    return torch.randn(CALLS[call][0], WIDTH, generator=numbers), torch.rand(WIDTH, generator=numbers) + 0.5


def inboxes(folder: Path) -> list[torch.Tensor]:
    shape = inbox_shape(RANKS, WIDTH)
    size = torch.Size(shape).numel()
    return [
        torch.from_file(str(folder / str(rank)), shared=True, size=size, dtype=torch.int32).view(shape)
        for rank in range(RANKS)
    ]


def run_rank(folder: Path, rank: int) -> list[list[torch.Tensor]]:
    """Make all calls as one rank. Return the residual and the normed rows of each."""
    torch.set_num_threads(1)
    shared = inboxes(folder)
    boxes = Boxes.of(rank, shared, 1_000_000)
    (folder / f"{rank}.ready").touch()
    while not all((folder / f"{peer}.ready").exists() for peer in range(RANKS)):
        pass
    found = []
    for call in range(len(CALLS)):
        residual, norm = constants(call)
        stream = exchange_add(part(rank, call), residual, norm, EPS, boxes)
        found.append([stream.residual, normalise(stream)])
    assert boxes.lost.item() == 0
    return found


def test_ranks_that_run_at_once_get_the_same_bits_call_by_call(tmp_path: Path) -> None:
    for rank in range(RANKS):
        (tmp_path / str(rank)).write_bytes(bytes(4 * torch.Size(inbox_shape(RANKS, WIDTH)).numel()))
    with ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as executor:
        found = [
            future.result() for future in [executor.submit(run_rank, tmp_path, rank) for rank in range(RANKS)]
        ]
    for call, of_ranks in enumerate(zip(*found, strict=True)):
        residual, _ = constants(call)
        parts = [part(rank, call) for rank in range(RANKS)]
        want = residual + sum(one.sum(0) if one.dim() == 3 else one for one in parts)
        torch.testing.assert_close(of_ranks[0][0], want)
        for one, other in zip(*of_ranks, strict=True):
            assert torch.equal(one, other)


def test_a_rank_alone_gives_up() -> None:
    shared = [torch.empty(inbox_shape(RANKS, WIDTH), dtype=torch.int32) for _ in range(RANKS)]
    boxes = Boxes.of(1, shared, 3)
    residual, norm = constants(0)
    for _call in range(2):
        stream = exchange_add(part(1, 0), residual, norm, EPS, boxes)
        assert bool(stream.residual.isnan().all())
        assert boxes.lost.item() == 1
