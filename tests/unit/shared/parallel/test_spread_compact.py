"""Tests that other ranks move the same accepted rows as rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.shared.kv.pool import KVPool
from outrider.shared.parallel.commands import Command, decode, encode
from outrider.shared.parallel.lead_decoder import LeadDecoder, SpreadPool
from outrider.shared.parallel.worker import Worker, _Step

PAGES, PAGE_SIZE = 8, 4


class Link:
    """Carries commands and broadcasts from rank 0 to a worker."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.buffers: list[torch.Tensor] = []

    @contextmanager
    def together(self, command: Command) -> Iterator[None]:
        self.commands.append(decode(encode(command)))
        yield


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("with_table_rows", [True, False])
@pytest.mark.parametrize("width", [2, 6])
def test_every_rank_moves_the_accepted_rows(known: bool, with_table_rows: bool, width: int) -> None:
    link = Link()
    table, cached = ints([7, 2, 5], [1, 6, 3]), ints(3, 2)
    path = torch.full((2, width), -1, dtype=torch.int32)
    path[0, :2], path[1, :2] = ints(0, 3), ints(0, 2)
    accepted = ints(1, 1)
    table_rows = ints(4, 1, -1) if with_table_rows else None
    if with_table_rows:
        table = table.repeat(3, 1)[:5]  # more rows than sequences
        cached = ints(3, 2, 9)
    batch: Any = SimpleNamespace(page_table=table, prefix_lens=cached)
    # 1. Rank 0.
    lead = LeadDecoder.__new__(LeadDecoder)
    collectives: Any = SimpleNamespace(broadcast=link.buffers.append)
    lead.collectives = collectives
    lead.connect(link, lambda: pytest.fail("the head must not be read"))  # type: ignore[arg-type]
    lead._last = (torch.empty(0), batch) if known else None
    pool = SpreadPool(PAGES, PAGE_SIZE, 2, 1, 3, torch.float32, "cpu")
    pool.lead_by(lead)
    values = torch.randn(pool._storage.shape)
    pool._storage.copy_(values)
    pool.compact(table, cached, path, accepted, table_rows)
    assert not torch.equal(pool._storage, values)
    # 2. The other rank, which starts with the same rows.
    receiving: Any = SimpleNamespace(
        device=torch.device("cpu"),
        collectives=SimpleNamespace(broadcast=lambda tensor: tensor.copy_(link.buffers.pop(0))),
    )
    nothing: Any = None
    worker = Worker.__new__(Worker)
    worker._decoder, worker._attention, worker._step = receiving, nothing, None
    if known:
        worker._step = _Step(torch.empty(0), batch)
    worker._pool = KVPool(PAGES, PAGE_SIZE, 2, 1, 3, torch.float32, "cpu")
    worker._pool._storage.copy_(values)
    (command,) = link.commands
    worker._execute(command)
    assert link.buffers == []
    assert torch.equal(worker._pool._storage, pool._storage)
