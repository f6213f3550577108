"""Attention backend in plain torch, optimised for the CPU. Reads consecutive pages of K/V without a copy.

Views and masks are created once per forward pass, not once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from outrider.shared.attn.base import AttentionBatch, host_table_rows, visible_columns
from outrider.shared.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence of the planned step, on the host.

    Attributes:
        rows: The sequence's rows of the batch.
        prefix_len, kv_len: Number of tokens that every row sees, and largest number of tokens that a row may
            see. If kv_len is 0, the rows yield zeros.
        views: If the sequence's pages are consecutive, K and V of every layer, each
            ``[1, kv_heads, kv_len, head_dim]``. Otherwise empty.
        pages: ``[pages in use] int64``. If the pages are not consecutive, K and V are gathered from them.
        mask: ``[rows, kv_len]``, added to the scores. None if every row sees all tokens.
        windowed: Maps a window size to the first visible token index and to the mask from that index on. The
            first layer that uses a window adds its entry.
    """

    rows: slice
    prefix_len: int
    kv_len: int
    views: tuple[torch.Tensor, ...]
    pages: torch.Tensor
    mask: torch.Tensor | None
    windowed: dict[int, tuple[int, torch.Tensor | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The work of one step in every layer of one pool.

    Attributes:
        sequences: The sequences in the order of their rows.
        stores: If the step's slots are consecutive, views of K and V of every layer at these slots, each
            ``[1, kv_heads, rows, head_dim]``. Otherwise empty.
        slots: ``[stored rows] int64``. If the slots are not consecutive, K and V are written to these slots.
        stored_rows: ``[stored rows] int64``, the indices of the rows to store. None if all rows are stored.
    """

    sequences: tuple[_Sequence, ...]
    stores: tuple[torch.Tensor, ...]
    slots: torch.Tensor
    stored_rows: torch.Tensor | None


class TorchAttention:
    """`AttentionBackend` for the CPU. Works on any device but waits for the device once per step."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._pool: KVPool | None = None
        self._plan: _Plan | None = None

    @property
    def batch(self) -> AttentionBatch | None:
        """The batch planned last."""
        return self._batch

    def plan(self, batch: AttentionBatch) -> None:
        """Keep the batch. The first layer makes the plan, because the pool is known only then."""
        self._batch = batch
        self._plan = None

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
        """Store K/V, then attend (see `AttentionBackend.run`)."""
        plan = self._plan
        if plan is None or self._pool is not pool:
            assert self._batch is not None, "plan() comes before run()"
            plan = self._plan = _make_plan(self._batch, pool, q.dtype)
            self._pool = pool
        _store(plan, layer, k, v, pool)
        queries = q.transpose(0, 1).unsqueeze(0)  # [1, heads, rows, head_dim]
        outs = []
        for sequence in plan.sequences:
            if sequence.kv_len == 0:
                outs.append(q.new_zeros(sequence.rows.stop - sequence.rows.start, q.shape[1] * q.shape[2]))
                continue
            part = queries if len(plan.sequences) == 1 else queries[:, :, sequence.rows]
            first, mask = 0, sequence.mask
            if 0 < window < sequence.kv_len:
                assert self._batch is not None
                first, mask = _windowed(self._batch, sequence, window)
            outs.append(_attend(sequence, layer, part, pool, scale, first, mask, sinks, softcap))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend(
    sequence: _Sequence,
    layer: int,
    queries: torch.Tensor,
    pool: KVPool,
    scale: float,
    first: int,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    softcap: float,
) -> torch.Tensor:
    """Return ``[rows, heads * head_dim]`` for the queries ``[1, heads, rows, head_dim]`` of one sequence.

    The tokens before index `first` are skipped. The mask therefore begins with token `first`.
    """
    if sequence.views:
        keys, values = sequence.views[2 * layer], sequence.views[2 * layer + 1]
    else:
        keys = (
            pool.k_planes[layer]
            .index_select(0, sequence.pages)
            .flatten(0, 1)[None, : sequence.kv_len]
            .transpose(1, 2)
        )
        values = keys
        if not pool.latent:
            values = (
                pool.v_planes[layer]
                .index_select(0, sequence.pages)
                .flatten(0, 1)[None, : sequence.kv_len]
                .transpose(1, 2)
            )
    if first:
        keys, values = keys[:, :, first:], values[:, :, first:]
    if sinks is None and softcap == 0:
        out = scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=True).squeeze(
            0
        )
    else:
        out = _attend_by_scores(queries[0], keys[0], values[0], mask, scale, sinks, softcap)
    return out.transpose(0, 1).flatten(1)


def _attend_by_scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float,
) -> torch.Tensor:
    """Return ``[heads, rows, head_dim]`` with sinks or a cap, which `scaled_dot_product_attention` lacks."""
    kv_heads, rows, head_dim = keys.shape[0], queries.shape[1], queries.shape[2]
    grouped = queries.reshape(kv_heads, -1, rows, head_dim)  # [kv_heads, group, rows, head_dim]
    scores = torch.matmul(grouped, keys[:, None].transpose(2, 3)).float() * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return torch.matmul(scores.softmax(-1).to(values.dtype), values[:, None]).flatten(0, 1)
    column = sinks.view(kv_heads, -1, 1, 1).expand(-1, -1, rows, 1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1].to(values.dtype)
    return torch.matmul(weights, values[:, None]).flatten(0, 1)


