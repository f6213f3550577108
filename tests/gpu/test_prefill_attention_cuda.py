"""Tests of prompt attention by cuDNN on a Hopper GPU, against this project's kernel."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from guards import Guards
from merge_cases import check_merge, check_poison, check_unseen

from outrider.shared.attn.base import build_batch
from outrider.shared.attn.chunks import ChunkAttention
from outrider.shared.attn.library import Library, cudnn_attention
from outrider.shared.attn.tiles import SIZES, shapes_of
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.kv.pool import KVPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
BF16, F16 = torch.bfloat16, torch.float16
SCALE = 0.3  # peaked weights, so that a wrong mask or merge is no rounding error
PARAMETERS = ("dtype", "heads", "kv_heads", "dim")
SHAPES = [(BF16, 32, 8, 128), (F16, 32, 8, 128), (BF16, 8, 8, 64), (BF16, 14, 2, 64), (BF16, 8, 1, 128)]


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the library is used on Hopper GPUs only")


def all_chunks(dtype: torch.dtype = BF16, most_rows: int = SIZES[0]) -> ChunkAttention:
    """Return attention that takes every chunk. Its plans are built when they are first needed."""
    return ChunkAttention(
        cudnn_attention, shapes_of(most_rows), most_rows, dtype, least_gain_us=float("-inf")
    )


def check_chunks(
    chunks: ChunkAttention,
    starts: Sequence[int],
    counts: Sequence[int],
    dtype: torch.dtype = BF16,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    dim: int = DIM,
) -> None:
    """Compare random chunks behind random prefixes in interleaved pages."""
    generator = torch.Generator("cuda").manual_seed(sum(starts) + sum(counts))
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    pool = KVPool(sum(-(-one // PAGE) for one in lengths) + 1, PAGE, 1, kv_heads, dim, dtype, "cuda")
    for plane in pool.planes():
        plane.normal_(generator=generator)
    leases = []
    for length in lengths:
        lease = pool.lease(length)
        assert lease is not None
        lease.pages.reverse()
        leases.append(lease)
    rows = sum(counts)
    q = torch.randn(rows, heads, dim, device="cuda", generator=generator).to(dtype)
    batch = build_batch(pool, leases, starts, counts)
    own, library = KernelAttention(), KernelAttention()
    library.chunks = chunks
    own.plan(batch)
    library.plan(batch)
    expected = own.attend(0, q, pool, SCALE).float()
    found = library.attend(0, q, pool, SCALE).float()
    assert library.chunks is chunks, "the library failed; the log has the reason"
    assert not torch.equal(found, expected), "our kernel attended"
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    assert ((found - expected).norm() / expected.norm()).item() < 0.01


@pytest.mark.parametrize("count", [512, 2048, 8192])
@pytest.mark.parametrize("start", [0, 512, 8192, 24576])
def test_aligned_chunks(start: int, count: int) -> None:
    check_chunks(all_chunks(), [start], [count])


@pytest.mark.parametrize(("start", "count"), [(0, 513), (0, 5000), (16, 600), (3333, 4321), (8200, 8192)])
def test_chunks_that_are_aligned_to_no_tile(start: int, count: int) -> None:
    check_chunks(all_chunks(), [start], [count])


def test_long_and_short_sequences_in_one_pass() -> None:
    check_chunks(all_chunks(), [0, 700, 0, 100, 512, 30], [3, 2048, 1000, 64, 700, 1])


@pytest.mark.parametrize("count", [256, 512, 1024, 2048, 8192])
@pytest.mark.parametrize("start", [0, 1000])
def test_equals_plain_attention(start: int, count: int) -> None:
    """Attend as the target does, whichever kernel that is, and compare with attention in fp32."""
    generator = torch.Generator("cuda").manual_seed(count)
    stop = start + count
    pool = KVPool(-(-stop // PAGE), PAGE, 1, KV_HEADS, DIM, BF16, "cuda")
    for plane in pool.planes():
        plane.normal_(generator=generator)
    lease = pool.lease(stop)
    assert lease is not None
    q = torch.randn(count, HEADS, DIM, device="cuda", generator=generator).to(BF16)
    attention = KernelAttention()
    attention.use_library(ChunkAttention(cudnn_attention, shapes_of(SIZES[0]), SIZES[0], BF16))
    attention.plan(build_batch(pool, [lease], [start], [count]))
    found = attention.attend(0, q, pool, SCALE).view(count, HEADS, DIM)
    assert attention.chunks is not None, "the library failed; the log has the reason"
    slots = torch.from_numpy(pool.slot_array(lease, 0, stop)).cuda()
    k, v = (planes[0].flatten(0, 1)[slots].float() for planes in (pool.k_planes, pool.v_planes))
    hidden = torch.ones(count, stop, dtype=torch.bool, device="cuda").triu(start + 1)
    for head in range(0, HEADS, 5):
        shared = head // (HEADS // KV_HEADS)
        scores = (q[:, head].float() @ k[:, shared].t() * SCALE).masked_fill(hidden, float("-inf"))
        expected = scores.softmax(-1) @ v[:, shared]
        torch.testing.assert_close(found[:, head].float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(PARAMETERS, SHAPES)
def test_shapes_of_models(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    check_chunks(all_chunks(dtype), [1500], [2500], dtype, heads, kv_heads, dim)


@pytest.mark.parametrize("causal", [True, False])
def test_the_log_sum_exp(causal: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(512, heads, DIM, device="cuda", generator=generator).to(BF16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    out, lse = cudnn_attention(q, k, v, causal, SCALE)
    scores = torch.einsum("rhd,thd->rht", q.double(), k.double().repeat_interleave(4, dim=1)) * SCALE
    if causal:
        hidden = torch.ones(512, 512, dtype=torch.bool, device="cuda").triu(1)
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
    assert lse.shape == (512, HEADS)
    assert out.shape == (512, HEADS, DIM)
    torch.testing.assert_close(lse, scores.logsumexp(-1).float(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(PARAMETERS, SHAPES)
def test_startup_prepares_the_library(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    """Prepare as the target does while it is idle. The library gains too little with narrow models."""
    used: list[ChunkAttention | None] = []
    library = Library(heads, kv_heads, dim, dtype, torch.device("cuda"), 2048)
    assert list(library.prepare(used.append)) == [None, *shapes_of(2048)]
    (chunks,) = used
    assert chunks is not None
    wide = heads * dim >= 4096
    assert chunks.takes([(0, 2048)], heads * dim) == wide
    if wide:
        check_chunks(chunks, [0], [2048], dtype, heads, kv_heads, dim)


def test_attention_is_enqueued_without_waiting() -> None:
    pool = KVPool(1000, PAGE, 1, KV_HEADS, DIM, BF16, "cuda")
    lease = pool.lease(12000)
    assert lease is not None
    batch = build_batch(pool, [lease], [5000], [4000])
    q = torch.randn(4000, HEADS, DIM, device="cuda", dtype=BF16)
    attention = KernelAttention()
    attention.chunks = all_chunks()
    attention.plan(batch)
    attention.attend(0, q, pool, SCALE)  # builds plans and compiles kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention.attend(0, q, pool, SCALE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert attention.chunks is not None


def test_heads_that_cudnn_refuses_keep_our_kernel() -> None:
    library = Library(8, 2, 100, BF16, torch.device("cuda"), 512)
    assert not list(library.prepare(lambda chunks: None))


@pytest.mark.parametrize("out", [torch.float32, BF16])
def test_merge_attention(out: torch.dtype) -> None:
    check_merge("cuda", BF16, out, 300, 32, 128, Guards(64))
    check_merge("cuda", BF16, out, 3, 5, 24, Guards(67))
    check_unseen("cuda")
    check_poison("cuda")
