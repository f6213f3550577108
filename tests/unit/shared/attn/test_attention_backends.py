"""Tests of the two attention backends against attention that is computed row by row."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from outrider.shared.attn.base import (
    AttentionBackend,
    build_batch,
    causal_ancestors,
    pack_rows,
    visible_columns,
)
from outrider.shared.attn.create import AttentionKind, create_backend
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.pool import KVPool

HEADS, KV_HEADS, DIM, LAYERS = 6, 2, 16, 2
# On a CPU, `triton` runs the kernels' references.
BACKENDS = [AttentionKind.REFERENCE, AttentionKind.TRITON]


def make_pool(page_size: int, scattered: bool) -> tuple[KVPool, list[PageLease]]:
    """Return a pool with three leases of 60 tokens. Scattered leases interleave their pages."""
    pool = KVPool(4 * 60 // page_size + 4, page_size, LAYERS, KV_HEADS, DIM, torch.float32, "cpu")
    for plane in pool.planes():
        plane.fill_(float("nan"))  # Reading a slot that was never written poisons the result.
    leases = [pool.lease(0 if scattered else 60) for _ in range(3)]
    assert all(leases)
    if scattered:
        for tokens in range(1, 61):
            for lease in leases:
                pool.reserve(lease, tokens)
        table = random.Random(0)
        for lease in leases:
            table.shuffle(lease.pages)
    return pool, leases


def fill(
    backend: AttentionBackend, pool: KVPool, leases: Sequence[PageLease], lengths: Sequence[int]
) -> list[torch.Tensor]:
    """Write random K/V for the first tokens of each lease.

    Return them as ``[2, tokens, kv_heads, dim]`` per sequence.
    """
    rows = sum(lengths)
    k, v = torch.randn(rows, KV_HEADS, DIM), torch.randn(rows, KV_HEADS, DIM)
    backend.plan(build_batch(pool, leases, [0] * len(leases), lengths))
    for layer in range(LAYERS):
        backend.run(layer, torch.randn(rows, HEADS, DIM), k * (layer + 1), v * (layer + 1), pool, 1.0)
    return list(torch.stack([k, v]).split(list(lengths), dim=1))


def attend(
    q: torch.Tensor, kv: torch.Tensor, visible: Sequence[int], scale: float, softcap: float = 0.0
) -> torch.Tensor:
    """Attend from one row ``[heads, dim]`` to the visible tokens, one head at a time."""
    heads = []
    for head in range(HEADS):
        k, v = (kv[part, list(visible), head * KV_HEADS // HEADS] for part in range(2))
        scores = (k @ q[head]) * scale
        heads.append(torch.softmax(softcap * torch.tanh(scores / softcap) if softcap else scores, dim=0) @ v)
    return torch.cat(heads)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("scattered", [False, True])
def test_causal_rows_see_their_past(kind: AttentionKind, page_size: int, scattered: bool) -> None:
    torch.manual_seed(0)
    pool, leases = make_pool(page_size, scattered)
    backend = create_backend(kind, "cpu")
    starts, counts = [7, 0, 30], [1, 9, 5]
    cached = fill(backend, pool, [leases[0], leases[2]], [7, 30])
    cached.insert(1, torch.empty(2, 0, KV_HEADS, DIM))
    q, k, v = torch.randn(15, HEADS, DIM), torch.randn(15, KV_HEADS, DIM), torch.randn(15, KV_HEADS, DIM)
    backend.plan(build_batch(pool, leases, starts, counts))
    for layer in range(LAYERS):
        out = backend.run(layer, q, k * (layer + 1), v * (layer + 1), pool, 0.2)
        assert out.shape == (15, HEADS * DIM)
        row = 0
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            kv = torch.cat([cached[b], torch.stack([k, v])[:, row : row + count]], dim=1) * (layer + 1)
            for offset in range(count):
                want = attend(q[row], kv, range(start + offset + 1), 0.2)
                torch.testing.assert_close(out[row], want, rtol=1e-5, atol=1e-5)
                row += 1


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("scattered", [False, True])
def test_tree_rows_see_the_prefix_and_their_mask(kind: AttentionKind, scattered: bool) -> None:
    torch.manual_seed(1)
    pool, leases = make_pool(4, scattered)
    backend = create_backend(kind, "cpu")
    prefixes, counts, words = [11, 0, 5], [3, 1, 40], 2
    cached = fill(backend, pool, [leases[0], leases[2]], [11, 5])
    cached.insert(1, torch.empty(2, 0, KV_HEADS, DIM))
    rng = random.Random(2)
    visible = [
        sorted({node, *rng.sample(range(node), rng.randint(0, node))})
        for count in counts
        for node in range(count)
    ]
    ancestors = torch.tensor([mask_row(columns, words) for columns in visible], dtype=torch.int32)
    rows = sum(counts)
    q, k, v = (
        torch.randn(rows, HEADS, DIM),
        torch.randn(rows, KV_HEADS, DIM),
        torch.randn(rows, KV_HEADS, DIM),
    )
    backend.plan(build_batch(pool, leases, prefixes, counts, ancestors=ancestors))
    out = backend.run(0, q, k, v, pool, 0.25)
    row = 0
    for b, (prefix, count) in enumerate(zip(prefixes, counts, strict=True)):
        kv = torch.cat([cached[b], torch.stack([k, v])[:, row : row + count]], dim=1)
        for _ in range(count):
            seen = [*range(prefix), *(prefix + column for column in visible[row])]
            torch.testing.assert_close(out[row], attend(q[row], kv, seen, 0.25), rtol=1e-5, atol=1e-5)
            row += 1


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("depth", [1, 6, 40])
@pytest.mark.parametrize(("window", "softcap"), [(4, 0.0), (1, 0.0), (9, 0.0), (0, 0.4), (4, 0.4)])
def test_a_chain_equals_causal_rows(
    kind: AttentionKind, scattered: bool, depth: int, window: int, softcap: float
) -> None:
    """In the row-by-row reference, a node sees the last `window` positions of its own path at any depth."""
    torch.manual_seed(7)
    pool, leases = make_pool(4, scattered)
    backend = create_backend(kind, "cpu")
    prefixes = [11, 0]
    cached = [*fill(backend, pool, leases[:1], [11]), torch.empty(2, 0, KV_HEADS, DIM)]
    rows = 2 * depth
    q, k, v = (
        torch.randn(rows, HEADS, DIM),
        torch.randn(rows, KV_HEADS, DIM),
        torch.randn(rows, KV_HEADS, DIM),
    )
    ancestors = torch.tensor([mask_row(range(node + 1), 2) for node in range(depth)] * 2, dtype=torch.int32)
    outs = []
    for masks in (ancestors, None):
        backend.plan(build_batch(pool, leases[:2], prefixes, [depth, depth], ancestors=masks))
        outs.append(backend.run(0, q, k, v, pool, 0.25, window, softcap=softcap))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-5)
    for b, prefix in enumerate(prefixes):
        kv = torch.cat([cached[b], torch.stack([k, v])[:, b * depth : (b + 1) * depth]], dim=1)
        for node in range(depth):
            seen = range(max(0, prefix + node + 1 - window) if window else 0, prefix + node + 1)
            want = attend(q[b * depth + node], kv, seen, 0.25, softcap)
            torch.testing.assert_close(outs[0][b * depth + node], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", BACKENDS)
def test_levels_behind_the_prefix_are_seen_by_mask_only(kind: AttentionKind) -> None:
    torch.manual_seed(3)
    pool, leases = make_pool(4, scattered=False)
    backend = create_backend(kind, "cpu")
    (cached,) = fill(backend, pool, leases[:1], [14])  # 10 stable tokens, then two levels of two.
    q, k, v = torch.randn(2, HEADS, DIM), torch.randn(2, KV_HEADS, DIM), torch.randn(2, KV_HEADS, DIM)
    columns = [[0, 2, 4], [1, 2, 5]]
    ancestors = torch.tensor([[sum(1 << column for column in row)] for row in columns], dtype=torch.int32)
    backend.plan(build_batch(pool, leases[:1], [14], [2], ancestors=ancestors, prefix_lens=[10]))
    out = backend.run(0, q, k, v, pool, 0.25)
    kv = torch.cat([cached, torch.stack([k, v])], dim=1)
    for row in range(2):
        want = attend(q[row], kv, [*range(10), *(10 + column for column in columns[row])], 0.25)
        torch.testing.assert_close(out[row], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", BACKENDS)
def test_rows_without_a_slot_store_nothing(kind: AttentionKind) -> None:
    pool, leases = make_pool(4, scattered=False)
    for plane in pool.planes():
        plane.zero_()
    backend = create_backend(kind, "cpu")
    batch = build_batch(pool, leases[:1], [0], [3])
    batch.slots[1] = -1
    backend.plan(batch)
    ones = torch.ones(3, KV_HEADS, DIM)
    backend.run(1, torch.randn(3, HEADS, DIM), ones, ones, pool, 1.0)
    assert pool.k_planes[1].flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist() == [0, 2]
    assert not pool.k_planes[0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    results = []
    inputs = [torch.randn(12, heads, DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    for run_dtype in (dtype, torch.float32):
        pool = KVPool(4, 8, 1, KV_HEADS, DIM, run_dtype, "cpu")
        lease = pool.lease(12)
        assert lease is not None
        backend = create_backend("reference", "cpu")
        backend.plan(build_batch(pool, [lease], [0], [12]))
        q, k, v = (tensor.to(run_dtype) for tensor in inputs)
        results.append(backend.run(0, q, k, v, pool, 1 / math.sqrt(DIM)))
    assert results[0].dtype is dtype
    torch.testing.assert_close(results[0].float(), results[1], rtol=2e-2, atol=2e-2)


def test_one_backend_may_serve_two_pools_in_turn() -> None:
    backend = create_backend("auto", "cpu")
    outs = []
    for page_size in (2, 5):
        torch.manual_seed(5)
        pool = KVPool(20, page_size, 1, KV_HEADS, DIM, torch.float32, "cpu")
        lease = pool.lease(9)
        assert lease is not None
        backend.plan(build_batch(pool, [lease], [0], [9]))
        outs.append(
            backend.run(
                0,
                torch.randn(9, HEADS, DIM),
                torch.randn(9, KV_HEADS, DIM),
                torch.randn(9, KV_HEADS, DIM),
                pool,
                0.3,
            )
        )
    torch.testing.assert_close(outs[0], outs[1])


def test_causal_masks_equal_causal_rows() -> None:
    masks = causal_ancestors(40, 2)
    assert torch.equal(visible_columns(masks, 64), torch.ones(40, 64, dtype=torch.bool).tril())
    assert visible_columns(masks, 70)[:, 64:].any().item() is False
    with pytest.raises(ValueError, match="need 2 mask words, not 1"):
        causal_ancestors(33, 1)


def test_padding_is_dropped_row_by_row() -> None:
    padded = torch.arange(24).view(3, 4, 2)
    assert pack_rows(padded, [2, 4, 1]).tolist() == [
        *padded[0, :2].tolist(),
        *padded[1].tolist(),
        *padded[2, :1].tolist(),
    ]
    assert torch.equal(pack_rows(padded, [4, 4, 4]), padded.view(12, 2))


def test_rows_beyond_a_lease_are_refused() -> None:
    pool, leases = make_pool(4, scattered=False)
    with pytest.raises(ValueError, match=r"room for 60 tokens; call KVPool\.reserve for 62 tokens"):
        build_batch(pool, leases[:1], [59], [3])


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ConfigurationError, match="'fast'; choose one of auto, reference, triton") as caught:
        create_backend("fast", "cpu")
    assert caught.value.field == "attention_backend"


def mask_row(columns: Sequence[int], words: int) -> list[int]:
    """Return mask words with the bits of `columns` set, as signed 32-bit numbers."""
    bits = [sum(1 << (column % 32) for column in columns if column // 32 == word) for word in range(words)]
    return [word - (1 << 32) if word >= 1 << 31 else word for word in bits]
