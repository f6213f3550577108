"""Page tables that do not move, for rounds that are recorded: rewritten in stream order when a lease has grown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.pool import KVPool

FIRST_WIDTH_TOKENS = 4096
WIDTH_FACTOR = 4


class PageTable:
    """One table of fixed width.

    Args:
        bs: Rows.
        width: Pages per row.
        device: Where it lives.

    Attributes:
        tensor: ``[bs, width] int32``.
        lent: Whether somebody's rounds read it.
    """

    def __init__(self, bs: int, width: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.tensor = torch.zeros((bs, width), dtype=torch.int32, device=device)
        self.lent = False
        self._host = np.zeros((bs, width), dtype=np.int32)
        self._written: list[tuple[PageLease | None, int]] = [(None, 0)] * bs
        self._staged: torch.Tensor | None = None

    def update(self, leases: Sequence[PageLease | None], *, later: bool = False) -> None:
        """Write the pages of the leases that changed, lease i to row i; a row without a lease is left as it is: nobody reads it.

        Args:
            leases: One per row.
            later: Only `flush` has the device see them.
        """
        changed = False
        for row, lease in enumerate(leases):
            if lease is None:
                continue
            known, version = self._written[row]
            if known is not lease or version != lease.version:
                pages = lease.pages[: self._host.shape[1]]
                self._host[row, : len(pages)] = pages
                self._written[row] = lease, lease.version
                changed = True
        if changed:
            fresh = torch.from_numpy(self._host)
            # Pinned memory is copied while the host goes on; torch keeps it until the copy is done. The array itself may change at once.
            self._staged = fresh.pin_memory() if self.tensor.is_cuda else fresh
        if not later:
            self.flush()

    def flush(self) -> None:
        """Have the device see, in stream order, what `update` has left to be seen later."""
        if self._staged is not None:
            self.tensor.copy_(self._staged, non_blocking=True)
            self._staged = None


class PageTables:
    """The tables of one pool by rows and width. The widths are few, as a graph is recorded for each.

    Args:
        pool: The pool.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._tables: dict[tuple[int, int], list[PageTable]] = {}

    def width_for(self, num_tokens: int) -> int | None:
        """Return the width of a table for so many tokens; None when the pool holds no sequence as long."""
        if self._pool.pages_for(num_tokens) > self._pool.num_pages:
            return None
        tokens = FIRST_WIDTH_TOKENS
        while tokens < num_tokens:
            tokens *= WIDTH_FACTOR
        return min(self._pool.pages_for(tokens), self._pool.num_pages)

    def find(self, bs: int, width: int) -> PageTable:
        """Return a table that nobody's rounds read, always the same one if they come one after another."""
        tables = self._tables.setdefault((bs, width), [])
        for table in tables:
            if not table.lent:
                return table
        tables.append(PageTable(bs, width, self._pool.device))
        return tables[-1]
