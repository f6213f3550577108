"""Cases of `outrider bench kernels` for attention over sequences of unequal length.

Each case runs with and without a work list, which assigns shares of the sequences to the GPU's programs. Both
variants get the same inputs. With a work list, the number of sequences equals the number of rows, and most
sequences have no rows. The engine does the same. Making the work list is a case of its own, because the
engine makes the list only once per pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from outrider.bench.kernels.case import KernelCase, KernelOptions, over, small_kernel
from outrider.bench.kernels.inputs import KernelSizes, chain_masks, copies_for
from outrider.bench.measure.floors import Work
from outrider.kernels.tree_attention import WorkList, plan_attention, tree_attention

RaggedPart = tuple[int, int, int]
"""Sequences of a batch that are alike: their number, their rows, and the tokens before their rows."""


@dataclass(frozen=True, slots=True)
class RaggedInputs:
    """Arguments of attention over a batch of unequal sequences.

    Attributes:
        q: ``[rows, heads, head_dim]``.
        page_table: ``[sequences, pages] int32``.
        prefix_lens, kv_lens: ``[sequences] int32``.
        query_start: ``[sequences + 1] int32``.
        ancestors: ``[rows, words] int32``, the ancestor masks. None if each sequence has one row.
        table_rows: ``[sequences] int32``, each sequence's row of the page table, or -1 for a sequence without
            rows. None if sequence i uses row i.
        work: The work list, or None to attend without a work list.
        kv_heads: Number of heads of the K and V planes.
        max_query_len, max_kv_len: Largest number of rows of a sequence, and largest number of tokens of a
            sequence.
    """

    q: torch.Tensor
    page_table: torch.Tensor
    prefix_lens: torch.Tensor
    kv_lens: torch.Tensor
    query_start: torch.Tensor
    ancestors: torch.Tensor | None
    table_rows: torch.Tensor | None
    work: WorkList | None
    kv_heads: int
    max_query_len: int
    max_kv_len: int

    def plan(self) -> WorkList:
        """Make a work list for this batch."""
        rows, heads, dim = self.q.shape
        return plan_attention(
            self.kv_lens,
            self.query_start,
            self.prefix_lens,
            self.table_rows,
            rows=rows,
            max_query_len=self.max_query_len,
            heads=heads,
            kv_heads=self.kv_heads,
            dim=dim,
            dtype=self.q.dtype,
        )

    def attend(self, planes: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attend over these planes."""
        return tree_attention(
            self.q,
            *planes,
            self.page_table,
            self.prefix_lens,
            self.kv_lens,
            self.query_start,
            self.ancestors,
            scale=self.q.shape[2] ** -0.5,
            max_query_len=self.max_query_len,
            max_kv_len=self.max_kv_len,
            table_rows=self.table_rows,
            work=self.work,
        )


def ragged_cases(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield attention over batches of equal and of unequal sequences, each without and with a work list."""
    for name, parts in batches(sizes, options.small):
        each = [(rows, context) for count, rows, context in parts for _ in range(count)]
        token = 2 * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize
        nbytes = sum(rows + context for rows, context in each) * token
        seen = sum(rows * (context + (rows + 1) / 2) for rows, context in each)
        pages = sum(-(-(rows + context) // sizes.page_size) for rows, context in each)
        copies = copies_for(nbytes, options.small)
        shape = (pages, sizes.page_size, sizes.kv_heads, sizes.head_dim)
        planes = [(sizes.random(*shape), sizes.random(*shape)) for _ in range(copies)]
        work = Work(nbytes, 4.0 * sizes.heads * sizes.head_dim * seen)
        for way in ("uniform", "by work list"):
            inputs = ragged_inputs(sizes, each, listed=way == "by work list")
            yield KernelCase(f"tree_attention {name}, {way}", over(planes, inputs.attend), work, copies)
        yield small_kernel(f"plan_attention {name}", inputs.plan)
        del planes, inputs  # before the next batch allocates its own


def batches(sizes: KernelSizes, small: bool) -> Iterator[tuple[str, tuple[RaggedPart, ...]]]:
    """Yield the name and the sequences of each batch. A test on a CPU gets only small batches."""
    short, medium, long = (20, 40, 100) if small else (500, 8000, 32_000)
    many, nodes = (2 if small else 32), sizes.nodes
    if not small:
        for context in (short, medium):
            for batch in (1, 16, 64, 256):
                yield f"{batch} plain at {context}", ((batch, 1, context),)
        yield f"{many} chains of 4 at {short}", ((many, 4, short),)
        for context in (short, long):
            yield f"a tree of {nodes} at {context}", ((1, nodes, context),)
    yield f"1 plain at {long} beside {many - 1} at {short}", ((many - 1, 1, short), (1, 1, long))
    yield f"{many} plain beside a tree of {nodes} at {short}", ((many, 1, short), (1, nodes, short))


def ragged_inputs(sizes: KernelSizes, each: list[tuple[int, int]], *, listed: bool) -> RaggedInputs:
    """Return the inputs for sequences given as (rows, tokens before the rows). `listed` adds a work list."""
    device, live = sizes.device, len(each)
    widest = max(rows for rows, _ in each)
    lens = [rows + context for rows, context in each]
    used = [-(-length // sizes.page_size) for length in lens]
    numbers = torch.randperm(sum(used)).to(torch.int32)
    table = torch.zeros(live, max(used), dtype=torch.int32)
    for row, first, count in zip(table, accumulate(used, initial=0), used, strict=False):
        row[:count] = numbers[first : first + count]
    total = sum(rows for rows, _ in each)
    idle = total - live if listed else 0

    def integers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    ancestors = None if widest == 1 else torch.cat([chain_masks(rows, device) for rows, _ in each])
    starts = [0] + [rows for rows, _ in each] + [0] * idle
    inputs = RaggedInputs(
        q=sizes.random(total, sizes.heads, sizes.head_dim),
        page_table=table.to(device),
        prefix_lens=integers([context for _, context in each] + [0] * idle),
        kv_lens=integers(lens + [0] * idle),
        query_start=torch.tensor(starts).cumsum(0).to(device, torch.int32),
        ancestors=ancestors,
        table_rows=integers(list(range(live)) + [-1] * idle) if listed else None,
        work=None,
        kv_heads=sizes.kv_heads,
        max_query_len=widest,
        max_kv_len=max(lens),
    )
    return replace(inputs, work=inputs.plan()) if listed else inputs
