"""The new rows of one sequence at addresses that never move, padded at the front: one CUDA graph serves every number of rows up to its own.

Padding lies at the front, because causal rows are counted from the end: the last row is always the newest, and what the padded ones see
and make is nobody's business. They store nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.shared.attn.base import AttentionBatch
from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.pool import KVPool


class PaddedRows:
    """Inputs of a pass over at most `size` rows. All of them lie in one buffer, so that one copy from the host loads them.

    Args:
        size: Rows of the pass.
        pages: Columns of the page table.
        pool: Where the rows' K/V goes.
        extra: Further 32-bit words for the caller, 8-byte aligned.

    Attributes:
        size, pages: As given.
        tokens: ``[size] int32``.
        positions: ``[size] int32``.
        batch: What attention is planned with.
        extra: ``[extra] int32``.
    """

    def __init__(self, size: int, pages: int, pool: KVPool, extra: int = 0) -> None:
        self.size = size
        self.pages = pages
        self._pool = pool
        bounds = np.cumsum([2 * size, extra, size, size, 1, 1]).tolist()
        self._host = np.zeros(bounds[-1] + pages, dtype=np.int32)
        host_slots, *self._columns = np.split(self._host, bounds)
        self._slots = host_slots.view(np.int64)
        device = pool.device
        with torch.inference_mode(False):
            self._buffer = torch.zeros(len(self._host), dtype=torch.int32, device=device)
            query_start = torch.tensor([0, size], dtype=torch.int32).to(device)
        slots, self.extra, self.tokens, self.positions, prefix_lens, kv_lens, table = (
            self._buffer.tensor_split(bounds)
        )
        self.batch = AttentionBatch(
            page_table=table.view(1, pages),
            prefix_lens=prefix_lens,
            kv_lens=kv_lens,
            query_start=query_start,
            ancestors=None,
            slots=slots.view(torch.int64),
            max_query_len=size,
            max_kv_len=pages * pool.page_size,
        )
        self.make_idle()

    def fits(self, start: int, count: int) -> bool:
        """Whether `count` rows from token index `start` on can be loaded."""
        return count <= self.size and start + count <= self.pages * self._pool.page_size

    def load(
        self, lease: PageLease, tokens: Sequence[int], start: int, extra: np.ndarray | None = None
    ) -> None:
        """Describe the rows of token indices ``[start, start + len(tokens))`` to the device, in stream order.

        Args:
            lease: Of the sequence; it holds the rows.
            tokens: At least one.
            start: Index, and rotary position, of the first.
            extra: ``[extra] int32``; None leaves zeros.
        """
        stop, pad = start + len(tokens), self.size - len(tokens)
        more, token_ids, positions, prefix_lens, kv_lens, table = self._columns
        pages = lease.pages[: self.pages]
        self._slots[:pad] = -1
        self._slots[pad:] = self._pool.token_slots(lease, start, stop)
        if extra is not None:
            more[:] = extra
        token_ids[:pad], token_ids[pad:] = 0, tokens
        positions[:pad], positions[pad:] = 0, range(start, stop)
        prefix_lens[0], kv_lens[0] = start, stop
        table[: len(pages)] = pages
        self._upload()

    def make_idle(self) -> None:
        """Make all rows padding: a pass over them stores nothing."""
        self._host[:] = 0
        self._slots[:] = -1
        self._upload()

    def _upload(self) -> None:
        fresh = torch.from_numpy(self._host)
        # Pinned memory is copied while the host goes on; torch keeps it until the copy is done. The array itself may change at once.
        self._buffer.copy_(fresh.pin_memory() if self._buffer.is_cuda else fresh, non_blocking=True)
