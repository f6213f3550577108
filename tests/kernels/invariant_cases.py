"""Checks of the batch-invariant kernels, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.invariant_gemm import invariant_gemm
from outrider.kernels.path_attention import RowPaths, path_attention, row_paths
from outrider.kernels.row_norm import row_norm
from outrider.kernels.tree_attention import tree_attention

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check_gemm(device: str, dtype: torch.dtype, rows: int, width: int, out: int, guards: Guards) -> None:
    """Check the kernel with bias and residual against the reference, within guard bands."""
    generator = torch.Generator().manual_seed(rows + width + out)
    x, weight, residual = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((rows, width), (out, width), (rows, out))
    )
    weight /= width**0.5
    bias = torch.randn(out, generator=generator).to(device, dtype)
    for added, base in ((None, None), (bias, None), (bias, residual)):
        with reference_version():
            expected = invariant_gemm(x, weight, added, base)
        with triton_version(guards):
            found = invariant_gemm(x, weight, added, base)
        torch.testing.assert_close(
            found.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


def check_gemm_rows(device: str, dtype: torch.dtype, counts: Sequence[int], width: int, out: int) -> None:
    """Check that a row has the same bits alone and anywhere among others."""
    generator = torch.Generator().manual_seed(width)
    most = max(counts)
    x, weight = (
        torch.randn(shape, generator=generator).to(device, dtype) for shape in ((most, width), (out, width))
    )
    with triton_version(Guards(pad=64)):
        alone = {
            row: invariant_gemm(x[row : row + 1].clone(), weight)[0]
            for row in sorted({0, most // 2, most - 1})
        }
        for count in counts:
            for row, expected in alone.items():
                first = min(max(row - count // 2, 0), most - count)
                assert torch.equal(
                    invariant_gemm(x[first : first + count].clone(), weight)[row - first], expected
                ), (count, row)


def check_norm(
    device: str, dtype: torch.dtype, rows: int, size: int, guards: Guards, heads: int | None = None
) -> None:
    """Check the kernel against the reference, and a row alone against the same row among others."""
    generator = torch.Generator().manual_seed(rows + size)
    shape = (rows, size) if heads is None else (rows, heads, size)
    x = torch.randn(shape, generator=generator).to(device, dtype)
    weight = torch.randn(shape[1:], generator=generator).to(device, dtype)
    with reference_version():
        expected = row_norm(x, weight, 1e-5)
    with triton_version(guards):
        found = row_norm(x, weight, 1e-5)
        alone = torch.cat([row_norm(x[row : row + 1].clone(), weight, 1e-5) for row in range(rows)])
    torch.testing.assert_close(found.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(found, alone)


class Histories:
    """The same tokens in three places: a plain sequence, a chain of tree nodes, and a path among other nodes.

    Args:
        device: Device of the planes.
        dtype: Dtype of the planes.
        length: Number of tokens of the history.
        nodes: Number of these tokens that are tree nodes in the chain and on the path.
    """

    PAGE_SIZE = 3

    def __init__(
        self, device: str, dtype: torch.dtype, length: int, nodes: int, *, heads: int = 4, kv_heads: int = 2,
        dim: int = 16,
        plane_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(length * 31 + nodes)
        self.length, self.nodes, self.device = length, nodes, device
        self.prefix = length - nodes
        width = 2 * nodes + 1
        max_pages = -(-(self.prefix + width) // self.PAGE_SIZE)
        pages = 3 * max_pages + 2
        self.table = (
            torch.randperm(pages, generator=generator)[: 3 * max_pages].view(3, max_pages).to(torch.int32)
        )
        k, v = (torch.randn(length, kv_heads, dim, generator=generator) for _ in range(2))
        planes = [torch.randn(pages, self.PAGE_SIZE, kv_heads, dim, generator=generator) for _ in range(2)]
        self.q = torch.randn(length, heads, dim, generator=generator).to(device, dtype)
        order = [
            [*range(length)],
            [*range(length)],
            [*range(self.prefix), *(self.prefix + 2 * node for node in range(nodes))],
        ]
        for sequence, indices in enumerate(order):
            for token, index in enumerate(indices):
                page = self.table[sequence, index // self.PAGE_SIZE]
                for plane, values in zip(planes, (k, v), strict=True):
                    plane[page, index % self.PAGE_SIZE] = values[token]
        self.table = self.table.to(device)
        self.planes = [plane.to(device, dtype).to(plane_dtype or dtype) for plane in planes]

    def causal(self, first: int, stop: int) -> RowPaths:
        """Return rows [first, stop) of the plain sequence, as in a prompt chunk or a plain step."""
        return self._paths(0, first, stop, None, stop - first)

    def chain(self) -> RowPaths:
        """Return the nodes as a chain."""
        masks = torch.tensor([[(1 << node + 1) - 1] for node in range(self.nodes)], dtype=torch.int64)
        return self._paths(1, self.prefix, self.length, masks, self.nodes)

    def path(self) -> RowPaths:
        """Return the nodes at every other column of a tree. The columns between them are not on the path."""
        reach = [[2 * ancestor for ancestor in range(node + 1)] for node in range(self.nodes)]
        masks = torch.tensor(
            [[sum(1 << column for column in columns)] for columns in reach], dtype=torch.int64
        )
        return self._paths(2, self.prefix, self.prefix + 2 * self.nodes, masks, self.nodes)

    def attend(self, q: torch.Tensor, paths: RowPaths, **options: object) -> torch.Tensor:
        """Run path_attention on some rows."""
        bound = int(paths.lengths.max()) + 40
        return path_attention(q, *self.planes, self.table, paths, scale=0.3, max_kv_len=bound, **options)  # type: ignore[arg-type]

    def _paths(
        self, sequence: int, prefix: int, kv_len: int, masks: torch.Tensor | None, rows: int
    ) -> RowPaths:
        lens = torch.zeros((2, 3), dtype=torch.int32)
        lens[0, sequence], lens[1, sequence] = prefix, kv_len
        starts = torch.tensor([0] * (sequence + 1) + [rows] * (3 - sequence), dtype=torch.int32)
        words = None if masks is None else torch.cat([masks % (1 << 32), masks >> 32], dim=1)
        if words is not None:
            words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).to(self.device)
        lens = lens.to(self.device)
        return row_paths(lens[0], lens[1], starts.to(self.device), words, rows)


def check_histories(device: str, dtype: torch.dtype, length: int, nodes: int, **options: object) -> None:
    """Check that a row has the same bits in a prompt, in chunks, in plain steps, in a chain and in a tree."""
    histories = Histories(device, dtype, length, nodes)
    q = histories.q
    with triton_version(Guards(pad=64)):
        before = histories.prefix - 1  # the last token before the tree is compared too
        whole = histories.attend(q[before:], histories.causal(before, length), **options)
        assert bool(whole.isfinite().all())
        for size in (1, 3):
            chunks = [(first, min(first + size, length)) for first in range(before, length, size)]
            found = torch.cat(
                [
                    histories.attend(q[first:stop].clone(), histories.causal(first, stop), **options)
                    for first, stop in chunks
                ]
            )
            assert torch.equal(found, whole), f"chunks of {size}"
        for name, paths in (("chain", histories.chain()), ("path", histories.path())):
            assert torch.equal(
                histories.attend(q[histories.prefix :].clone(), paths, **options), whole[1:]
            ), name


def check_against_tree_attention(device: str, dtype: torch.dtype, **options: object) -> None:
    """Check the kernel and its reference against `tree_attention`."""
    histories = Histories(device, dtype, 150, 12)
    masks = (
        torch.tensor([[sum(1 << 2 * ancestor for ancestor in range(node + 1))] for node in range(12)])
        .to(torch.int32)
        .to(device)
    )
    prefix, kv_len = (
        torch.tensor([138], dtype=torch.int32).to(device),
        torch.tensor([162], dtype=torch.int32).to(device),
    )
    starts = torch.tensor([0, 12], dtype=torch.int32).to(device)
    q = histories.q[-12:]
    with reference_version():
        expected = tree_attention(
            q, *histories.planes, histories.table[2:], prefix, kv_len, starts, masks, scale=0.3,
            max_query_len=12, max_kv_len=162,
            **options,  # type: ignore[arg-type]
        )  # fmt: skip
        plain = histories.attend(q, histories.path(), **options)
    guards = Guards()
    with triton_version(guards):
        found = histories.attend(q, histories.path(), **options)
    torch.testing.assert_close(plain.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(found.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