def _windowed(batch: AttentionBatch, sequence: _Sequence, window: int) -> tuple[int, torch.Tensor | None]:
    """Return the first token index that any row sees in its window, and the mask from this index on."""
    known = sequence.windowed.get(window)
    if known is not None:
        return known
    count, kv_len = sequence.rows.stop - sequence.rows.start, sequence.kv_len
    device = batch.slots.device
    # The position of a causal row is its token index. The position of a tree row is its prefix length plus
    # its number of ancestors. For tree rows, `index` contains the positions of the row's ancestors.
    index = torch.arange(kv_len, device=device).expand(count, -1)
    if batch.ancestors is None:
        positions = index[0, kv_len - count :]
        cut = kv_len
    else:
        cut = sequence.prefix_len
        path = visible_columns(batch.ancestors[sequence.rows], kv_len - cut).cumsum(
            -1
        )  # [rows, columns]: ancestors up to a column
        positions = cut + path[:, -1] - 1
        index = torch.cat([index[:, :cut], cut + path - 1], dim=-1)
    first = max(0, min(int(positions.min()) - window + 1, cut))
    hidden = index[:, first:] <= positions[:, None] - window
    # If there is no mask, the only row is causal, and all tokens outside its window come before `first`.
    mask = None if sequence.mask is None else sequence.mask[:, first:].masked_fill(hidden, float("-inf"))
    sequence.windowed[window] = first, mask
    return first, mask


def _store(plan: _Plan, layer: int, k: torch.Tensor, v: torch.Tensor, pool: KVPool) -> None:
    """Write K and V ``[rows, kv_heads, head_dim]`` to the step's slots of one layer."""
    if plan.stores:
        plan.stores[2 * layer].copy_(k.transpose(0, 1))
        if not pool.latent:
            plan.stores[2 * layer + 1].copy_(v.transpose(0, 1))
        return
    if plan.stored_rows is not None:
        k, v = k.index_select(0, plan.stored_rows), v.index_select(0, plan.stored_rows)
    pool.k_planes[layer].flatten(0, 1).index_copy_(0, plan.slots, k)
    if not pool.latent:
        pool.v_planes[layer].flatten(0, 1).index_copy_(0, plan.slots, v)


def _make_plan(batch: AttentionBatch, pool: KVPool, dtype: torch.dtype) -> _Plan:
    starts, prefix_lens, kv_lens = (
        batch.query_start.tolist(),
        batch.prefix_lens.tolist(),
        batch.kv_lens.tolist(),
    )
    sequences = []
    owners = host_table_rows(batch)
    for b, (prefix_len, kv_len) in enumerate(zip(prefix_lens, kv_lens, strict=True)):
        rows = slice(starts[b], starts[b + 1])
        if rows.start == rows.stop:
            continue
        if kv_len <= 0 or owners[b] < 0:
            sequences.append(_idle(rows, batch.page_table))
            continue
        pages = batch.page_table[owners[b], : pool.pages_for(kv_len)]
        first = _first_if_consecutive(pages.tolist())
        views = _views(pool, first * pool.page_size, kv_len) if first is not None else ()
        mask = _mask(batch, rows, prefix_len, kv_len, dtype)
        sequences.append(_Sequence(rows, prefix_len, kv_len, views, pages.to(torch.int64), mask))
    if starts[-1] < batch.slots.shape[0]:  # Some rows belong to no sequence.
        sequences.append(_idle(slice(starts[-1], batch.slots.shape[0]), batch.page_table))
    slots = batch.slots
    host_slots = slots.tolist()
    first = _first_if_consecutive(host_slots)
    stored_rows = None
    if any(slot < 0 for slot in host_slots):
        stored_rows = (slots >= 0).nonzero().flatten()
        slots = slots[stored_rows]
    stores = _views(pool, first, len(host_slots)) if first is not None else ()
    return _Plan(tuple(sequences), stores, slots, stored_rows)


def _idle(rows: slice, page_table: torch.Tensor) -> _Sequence:
    """Return a sequence without tokens."""
    return _Sequence(rows, 0, 0, (), page_table.new_empty(0, dtype=torch.int64), None)


def _views(pool: KVPool, first_slot: int, count: int) -> tuple[torch.Tensor, ...]:
    """Return K and V of every layer (see `KVPool.slot_views`). In a latent pool, V is the same view as K."""
    views = pool.slot_views(first_slot, count)
    return tuple(view for view in views for _ in range(2)) if pool.latent else views


def _first_if_consecutive(numbers: list[int]) -> int | None:
    """Return the first number if the list counts up by one from a number ≥ 0, else None."""
    if not numbers or numbers[0] < 0:
        return None
    return numbers[0] if numbers == list(range(numbers[0], numbers[0] + len(numbers))) else None


def _mask(
    batch: AttentionBatch, rows: slice, prefix_len: int, kv_len: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return the additive mask ``[rows, kv_len]`` of one sequence, or None if its rows see all tokens."""
    count = rows.stop - rows.start
    device = batch.slots.device
    if batch.ancestors is None:
        if count == 1:
            return None
        hidden = torch.ones(count, kv_len, dtype=torch.bool, device=device).triu(kv_len - count + 1)
    elif device.type == "cpu":
        # NumPy's overhead is a third of torch's. With these small masks, overhead takes most of the time, and
        # a draft computes a mask for every level of a tree.
        bits = np.unpackbits(
            batch.ancestors[rows].contiguous().numpy().view(np.uint8), axis=1, bitorder="little"
        )
        columns = min(bits.shape[1], kv_len - prefix_len)
        added = np.zeros((count, kv_len), dtype=np.float32)
        added[:, prefix_len:] = -np.inf
        added[:, prefix_len : prefix_len + columns][bits[:, :columns] != 0] = 0
        return torch.from_numpy(added).to(dtype)
    else:
        hidden = torch.zeros(count, kv_len, dtype=torch.bool, device=device)
        hidden[:, prefix_len:] = ~visible_columns(batch.ancestors[rows], kv_len - prefix_len)
    return torch.zeros(count, kv_len, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
