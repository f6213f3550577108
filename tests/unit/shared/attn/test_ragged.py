"""Ragged batches: each sequence has its own row of the page table, and idle sequences yield zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from outrider.shared.attn.base import AttentionBackend, AttentionBatch, build_batch
from outrider.shared.attn.deterministic import DeterministicAttention
from outrider.shared.attn.reference import TorchAttention
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.kv.pool import KVPool

HEADS, KV_HEADS, DIM, LAYERS = 6, 2, 16, 2
# On a CPU, the kernels' references run.
BACKENDS = [TorchAttention, KernelAttention, DeterministicAttention]


@dataclass
class Step:
    """Two live sequences of several rows, alone and between idle ones.

    Attributes:
        pool: The pool, filled with random K/V.
        alone: The batch of the live sequences.
        ragged: The same sequences, with shuffled rows of the page table, idle sequences, sequences without
            rows, and rows that belong to no sequence.
        live: ``[rows of alone]``, places of their rows in `ragged`.
    """

    pool: KVPool
    alone: AttentionBatch
    ragged: AttentionBatch
    live: torch.Tensor

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return random queries, keys and values."""
        return (
            torch.randn(count, HEADS, DIM),
            torch.randn(count, KV_HEADS, DIM),
            torch.randn(count, KV_HEADS, DIM),
        )


def make_step(tree: bool) -> Step:
    torch.manual_seed(0)
    pool = KVPool(64, 4, LAYERS, KV_HEADS, DIM, torch.float32, "cpu")
    for plane in pool.planes():
        plane.normal_()
    leases = [lease for lease in (pool.lease(40), pool.lease(40)) if lease is not None]
    starts, counts = [21, 6], [3, 2]
    masks = torch.tensor([[1], [3], [5], [1], [3]], dtype=torch.int32) if tree else None
    alone = build_batch(pool, leases, starts, counts, ancestors=masks)
    live = torch.tensor([1, 2, 3, 5, 6])
    slots, ancestors = torch.full((9,), -1), torch.ones(9, 1, dtype=torch.int32)
    slots[live] = alone.slots
    if masks is not None:
        ancestors[live] = masks
    unused = torch.full((1, alone.page_table.shape[1]), 1 << 20, dtype=torch.int32)  # pages that do not exist
    ragged = AttentionBatch(
        page_table=torch.cat([alone.page_table[1:], unused, alone.page_table[:1]]),
        prefix_lens=_integers([9, 21, 0, 6, 7, 0]),
        kv_lens=_integers([9, 24, 0, 8, 7, 0]),
        query_start=_integers([0, 1, 4, 5, 7, 7, 8]),
        ancestors=None if masks is None else ancestors,
        slots=slots,
        max_query_len=4,
        max_kv_len=40,
        table_rows=_integers([-1, 2, 1, 0, 1, -1]),
        ragged=True,
    )
    return Step(pool, alone, ragged, live)


def _integers(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"sinks": True}, {"softcap": 0.5}])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_live_rows_are_as_alone_and_idle_rows_are_zeros(
    backend: type[AttentionBackend], tree: bool, options: dict[str, int | bool | float]
) -> None:
    step = make_step(tree)
    attention = backend()
    rows = step.rows(9)
    own = [tensor[step.live] for tensor in rows]
    sinks = torch.randn(HEADS) if options.get("sinks") else None
    how = {"window": int(options.get("window", 0)), "softcap": float(options.get("softcap", 0.0))}
    for layer in range(LAYERS):
        attention.plan(step.alone)
        expected = attention.run(layer, *own, step.pool, 0.3, sinks=sinks, **how)
        attention.plan(step.ragged)
        found = attention.run(layer, *rows, step.pool, 0.3, sinks=sinks, **how)
        torch.testing.assert_close(found[step.live], expected, rtol=1e-5, atol=1e-5)
        idle = torch.ones(9, dtype=torch.bool)
        idle[step.live] = False
        if backend is KernelAttention:
            idle[8] = False  # belongs to no sequence and is not written
        assert not bool(found[idle].any())


@pytest.mark.parametrize("tree", [False, True])
def test_deterministic_rows_have_the_same_bits_in_any_company(tree: bool) -> None:
    step = make_step(tree)
    attention = DeterministicAttention()
    rows = step.rows(9)
    attention.plan(step.alone)
    alone = attention.run(0, *[tensor[step.live] for tensor in rows], step.pool, 0.3)
    attention.plan(step.ragged)
    assert torch.equal(attention.run(0, *rows, step.pool, 0.3)[step.live], alone)


@pytest.mark.parametrize("backend", BACKENDS)
def test_table_rows_need_no_ragged_batch(backend: type[AttentionBackend]) -> None:
    step = make_step(tree=False)
    attention = backend()
    swapped = replace(
        step.alone,
        page_table=step.alone.page_table.flip(0),
        table_rows=torch.tensor([1, 0], dtype=torch.int32),
    )
    rows = step.rows(5)
    attention.plan(step.alone)
    expected = attention.run(0, *rows, step.pool, 0.3)
    attention.plan(swapped)
    torch.testing.assert_close(attention.run(0, *rows, step.pool, 0.3), expected)


def test_all_sequences_may_be_idle() -> None:
    step = make_step(tree=False)
    idle = replace(step.ragged, table_rows=torch.full((6,), -1, dtype=torch.int32))
    rows = step.rows(9)
    for backend in BACKENDS:
        attention = backend()
        attention.plan(idle)
        assert not bool(attention.run(0, *rows, step.pool, 0.3)[:8].any())


def test_a_work_list_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.shared.attn import triton

    calls = []
    plan = triton.plan_attention
    monkeypatch.setattr(
        triton, "plan_attention", lambda *tensors, **sizes: calls.append(sizes) or plan(*tensors, **sizes)
    )
    step = make_step(tree=True)
    attention = KernelAttention()
    for _ in range(2):
        attention.plan(step.ragged)
        for layer in range(LAYERS):
            attention.run(layer, *step.rows(9), step.pool, 0.3)
    attention.plan(step.alone)
    attention.run(0, *step.rows(5), step.pool, 0.3)
    assert len(calls) == 2
