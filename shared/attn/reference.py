"""Attention in plain torch, made for the CPU: K/V of contiguous leases is read in place, masks are built once per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from outrider.shared.attn.base import AttentionBatch, visible_columns
from outrider.shared.kv.pool import KVPool


@dataclass(slots=True)
class _Sequence:
    """One sequence of the planned step, on the host.

    Attributes:
        first_row, stop_row: Its rows.
        kv_len: Tokens that its rows may see.
        first_page: Its first page when its pages are consecutive, else -1.
        pages: ``[pages in use] int64``, for the gathering path.
        mask: ``[rows, kv_len]`` added to the scores; None when every row sees everything.
    """

    first_row: int
    stop_row: int
    kv_len: int
    first_page: int
    pages: torch.Tensor
    mask: torch.Tensor | None


class TorchAttention:
    """`AttentionBackend` on the CPU (it works on any device, but waits for it in `plan`)."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._sequences: list[_Sequence] = []
        self._page_size = 0
        self._store: slice | torch.Tensor = slice(0, 0)
        self._kept_rows: torch.Tensor | None = None

    def plan(self, batch: AttentionBatch) -> None:
        """Build the masks of one step and find the sequences whose pages are consecutive."""
        self._batch = batch
        self._page_size = 0  # the pool, and with it the page size, is known at the first layer
        self._sequences = []
        self._plan_store(batch.slots)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: KVPool, scale: float) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        if self._page_size != pool.page_size:
            self._plan_sequences(pool.page_size, q.dtype)
        k_slots, v_slots = pool.k_slots[layer], pool.v_slots[layer]
        if self._kept_rows is not None:
            k, v = k[self._kept_rows], v[self._kept_rows]
        k_slots[self._store] = k
        v_slots[self._store] = v
        queries = q.transpose(0, 1)  # [heads, rows, head_dim]
        outputs = []
        for sequence in self._sequences:
            keys, values = self._gather(sequence, k_slots, v_slots, pool, layer)
            rows = queries[:, sequence.first_row : sequence.stop_row]
            out = scaled_dot_product_attention(rows[None], keys[None], values[None], sequence.mask, scale=scale, enable_gqa=True)
            outputs.append(out[0].transpose(0, 1))  # [rows, heads, head_dim]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out.reshape(q.shape[0], -1)

    def _plan_store(self, slots: torch.Tensor) -> None:
        """Turn the slots into a slice where they are consecutive, and leave out rows with slot -1."""
        host = slots.tolist()
        first = host[0] if host else 0
        self._kept_rows = None
        if first >= 0 and host == list(range(first, first + len(host))):
            self._store = slice(first, first + len(host))
            return
        if min(host) < 0:
            self._kept_rows = (slots >= 0).nonzero().flatten()
            slots = slots[self._kept_rows]
        self._store = slots

    def _plan_sequences(self, page_size: int, dtype: torch.dtype) -> None:
        batch = self._batch
        assert batch is not None, "plan() comes before run()"
        self._page_size = page_size
        starts, prefix_lens, kv_lens = batch.query_start.tolist(), batch.prefix_lens.tolist(), batch.kv_lens.tolist()
        for b, (prefix_len, kv_len) in enumerate(zip(prefix_lens, kv_lens, strict=True)):
            first_row, stop_row = starts[b], starts[b + 1]
            if first_row == stop_row:
                continue
            pages = batch.page_table[b, : -(-kv_len // page_size)].tolist()
            contiguous = pages == list(range(pages[0], pages[0] + len(pages)))
            self._sequences.append(
                _Sequence(
                    first_row,
                    stop_row,
                    kv_len,
                    pages[0] if contiguous else -1,
                    torch.tensor(pages, dtype=torch.int64, device=batch.page_table.device),
                    _mask(batch.ancestors, first_row, stop_row, prefix_len, kv_len, dtype, batch.page_table.device),
                )
            )

    @staticmethod
    def _gather(
        sequence: _Sequence, k_slots: torch.Tensor, v_slots: torch.Tensor, pool: KVPool, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values ``[kv_heads, kv_len, head_dim]``: views where the pages are consecutive."""
        if sequence.first_page >= 0:
            start = sequence.first_page * pool.page_size
            window = slice(start, start + sequence.kv_len)
            return k_slots[window].transpose(0, 1), v_slots[window].transpose(0, 1)
        k = pool.k_planes[layer].index_select(0, sequence.pages).flatten(0, 1)[: sequence.kv_len]
        v = pool.v_planes[layer].index_select(0, sequence.pages).flatten(0, 1)[: sequence.kv_len]
        return k.transpose(0, 1), v.transpose(0, 1)


def _mask(
    ancestors: torch.Tensor | None,
    first_row: int,
    stop_row: int,
    prefix_len: int,
    kv_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """Return what is added to the scores of one sequence's rows, ``[rows, kv_len]``, or None when nothing is hidden."""
    rows = stop_row - first_row
    if ancestors is None:
        if rows == 1:
            return None
        hidden = torch.ones(rows, kv_len, dtype=torch.bool, device=device).triu(kv_len - rows + 1)
    else:
        hidden = torch.zeros(rows, kv_len, dtype=torch.bool, device=device)
        hidden[:, prefix_len:] = ~visible_columns(ancestors[first_row:stop_row], kv_len - prefix_len)
    return torch.zeros(rows, kv_len, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
