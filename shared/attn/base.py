"""The interface between a decoder's layers and attention backends: plan once per step, run once per layer."""

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
"""Number of rows above which NumPy computes slots faster than plain Python."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Inputs of attention for one forward pass: what each row sees, and where its K/V is stored.

    A row is one token that the pass processes. Rows of one sequence are consecutive. Every row sees the whole
    prefix of its sequence, i.e. the token indices ``[0, prefix_len)``. Which later tokens a row sees depends
    on `ancestors`:

    - With `ancestors`, a row sees token index ``prefix_len + j`` if and only if bit j of the row's mask is
      set.
    - Without `ancestors`, rows are causal. If a sequence has n rows, its row i sees all token indices up to
      and including ``kv_len - n + i``.

    Callers may reuse the tensors as buffers of CUDA graphs. A backend must therefore read the tensors while
    the pass runs, and must keep no reference to them afterwards.

    Attributes:
        page_table: ``[bs, max_pages] int32``, the page numbers of each sequence. With `table_rows`, the first
            dimension may have any size.
        prefix_lens: ``[bs] int32``. Number of tokens that every row of the sequence sees.
        kv_lens: ``[bs] int32``. Number of tokens of the sequence, including the rows of this pass. No row
            sees more tokens.
        query_start: ``[bs + 1] int32``. Rows of sequence b are ``[query_start[b], query_start[b + 1])``.
        ancestors: ``[rows, words] int32`` bit masks, or None for causal rows.
        slots: ``[rows] int64``. The KV slot of each row's K/V, or -1 to store nothing.
        max_query_len: Upper bound of the number of rows of a sequence. It is a number on the host, so reading
            it does not wait for the device.
        max_kv_len: Upper bound of `kv_lens`, also a number on the host.
        table_rows: ``[bs] int32``. For each sequence, the index of its line in `page_table`, or -1 if the
            sequence is idle. If `table_rows` is None, sequence b uses line b.
        ragged: True if sequences may have different numbers of rows, and these numbers are stored only on the
            device. The backend then plans its work on the device. The grid of the backend's kernels does not
            depend on `max_kv_len`. A sequence may have no rows. A sequence is idle if its entry of
            `table_rows` is -1 or if it has no tokens. Rows of idle sequences yield zeros.
        host_lens: Numbers on the host. For each sequence of a causal batch, the token index of its first row
            and its number of rows. None if the batch has `ancestors`, or if these numbers are known only on
            the device.
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
        """The batch of the last `plan` call. Tensor parallelism sends this batch to the other processes."""
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
        """Run attention in one layer: store K and V of the new rows in the KV pool, then attend.

        Args:
            layer: Index of the layer in the KV pool.
            q: ``[rows, heads, head_dim]``. Rows may be strided.
            k, v: ``[rows, kv_heads, head_dim]``. Rows may be strided. A pool of latents (multi-head latent
                attention) stores only k, and values are read from k.
            pool: The KV pool that stores K and V.
            scale: Factor on the scores, usually head_dim ** -0.5.
            window: If above 0, a row at position p sees only positions above p - window. The position of a
                tree row is its prefix length plus its number of ancestors. The token index of a parent node
                must be lower than those of its children.
            sinks: ``[heads] fp32``, or None. Each head has one logit that takes part in the softmax but has
                no value vector.
            softcap: If above 0, scaled scores s become ``softcap * tanh(s / softcap)`` before the mask is
                applied, as in Gemma 2. Sinks are not capped.

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
    """Build the `AttentionBatch` of one forward pass from lengths that are known on the host.

    The function makes one copy to the device per tensor and never waits for the device.

    Args:
        pool: The KV pool to which the leases belong.
        leases: One lease per sequence, each long enough for ``starts[b] + counts[b]`` tokens.
        starts: Token index of each sequence's first row. The rows use the KV slots of the token indices
            ``[start, start + count)``.
        counts: Number of rows of each sequence, ≥ 1.
        ancestors: ``[sum(counts), words] int32`` masks of tree rows, or None for causal rows. Bit j of a mask
            stands for token index prefix_len + j.
        prefix_lens: For each sequence, the number of tokens that all of its rows see. Defaults to `starts`.
            Pass a smaller number if a tree grows level by level. The tree's earlier levels then lie between
            the prefix and the start. A row sees these levels only through bits of its mask.

    Raises:
        ValueError: A lease is too short.
    """
    # 1. Check that every row has a place.
    page_size = pool.page_size
    for lease, start, count in zip(leases, starts, counts, strict=True):
        stop = start + count
        if stop > len(lease.pages) * page_size:
            raise ValueError(
                f"the lease has room for {len(lease.pages) * page_size} tokens; "
                f"call KVPool.reserve for {stop} tokens first"
            )
    # 2. Find the KV slots of all rows.
    rows = list(zip(leases, starts, counts, strict=True))
    slots: list[int] | np.ndarray
    if sum(counts) > MANY_ROWS:
        slots = np.concatenate([pool.slot_array(lease, start, start + count) for lease, start, count in rows])
    else:
        slots = [
            slot for lease, start, count in rows for slot in pool.token_slots(lease, start, start + count)
        ]
    # 3. Upload. Both length tensors share one copy to the device.
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
    """Return each sequence's row of the page table, or -1 if it is idle. May wait for the device."""
    if batch.table_rows is None:
        return list(range(batch.kv_lens.shape[0]))
    return batch.table_rows.tolist()


def pack_rows(padded: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Drop padding: keep ``counts[b]`` rows of sequence b, and turn ``[bs, N, ...]`` into ``[rows, ...]``."""
    if all(count == padded.shape[1] for count in counts):
        return padded.flatten(0, 1)
    return torch.cat([padded[b, :count] for b, count in enumerate(counts)])


def causal_ancestors(count: int, words: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return ancestor masks ``[count, words] int32`` of causal rows. Mask i has the bits 0 to i.

    Use these masks in batches that contain both causal rows and tree rows.

    Args:
        count: Number of rows, at most ``32 * words``.
        words: Number of mask words per row, which must suffice for the largest tree of the batch.
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

    Columns for which the words have no bit are False.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=ancestors.device)
    bits = ((ancestors[:, :, None] >> shifts) & 1).flatten(1).bool()  # [rows, 32 * words]
    missing = num_columns - bits.shape[1]
    return torch.nn.functional.pad(bits, (0, missing)) if missing > 0 else bits[:, :num_columns]
