"""Padded inputs of a pass over one sequence's new tokens, so that one CUDA graph serves several lengths.

Each new token is one row of the inputs. All inputs have fixed addresses. A graph that was recorded for n rows
serves passes of up to n rows.

Padding rows come before the real rows, so the last row is always the newest token. Results of padding rows
are ignored, and their K/V is not stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.shared.attn.base import AttentionBatch
from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.pool import KVPool


class PaddedRows:
    """Inputs of a forward pass over at most `size` new tokens of one sequence, one token per row.

    All inputs lie in one buffer, so a single copy from the host fills them.

    Args:
        size: Number of rows of the pass.
        pages: Number of columns of the page table.
        pool: The KV pool that stores the rows' K and V.
        extra: Number of 32-bit words that the buffer has for the caller's own inputs. The words are aligned
            to 8 bytes.

    Attributes:
        size, pages: The arguments of the same names.
        tokens: ``[size] int32``.
        positions: ``[size] int32``.
        batch: The `AttentionBatch` to pass to the attention backend's `plan`.
        extra: ``[extra] int32``, the caller's own inputs.
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
        """Return True if `count` rows that start at token index `start` fit into the inputs."""
        return count <= self.size and start + count <= self.pages * self._pool.page_size

    def load(
        self, lease: PageLease, tokens: Sequence[int], start: int, extra: np.ndarray | None = None
    ) -> None:
        """Copy the inputs of token indices ``[start, start + len(tokens))`` to the device, in stream order.

        Args:
            lease: The sequence's lease, which must cover the rows.
            tokens: The token ids, at least one.
            start: Token index and rotary position of the first row.
            extra: ``[extra] int32``, the caller's own inputs. With None, they are zeros.
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
        """Turn all rows into padding, so that a pass stores nothing."""
        self._host[:] = 0
        self._slots[:] = -1
        self._upload()

    def _upload(self) -> None:
        fresh = torch.from_numpy(self._host)
        # The host does not wait for a copy from pinned memory. torch keeps it until the copy is done.
        # pin_memory() has copied the array to pinned memory, so the array may change now.
        self._buffer.copy_(fresh.pin_memory() if self._buffer.is_cuda else fresh, non_blocking=True)
