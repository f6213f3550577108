"""The interface of attention backends to a decoder's layers: plan once per step, run once per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.pool import KVPool
from outrider.shared.kv.upload import upload

MANY_ROWS = 256
"""Number of rows above which numpy computes slots faster than Python."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Describes which tokens each row of one forward pass sees, and the slots of the rows' K/V.

    Rows of one sequence are consecutive. Every row sees the whole prefix ``[0, prefix_len)`` of its sequence.
    Past the prefix:

    - With `ancestors`, a row sees token index ``prefix_len + j`` iff bit j of its mask is set.
    - Without `ancestors`, rows are causal: row i of n sees token indices up to ``kv_len - n + i``.

    The tensors may be buffers that are reused (CUDA graphs). Backends read them while the step runs and keep
    no reference to them.

    Attributes:
        page_table: ``[bs, max_pages] int32``. With `table_rows`, it may have any number of rows.
        prefix_lens: ``[bs] int32``.
        kv_lens: ``[bs] int32``. Largest number of tokens that a row sees, including this step's rows.
        query_start: ``[bs + 1] int32``. Rows of sequence b are ``[query_start[b], query_start[b + 1])``.
        ancestors: ``[rows, words] int32`` bit masks, or None for causal rows.
        slots: ``[rows] int64``. The slot of each row's K/V, or -1 to store nothing.
        max_query_len: Upper bound of the number of rows of a sequence. It is a host number, so reading it
            never waits.
        max_kv_len: An upper bound of kv_lens, as a host number.
        table_rows: ``[bs] int32``. The row of `page_table` that belongs to each sequence, or -1 for an idle
            sequence. None means that sequence b uses row b.
        ragged: True if sequences differ and only the device knows how. Attention then plans its work on the
            device, and its grid depends on the number of rows and on `max_query_len`, but not on
            `max_kv_len`. A sequence may have no rows. An idle sequence has the table row -1 or no tokens, and
            its rows are padding, whose results are zeros.
        host_lens: For each sequence of a causal batch, the token index of its first row and its number of
            rows, as host numbers. None if the host does not know them or the batch has `ancestors`.
    """

    page_table: torch.Tensor
    prefix_lens: torch.Tensor
    kv_lens: torch.Tensor
    query_start: torch.Tensor
    ancestors: torch.Tensor | None
    slots: torch.Tensor
    max_query_len: int
    max_kv_len: int
    table_rows: torch.Tensor | None = None
    ragged: bool = False
    host_lens: tuple[tuple[int, int], ...] | None = None


class AttentionBackend(Protocol):
    """An attention implementation. Call `plan` once per forward pass, before the layers call `run`."""

    @property
    def batch(self) -> AttentionBatch | None:
        """The batch planned last, which tensor parallelism sends to the other processes."""
        ...

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare one forward pass: compute everything that does not depend on the layer."""
        ...

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: KVPool,
        scale: float,
        window: int = 0,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Store K/V into the pool's planes of `layer`, then attend.

        Args:
            layer: Index of the layer within the pool.
            q: ``[rows, heads, head_dim]``. Rows may be strided.
            k, v: ``[rows, kv_heads, head_dim]``. Rows may be strided. A latent pool stores only k and reads
                values from k.
            pool: The pool that stores K/V.
            scale: Factor on the scores, usually head_dim ** -0.5.
            window: If above 0, a row at position p sees only positions above p - window. A tree row's
                position is its prefix plus its number of ancestors. A tree row sees its nearest
                ``window - 1`` ancestors, because parents have lower columns than their children.
            sinks: ``[heads] fp32``, one logit per head that takes part in the softmax but has no value,
                or None.
            softcap: If above 0, scaled scores s become ``softcap * tanh(s / softcap)`` before the mask, as in
                Gemma 2. Sinks are not capped.

        Returns:
            ``[rows, heads * head_dim]`` in q's dtype.
        """
        ...


def build_batch(
    pool: KVPool,
    leases: Sequence[PageLease],
    starts: Sequence[int],
    counts: Sequence[int],
    *,
    ancestors: torch.Tensor | None = None,
    prefix_lens: Sequence[int] | None = None,
) -> AttentionBatch:
    """Build the batch of a step from host lengths. Takes one copy per tensor and never waits for the device.

    Args:
        pool: The pool of the leases.
        leases: One lease per sequence, each long enough for ``starts[b] + counts[b]`` tokens.
        starts: Token index of each sequence's first row. Its rows use the slots of the indices
            ``[start, start + count)``.
        counts: Number of rows of each sequence, ≥ 1.
        ancestors: ``[sum(counts), words] int32`` masks of tree rows (bit j is token index prefix_len + j), or
            None for causal rows.
        prefix_lens: Number of tokens that all rows of a sequence see. Defaults to `starts`. The number is
            smaller than the start if a tree grows level by level. The earlier levels then lie between the
            prefix and the start, and rows see these levels through mask bits only.

    Raises:
        ValueError: A lease is too short.
    """
    page_size = pool.page_size
    for lease, start, count in zip(leases, starts, counts, strict=True):
        stop = start + count
        if stop > len(lease.pages) * page_size:
            raise ValueError(
                f"the lease has room for {len(lease.pages) * page_size} tokens; "
                f"call KVPool.reserve for {stop} tokens first"
            )
    rows = list(zip(leases, starts, counts, strict=True))
    slots: list[int] | np.ndarray
    if sum(counts) > MANY_ROWS:
        slots = np.concatenate([pool.slot_array(lease, start, start + count) for lease, start, count in rows])
    else:
        slots = [
            slot for lease, start, count in rows for slot in pool.token_slots(lease, start, start + count)
        ]
    kv_lens = [start + count for start, count in zip(starts, counts, strict=True)]
    lengths = upload(
        [*(starts if prefix_lens is None else prefix_lens), *kv_lens], torch.int32, pool.device
    ).view(2, -1)
    return AttentionBatch(
        page_table=pool.page_table(leases),
        prefix_lens=lengths[0],
        kv_lens=lengths[1],
        query_start=upload([0, *accumulate(counts)], torch.int32, pool.device),
        ancestors=ancestors,
        slots=upload(slots, torch.int64, pool.device),
        max_query_len=max(counts, default=0),
        max_kv_len=max(kv_lens, default=0),
        host_lens=None if ancestors is not None else tuple(zip(starts, counts, strict=True)),
    )


def host_table_rows(batch: AttentionBatch) -> list[int]:
    """Return the row of the page table of each sequence, or -1 for an idle one. May wait for the device."""
    if batch.table_rows is None:
        return list(range(batch.kv_lens.shape[0]))
    return batch.table_rows.tolist()


def pack_rows(padded: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Drop padding: keep ``counts[b]`` rows of sequence b, and turn ``[bs, N, ...]`` into ``[rows, ...]``."""
    if all(count == padded.shape[1] for count in counts):
        return padded.flatten(0, 1)
    return torch.cat([padded[b, :count] for b, count in enumerate(counts)])


def causal_ancestors(count: int, words: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return causal masks ``[count, words] int32``: row i has bits 0…i.

    Use these masks in batches that mix causal and tree rows.

    Args:
        count: Number of rows, at most ``32 * words``.
        words: Mask words per row. The batch's widest tree determines the number.
        device: Device of the masks.

    Raises:
        ValueError: `words` is too small.
    """
    if count > 32 * words:
        raise ValueError(f"{count} causal rows need {-(-count // 32)} mask words, not {words}")
    column = torch.arange(32 * words, device=device)
    visible = column[None, :] <= torch.arange(count, device=device)[:, None]  # [count, 32 * words]
    bits = torch.where(visible, 1 << (column % 32), 0).view(count, words, 32).sum(-1)  # int64, < 2**32
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)


def visible_columns(ancestors: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Unpack mask words ``[rows, words] int32`` into ``[rows, num_columns] bool``.

    Columns past the last mask bit are False.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=ancestors.device)
    bits = ((ancestors[:, :, None] >> shifts) & 1).flatten(1).bool()  # [rows, 32 * words]
    missing = num_columns - bits.shape[1]
    return torch.nn.functional.pad(bits, (0, missing)) if missing > 0 else bits[:, :num_columns]
