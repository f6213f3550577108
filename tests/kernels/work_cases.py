"""Checks of attention by a work list, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from attention_cases import TOLERANCE, Sequence, random_tree_masks
from guards import Guards, reference_version, triton_version

from outrider.kernels.tree_attention import WorkList, plan_attention, tree_attention

IDLE = Sequence(0, 1, 0)
"""A row of padding."""
ABSENT = Sequence(0, 0, 0)
"""A sequence without rows."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the heads and of the pages."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    page_size: int = 16


class RaggedBatch:
    """Random inputs of attention for sequences in shuffled rows of a page table.

    Slots without a token are NaN. Idle sequences have the table row -1, or a table row and no tokens.

    Args:
        device: Device of the inputs.
        dtype: Type of queries and results.
        sequences: The sequences.
        shape: Sizes.
        tree: False for causal rows.
        plane_dtype: Type of the planes; `dtype` if None.
        max_query_len: Class of the widest sequence; its number of rows if None.
        spare_rows: Rows that belong to no sequence.
        room: Tokens per row of the page table; those of the longest sequence if None.
    """

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        sequences: list[Sequence],
        shape: Shape,
        *,
        tree: bool,
        plane_dtype: torch.dtype | None = None,
        max_query_len: int | None = None,
        spare_rows: int = 0,
        room: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(len(sequences) + 3 * shape.dim)
        bs, longest = len(sequences), max(sequence.kv_len for sequence in sequences)
        self.max_kv_len = longest if room is None else room
        self.max_query_len = max_query_len or max(sequence.rows for sequence in sequences)
        self.rows = sum(sequence.rows for sequence in sequences) + spare_rows
        self.shape, self.dtype, self.plane_dtype = shape, dtype, plane_dtype
        pages = max(1, -(-self.max_kv_len // shape.page_size))
        numbers = torch.randperm((bs + 2) * pages, generator=generator)
        table = numbers[: (bs + 1) * pages].view(bs + 1, pages).to(torch.int32)  # one row more than sequences
        owners = torch.randperm(bs + 1, generator=generator)[:bs].to(torch.int32)
        used = torch.zeros(len(numbers), shape.page_size, dtype=torch.bool)
        for b, sequence in enumerate(sequences):
            index = torch.arange(sequence.kv_len)
            used[table[owners[b]].long()[index // shape.page_size], index % shape.page_size] = True
            if sequence.kv_len == 0 and b % 2 == 0:
                owners[b] = -1
        self.planes = []
        for _ in range(2):
            plane = torch.randn(*used.shape, shape.kv_heads, shape.dim, generator=generator)
            plane[~used] = torch.nan
            self.planes.append(plane.to(device, plane_dtype or dtype))
        self.q = torch.randn(self.rows, shape.heads + 1, shape.dim, generator=generator).to(device, dtype)[
            :, 1:
        ]
        self.sinks = 3 * torch.randn(shape.heads, generator=generator).to(device)

        def integers(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.table, self.owners = table.to(device), owners.to(device)
        self.prefix_lens = integers([sequence.prefix for sequence in sequences])
        # The length of a sequence without a table row does not count.
        self.kv_lens = integers(
            [sequence.kv_len if owner >= 0 else 5 for sequence, owner in zip(sequences, owners, strict=True)]
        )
        counts = torch.tensor([0] + [sequence.rows for sequence in sequences])
        self.query_start = counts.cumsum(0).to(device, torch.int32)
        self.ancestors = None
        if tree:
            words = max(1, -(-max(sequence.kv_len - sequence.prefix for sequence in sequences) // 32))
            shown = [sequence if sequence.kv_len else Sequence(0, sequence.rows) for sequence in sequences]
            masks = random_tree_masks(shown, words, generator)
            self.ancestors = torch.nn.functional.pad(masks, (0, 0, 0, spare_rows), value=-1).to(device)

    def plan(self, guards: Guards | None = None) -> WorkList:
        """Return the work list."""
        put = guards.put if guards else _same
        return plan_attention(
            put(self.kv_lens), put(self.query_start), put(self.prefix_lens), put(self.owners), rows=self.rows,
            max_query_len=self.max_query_len, heads=self.shape.heads, kv_heads=self.shape.kv_heads,
            dim=self.shape.dim, dtype=self.dtype, plane_dtype=self.plane_dtype,
        )  # fmt: skip

    def attend(
        self, work: WorkList | None, guards: Guards | None = None, *, sinks: bool = False, window: int = 0,
        softcap: float = 0.0, out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the results, into `out` if given."""
        put = guards.put if guards else _same
        out = torch.full(self.q.shape, 7.0, dtype=self.dtype, device=self.q.device) if out is None else out
        small = (self.table, self.prefix_lens, self.kv_lens, self.query_start)
        return tree_attention(
            self.q, *[put(plane) for plane in self.planes], *[put(tensor) for tensor in small],
            None if self.ancestors is None else put(self.ancestors), scale=self.shape.dim**-0.5,
            max_query_len=self.max_query_len, max_kv_len=self.max_kv_len, window=window,
            sinks=self.sinks if sinks else None, softcap=softcap, table_rows=put(self.owners), work=work,
            out=put(out),
        )  # fmt: skip

    def is_idle(self, row: int) -> bool:
        """Return whether a row belongs to an idle sequence."""
        b = int(torch.searchsorted(self.query_start.cpu(), torch.tensor(row), right=True)) - 1
        return b < len(self.owners) and bool((self.owners[b] < 0) | (self.kv_lens[b] == 0))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def check_ragged(
    device: str,
    dtype: torch.dtype,
    sequences: list[Sequence],
    shape: Shape | None = None,
    *,
    tree: bool,
    plane_dtype: torch.dtype | None = None,
    max_query_len: int | None = None,
    spare_rows: int = 0,
    room: int | None = None,
    sinks: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Compare ragged attention with the reference and with uniform attention, and the work lists of both."""
    batch = RaggedBatch(
        device,
        dtype,
        sequences,
        shape or Shape(),
        tree=tree,
        plane_dtype=plane_dtype,
        max_query_len=max_query_len,
        spare_rows=spare_rows,
        room=room,
    )
    how = {"sinks": sinks, "window": window, "softcap": softcap}
    with reference_version():
        planned = batch.plan()
        expected = batch.attend(planned, **how)
    guards = Guards(64)  # addresses stay aligned, as the compiled kernels are used
    with triton_version(guards):
        work = batch.plan(guards)
        actual = batch.attend(work, guards, **how)
        uniform = batch.attend(None, guards, **how)
    assert work.sizes == planned.sizes
    torch.testing.assert_close(work.items, planned.items, rtol=0, atol=0)
    torch.testing.assert_close(work.merges, planned.merges, rtol=0, atol=0)
    check_items(work, batch)
    assert not bool(work.arrivals.any()) or not work.sizes.gathers
    assert not bool(expected.isnan().any())
    for found in (actual, uniform):
        torch.testing.assert_close(
            found.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
    for row in range(batch.rows - spare_rows):
        assert bool((actual[row] == 0).all()) == batch.is_idle(row)
    assert bool((actual[batch.rows - spare_rows :] == 7.0).all())


def check_items(work: WorkList, batch: RaggedBatch) -> None:
    """Check that every block of rows gets every token exactly once, within the bounds of the buffers."""
    sizes = work.sizes
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    end_of_partials = 0
    for (
        start,
        q_len,
        kv_len,
        prefix,
        owner,
        pair,
        begin,
        end,
        split,
        splits,
        partial,
        block,
    ) in work.items.tolist():
        if q_len == 0:
            assert (begin, end) == (0, 0)
            continue
        assert pair < q_len * sizes.group
        assert 0 <= prefix <= kv_len
        assert 0 <= owner < batch.table.shape[0]
        assert 0 <= block < sizes.items
        shares = seen.setdefault((start, pair), [])
        assert split == len(shares) < splits
        shares.append((begin, end))
        if splits > 1:
            end_of_partials = max(end_of_partials, partial + q_len * splits)
        if split == splits - 1:
            assert [0] + [stop for _, stop in shares] == [first for first, _ in shares] + [kv_len]
    assert end_of_partials <= sizes.partial_rows
    starts = batch.query_start.tolist()
    rows_of = pairwise(starts)
    blocks = sum(-(-(stop - start) * sizes.group // sizes.blocks.pairs) for start, stop in rows_of)
    assert len(seen) == blocks
