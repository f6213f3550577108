"""Attention by a work list on a GPU: against the reference, and recorded once for batches of any lengths."""

from __future__ import annotations

import pytest
import torch
from attention_cases import TOLERANCE, Sequence
from guards import reference_version
from work_cases import ABSENT, IDLE, RaggedBatch, Shape, check_ragged

from outrider.shared.attn.base import AttentionBatch
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.kv.pool import KVPool

pytestmark = pytest.mark.gpu

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FP8 = torch.float8_e4m3fn
LLAMA = Shape(32, 8, 128)
SMALL = Shape(16, 4, 128)
PLAIN, TREE = Sequence(499, 1), Sequence(700, 32)


@pytest.mark.parametrize(
    "sequences",
    [
        [Sequence(2500, 1)],
        [Sequence(0, 1), PLAIN, IDLE, Sequence(2499, 1)],
        [PLAIN] * 15 + [Sequence(2499, 1)],
        [PLAIN] * 23 + [Sequence(2499, 1)],
        [Sequence(97 * b % 700, 4) for b in range(32)],
        [Sequence(500, 6)],
        [TREE],
        [PLAIN] * 32 + [TREE, ABSENT, IDLE],
        [Sequence(97 * b, 32) for b in range(9)],
    ],
    ids=["1", "few", "16", "24", "32 chains", "chain of 6", "tree", "32 and a tree", "9 trees"],
)
@pytest.mark.parametrize("tree", [True, False])
def test_every_kind_of_batch(sequences: list[Sequence], tree: bool) -> None:
    check_ragged("cuda", BF16, sequences, LLAMA, tree=tree, spare_rows=1)


@pytest.mark.parametrize(
    ("size", "sequences"),
    [
        (16, [Sequence(900, 9), Sequence(0, 7, 0)]),
        (128, [Sequence(3000, 100), Sequence(0, 20), Sequence(0, 8, 0)]),
        (512, [Sequence(0, 300), Sequence(1500, 150), Sequence(0, 62, 0)]),
        (2048, [Sequence(2000, 1900), Sequence(0, 100), Sequence(0, 48, 0)]),
    ],
)
def test_packed_prompts_and_one_block_of_padding(size: int, sequences: list[Sequence]) -> None:
    check_ragged("cuda", BF16, sequences, SMALL, tree=False, max_query_len=size)


MIXED = [PLAIN] * 8 + [TREE, IDLE, ABSENT, Sequence(2000, 5)]


@pytest.mark.parametrize(
    "options",
    [{"sinks": True}, {"window": 90}, {"window": 4, "sinks": True}, {"softcap": 5.0}, {"plane_dtype": FP8}],
    ids=str,
)
@pytest.mark.parametrize("tree", [True, False])
def test_every_feature(tree: bool, options: dict[str, bool | int | float]) -> None:
    check_ragged("cuda", BF16, MIXED, SMALL, tree=tree, **options)
    check_ragged("cuda", BF16, [PLAIN] * 6 + [Sequence(2000, 1), IDLE], SMALL, tree=tree, **options)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("shape", [Shape(6, 2, 80, 3), Shape(8, 1, 32, 1), Shape(16, 1, 576)], ids=str)
def test_other_heads_and_types(dtype: torch.dtype, shape: Shape) -> None:
    check_ragged(
        "cuda", dtype, [Sequence(300, 5), IDLE, Sequence(0, 33), Sequence(1200, 1)], shape, tree=True
    )


ROWS, BOUND, ROOM = 64, 64, 4096
GRAPH_SHAPE = Shape(8, 2, 128)
LAYOUTS: dict[str, list[Sequence]] = {
    "plain": [Sequence(100 + 13 * b, 1) for b in range(ROWS)],
    "one long": [Sequence(499, 1)] * 30 + [Sequence(4000, 1)] + [IDLE] * 33,
    "a tree": [Sequence(499, 1)] * 20 + [Sequence(3000, 32)] + [IDLE] * 12,
    "two trees": [TREE, Sequence(1, 32)],
    "idle": [IDLE] * ROWS,
}


def laid_out(name: str) -> RaggedBatch:
    """Return the batch of a layout. All layouts have the same numbers of rows, sequences and pages."""
    sequences = LAYOUTS[name] + [ABSENT] * (BOUND - len(LAYOUTS[name]))
    return RaggedBatch("cuda", BF16, sequences, GRAPH_SHAPE, tree=True, max_query_len=32, room=ROOM)


def load(batch: RaggedBatch, other: RaggedBatch) -> None:
    """Copy the inputs of a batch into the buffers of another."""
    for name in ("table", "owners", "prefix_lens", "kv_lens", "query_start", "ancestors", "q"):
        getattr(batch, name).copy_(getattr(other, name))
    for plane, mine in zip(batch.planes, other.planes, strict=True):
        plane.copy_(mine)


def test_one_graph_serves_batches_of_any_lengths() -> None:
    batch = laid_out("plain")
    outs = [torch.empty_like(batch.q).contiguous() for _ in range(2)]

    def layers() -> None:
        work = batch.plan()
        for out in outs:
            batch.attend(work, out=out)

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for name in (*LAYOUTS, "plain"):
        other = laid_out(name)
        load(batch, other)
        with reference_version():
            expected = other.attend(None)
        for _ in range(2):  # the second replay finds the counters as the first left them
            for out in outs:
                out.fill_(torch.nan)
            graph.replay()
            for out in outs:
                torch.testing.assert_close(
                    out.float(), expected.float(), atol=TOLERANCE[BF16], rtol=TOLERANCE[BF16]
                )
            assert torch.equal(*outs), "equal inputs give equal bits"
        recorded = outs[0].clone()
        layers()
        assert torch.equal(outs[0], recorded)


def test_the_backend_plans_within_a_graph() -> None:
    """A work list made by the first layer is complete before that layer's attention reads it."""
    batch = laid_out("a tree")
    pool = KVPool(batch.planes[0].shape[0], 16, 2, 2, 128, BF16, "cuda")
    for layer in range(2):
        pool.k_planes[layer].copy_(batch.planes[0])
        pool.v_planes[layer].copy_(batch.planes[1])
    keys = torch.zeros(ROWS, 2, 128, dtype=BF16, device="cuda")
    attention = KernelAttention()
    step = AttentionBatch(
        batch.table, batch.prefix_lens, batch.kv_lens, batch.query_start, batch.ancestors,
        torch.full((ROWS,), -1, device="cuda"), 32, ROOM, batch.owners, True,
    )  # fmt: skip

    def layers() -> list[torch.Tensor]:
        attention.plan(step)
        return [attention.run(layer, batch.q, keys, keys, pool, 128**-0.5) for layer in range(2)]

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layers()
    for name in ("a tree", "one long", "two trees", "plain"):
        other = laid_out(name)
        load(batch, other)
        for layer in range(2):
            pool.k_planes[layer].copy_(batch.planes[0])
            pool.v_planes[layer].copy_(batch.planes[1])
        with reference_version():
            expected = other.attend(None).flatten(1)
        graph.replay()
        for out in outs:
            torch.testing.assert_close(
                out.float(), expected.float(), atol=TOLERANCE[BF16], rtol=TOLERANCE[BF16]
            )
