"""Checks of tree_attention, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.tree_attention import tree_attention

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence of a batch.

    Attributes:
        prefix: Token indices before the tree, or before this step's rows.
        rows: Query rows.
        columns: Columns after the prefix.
    """

    prefix: int
    rows: int
    columns: int | None = None  # None: equal to rows

    @property
    def kv_len(self) -> int:
        return self.prefix + (self.rows if self.columns is None else self.columns)


def random_tree_masks(
    sequences: list[Sequence], words: int, generator: torch.Generator, chain: bool = False
) -> torch.Tensor:
    """Return masks ``[rows, words] int32`` of a random tree.

    Row i is node ``columns - rows + i`` and sees its path. With `chain`, the tree rarely branches.
    """
    masks = []
    for sequence in sequences:
        columns = sequence.kv_len - sequence.prefix
        reach: list[int] = []
        for node in range(columns):
            parent = (
                node - 1
                if chain and node % 4
                else int(torch.randint(-1, max(1, node), (1,), generator=generator))
            )
            reach.append((reach[parent] if 0 <= parent < node else 0) | 1 << node)
        for mask in reach[columns - sequence.rows :]:
            masks.append([(mask >> 32 * word) & 0xFFFFFFFF for word in range(words)])
    return torch.tensor(masks, dtype=torch.int64).view(-1, words).to(torch.int32)


def check_tree_attention(
    device: str,
    dtype: torch.dtype,
    sequences: list[Sequence],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    tree: bool,
    guards: Guards,
    window: int = 0,
    give_positions: bool = True,
    sinks: bool = False,
    softcap: float = 0.0,
    chain: bool = False,
    spare_rows: int = 0,
    mask_words: int | None = None,
) -> None:
    """Compare with the reference. Slots without a token and rows without a sequence are poison."""
    generator = torch.Generator().manual_seed(17 * dim + page_size + len(sequences))
    rows = sum(sequence.rows for sequence in sequences) + spare_rows
    longest = max(sequence.kv_len for sequence in sequences)
    max_pages = -(-longest // page_size) + 1
    bs = len(sequences)
    pages = bs * max_pages + 1
    table = torch.randperm(pages, generator=generator)[: bs * max_pages].view(bs, max_pages).to(torch.int32)
    planes = [torch.full((pages, page_size, kv_heads, dim), torch.nan) for _ in range(2)]
    for b, sequence in enumerate(sequences):
        for index in range(sequence.kv_len):
            for plane in planes:
                plane[table[b, index // page_size], index % page_size] = torch.randn(
                    kv_heads, dim, generator=generator
                )
    k_plane, v_plane = (plane.to(device, dtype) for plane in planes)
    q = torch.randn(rows, heads + 2 * kv_heads, dim, generator=generator).to(device, dtype)[:, :heads]
    starts = torch.tensor(
        [0, *torch.tensor([sequence.rows for sequence in sequences]).cumsum(0).tolist()], dtype=torch.int32
    )
    prefix_lens = torch.tensor([sequence.prefix for sequence in sequences], dtype=torch.int32)
    kv_lens = torch.tensor([sequence.kv_len for sequence in sequences], dtype=torch.int32)
    ancestors, positions = None, None
    if tree:
        words = mask_words or max(
            1, -(-max(sequence.kv_len - sequence.prefix for sequence in sequences) // 32)
        )
        ancestors = random_tree_masks(sequences, words, generator, chain)
        ancestors = torch.cat(
            (ancestors, torch.full((spare_rows, ancestors.shape[1]), -1, dtype=torch.int32))
        ).to(device)
        if window and give_positions:
            depths = [
                bin(sum((word & 0xFFFFFFFF) << 32 * i for i, word in enumerate(row))).count("1") - 1
                for row in ancestors.tolist()
            ]
            owner = torch.repeat_interleave(
                prefix_lens, torch.tensor([sequence.rows for sequence in sequences])
            )
            positions = (owner + torch.tensor(depths[: len(owner)], dtype=torch.int32)).to(
                device, torch.int32
            )
    logits = torch.randn(heads, generator=generator).to(device) * 3 if sinks else None
    small = [tensor.to(device) for tensor in (table, prefix_lens, kv_lens, starts)]
    options = {
        "scale": dim**-0.5,
        "max_query_len": max(sequence.rows for sequence in sequences),
        "max_kv_len": longest,
    }
    options |= {"window": window, "softcap": softcap}
    with reference_version():
        expected = torch.full((rows, heads, dim), 7.0, dtype=dtype, device=device)
        tree_attention(
            q,
            k_plane,
            v_plane,
            *small,
            ancestors,
            row_positions=positions,
            sinks=logits,
            out=expected,
            **options,
        )
    actual = guards.put(torch.full_like(expected, 7.0), "out")
    guarded = [guards.put(tensor) for tensor in (k_plane, v_plane, *small)]
    masks = None if ancestors is None else guards.put(ancestors, "ancestors")
    with triton_version(guards):
        returned = tree_attention(
            q, *guarded, masks, row_positions=positions, sinks=logits, out=actual, **options
        )
    assert returned is actual
    assert not bool(expected.isnan().any())
    torch.testing.assert_close(actual.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if spare_rows:
        assert bool((actual[-spare_rows:] == 7.0).all())
