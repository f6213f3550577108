"""Tests of attention by tiles, against `TorchAttention` over the same pool."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.kernels.tile_attention import Recorder, attend_tile

from outrider.shared.attn.base import AttentionBatch, build_batch
from outrider.shared.attn.chunks import Attend, ChunkAttention
from outrider.shared.attn.reference import TorchAttention
from outrider.shared.attn.tiles import TileShape, shapes_of
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.pool import KVPool

HEADS, KV_HEADS, DIM, SCALE = 6, 2, 16, 0.3
SIZES = (32, 16, 8, 4)
ALWAYS = float("-inf")


def make_chunks(attend: Attend = attend_tile, most_rows: int = 32, **options: float) -> ChunkAttention:
    options = {"least_gain_us": ALWAYS, **options}
    return ChunkAttention(
        attend, shapes_of(most_rows, SIZES), most_rows, torch.float32, sizes=SIZES, **options
    )


class Sequences:
    """A pool whose leases interleave shuffled pages, and random K/V of all tokens of the leases."""

    def __init__(self, lengths: Sequence[int], page_size: int = 4, seed: int = 0) -> None:
        torch.manual_seed(seed)
        pages = sum(-(-length // page_size) for length in lengths) + 2
        self.pool = KVPool(pages, page_size, 1, KV_HEADS, DIM, torch.float32, "cpu")
        for plane in self.pool.planes():
            plane.fill_(float("nan"))  # Reading a slot that was never written poisons the result.
        self.leases: list[PageLease] = []
        for _ in lengths:
            lease = self.pool.lease(0)
            assert lease is not None
            self.leases.append(lease)
        for tokens in range(1, max(lengths) + 1):
            for lease, length in zip(self.leases, lengths, strict=True):
                self.pool.reserve(lease, min(tokens, length))
        for lease in self.leases:
            random.Random(seed).shuffle(lease.pages)
        writer = TorchAttention()
        writer.plan(build_batch(self.pool, self.leases, [0] * len(lengths), lengths))
        k, v = (torch.randn(sum(lengths), KV_HEADS, DIM) for _ in range(2))
        writer.run(0, torch.randn(sum(lengths), HEADS, DIM), k, v, self.pool, SCALE)

    def batch(self, starts: Sequence[int], counts: Sequence[int]) -> AttentionBatch:
        return build_batch(self.pool, self.leases, starts, counts)

    def compare(self, attention: KernelAttention, batch: AttentionBatch) -> None:
        """Check the attention of random queries of a batch."""
        rows = batch.slots.shape[0]
        q = torch.randn(rows, HEADS, DIM) * 2
        k, v = (
            torch.stack([plane.flatten(0, 1)[slot] for slot in batch.slots])
            for plane in (self.pool.k_planes[0], self.pool.v_planes[0])
        )
        expected = TorchAttention()
        expected.plan(batch)
        want = expected.run(0, q, k, v, self.pool, SCALE)
        attention.plan(batch)
        found = attention.run(0, q, k, v, self.pool, SCALE)
        assert found.shape == (rows, HEADS * DIM)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def attention_with(chunks: ChunkAttention) -> KernelAttention:
    attention = KernelAttention()
    attention.chunks = chunks
    return attention


@pytest.mark.parametrize("seed", range(12))
def test_random_chunks_attend_as_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    starts = [rng.choice([0, 0, rng.randrange(1, 100), 8 * rng.randrange(12)]) for _ in range(3)]
    counts = [rng.choice([1, rng.randrange(4, 70), 32]) for _ in range(3)]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    sequences = Sequences(lengths, rng.choice([1, 3, 4, 16]), seed)
    attend = Recorder()
    attention = attention_with(make_chunks(attend, rng.choice([4, 16, 32])))
    sequences.compare(attention, sequences.batch(starts, counts))
    assert bool(attend.shapes) is any(count >= 4 for count in counts)


def test_a_chunk_of_one_tile_is_not_merged() -> None:
    sequences = Sequences([32])
    attend = Recorder()
    sequences.compare(attention_with(make_chunks(attend)), sequences.batch([0], [32]))
    assert attend.shapes == [TileShape(32, 32, True)]


def test_short_sequences_attend_by_our_kernel() -> None:
    """Sequences of one row lie before, between and after long ones."""
    sequences = Sequences([20, 1, 40, 9, 10, 33, 7])
    attend = Recorder()
    chunks = make_chunks(attend)
    batch = sequences.batch([19, 0, 8, 8, 9, 1, 6], [1, 1, 32, 1, 1, 32, 1])
    sequences.compare(attention_with(chunks), batch)
    assert {shape.rows for shape in attend.shapes} <= {32, 16, 8, 4}
    assert attend.shapes


def test_layers_of_a_pass_share_the_division_and_the_next_pass_has_its_own() -> None:
    sequences = Sequences([48, 40])
    attention = attention_with(make_chunks())
    for starts, counts in (([0, 0], [48, 40]), ([16, 8], [32, 32]), ([40, 0], [8, 40])):
        batch = sequences.batch(starts, counts)
        for _layer in range(2):
            sequences.compare(attention, batch)


@pytest.mark.parametrize("case", ["tree", "lengths", "rows", "dtype", "gain", "shape", "short"])
def test_other_passes_are_not_taken(case: str) -> None:
    sequences = Sequences([40])
    pool, (lease,) = sequences.pool, sequences.leases
    attend = Recorder()
    chunks = make_chunks(attend)
    batch = sequences.batch([8], [32])
    q = torch.randn(32, HEADS, DIM)
    if case == "tree":
        masks = torch.ones(32, 1, dtype=torch.int32)
        batch = build_batch(pool, [lease], [8], [32], ancestors=masks)
        assert batch.host_lens is None
        batch = replace(batch, host_lens=((8, 32),))
    elif case == "lengths":
        batch = replace(batch, host_lens=None)
    elif case == "rows":
        q = q[:1]
    elif case == "dtype":
        q = q.bfloat16()
    elif case == "gain":
        chunks = make_chunks(attend, least_gain_us=1e9)
    elif case == "shape":
        chunks = ChunkAttention(attend, shapes_of(8, SIZES), 32, torch.float32, sizes=SIZES)
    else:
        batch, q = sequences.batch([37], [3]), q[:3]
    planes = pool.k_planes[0], pool.v_planes[0]
    assert chunks.attend(batch, q, *planes, SCALE, lambda *_: None) is None
    assert not attend.shapes


def test_another_thread_is_not_taken() -> None:
    sequences = Sequences([32])
    made: list[ChunkAttention] = []
    thread = threading.Thread(target=lambda: made.append(make_chunks()))
    thread.start()
    thread.join()
    planes = sequences.pool.k_planes[0], sequences.pool.v_planes[0]
    q = torch.randn(32, HEADS, DIM)
    assert made[0].attend(sequences.batch([0], [32]), q, *planes, SCALE, lambda *_: None) is None


@pytest.mark.parametrize("options", [{"window": 5}, {"softcap": 3.0}, {"sinks": torch.zeros(HEADS)}])
def test_windows_sinks_and_caps_attend_by_our_kernel(options: dict[str, object]) -> None:
    sequences = Sequences([32])
    attend = Recorder()
    attention, plain = attention_with(make_chunks(attend)), KernelAttention()
    q = torch.randn(32, HEADS, DIM)
    for one in (attention, plain):
        one.plan(sequences.batch([0], [32]))
    found, expected = (
        one.attend(0, q, sequences.pool, SCALE, **options)  # type: ignore[arg-type]
        for one in (attention, plain)
    )
    assert torch.equal(found, expected)
    assert not attend.shapes


def test_after_a_failure_of_the_library_our_kernel_attends() -> None:
    calls = 0

    def fail(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        raise RuntimeError("no plan")

    sequences = Sequences([32])
    attention = attention_with(make_chunks(fail))
    for _ in range(2):
        sequences.compare(attention, sequences.batch([0], [32]))
    assert calls == 1
    assert attention.chunks is None
