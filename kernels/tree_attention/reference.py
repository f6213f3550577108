"""Torch reference of tree_attention. `kernels.tree_attention` documents the ops."""

from __future__ import annotations

import torch

from outrider.kernels.tree_attention.work.types import WorkList


def tree_attention(
    q: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    query_start: torch.Tensor,
    ancestors: torch.Tensor | None,
    row_positions: torch.Tensor | None,
    sinks: torch.Tensor | None,
    table_rows: torch.Tensor | None,
    work: WorkList | None,
    out: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_kv_len: int,
    window: int,
    softcap: float,
) -> None:
    """Compute `outrider.kernels.tree_attention.tree_attention` into `out`, one sequence at a time.

    Scores and sums are in fp32. This version reads all lengths on the host, so it needs no work list.
    """
    page_size, kv_heads, dim = k_plane.shape[1:]
    group = q.shape[1] // kv_heads
    starts = query_start.tolist()
    owners = list(range(len(starts) - 1)) if table_rows is None else table_rows.tolist()
    for b, (prefix_len, kv_len) in enumerate(zip(prefix_lens.tolist(), kv_lens.tolist(), strict=True)):
        rows = slice(starts[b], starts[b + 1])
        q_len = starts[b + 1] - starts[b]
        if q_len <= 0:
            continue
        if kv_len <= 0 or owners[b] < 0:
            out[rows] = 0.0
            continue
        pages = page_table[owners[b], : -(-kv_len // page_size)].long()
        k = k_plane[pages].flatten(0, 1)[:kv_len].float().permute(1, 2, 0)  # [kv_heads, dim, kv]
        v = v_plane[pages].flatten(0, 1)[:kv_len].float().transpose(0, 1)  # [kv_heads, kv, dim]
        # [q_len, kv]: position of each token as the row sees it.
        index = torch.arange(kv_len, device=q.device).expand(q_len, -1)
        if ancestors is None:
            positions = torch.arange(kv_len - q_len, kv_len, device=q.device)  # padding has negative ones
            visible = index <= positions[:, None]
        else:
            visible = _tree(ancestors[rows], prefix_len, kv_len)
            # Number of nodes on the row's path from each column on.
            path = visible[:, prefix_len:].flip(-1).cumsum(-1).flip(-1)
            positions = (
                visible[:, prefix_len:].sum(-1) + prefix_len - 1
                if row_positions is None
                else row_positions[rows]
            )
            index = torch.cat([index[:, :prefix_len], positions[:, None] + 1 - path], dim=-1)
        if window > 0:
            visible &= index > positions[:, None] - window
        # [kv_heads, group, q_len, dim]
        grouped = q[rows].float().view(q_len, kv_heads, group, dim).permute(1, 2, 0, 3)
        scores = torch.matmul(grouped, k[:, None]) * scale
        if softcap > 0:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(kv_heads, group, 1, 1).expand(-1, -1, q_len, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :kv_len].nan_to_num(0.0)  # a row that sees nothing is all NaN
        out[rows] = (
            torch.matmul(weights, v[:, None])
            .permute(2, 0, 1, 3)
            .reshape(q_len, kv_heads * group, dim)
            .to(out.dtype)
        )


def _tree(ancestors: torch.Tensor, prefix_len: int, kv_len: int) -> torch.Tensor:
    """Return ``[q_len, kv] bool``: true for the prefix and for the columns whose bit is set."""
    q_len, words = ancestors.shape
    bits = (ancestors[:, :, None] >> torch.arange(32, dtype=torch.int32, device=ancestors.device)) & 1
    visible = torch.zeros((q_len, kv_len), dtype=torch.bool, device=ancestors.device)
    visible[:, :prefix_len] = True
    columns = min(max(0, kv_len - prefix_len), words * 32)
    visible[:, prefix_len : prefix_len + columns] = bits.flatten(1)[:, :columns].bool()
    return visible
