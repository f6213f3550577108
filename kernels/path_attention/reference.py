"""Torch reference of path_attention, one row at a time. `kernels.path_attention` documents the op."""

from __future__ import annotations

import torch


def path_attention(
    q: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    page_table: torch.Tensor,
    sequences: torch.Tensor,
    prefix_lens: torch.Tensor,
    lengths: torch.Tensor,
    columns: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    scale: float,
    max_kv_len: int,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Compute `outrider.kernels.path_attention.path_attention`; `max_kv_len` is not needed here."""
    page_size, kv_heads, dim = k_plane.shape[1:]
    rows, heads = q.shape[:2]
    out = torch.zeros((rows, heads, dim), dtype=q.dtype, device=q.device)
    numbers = zip(sequences.tolist(), prefix_lens.tolist(), lengths.tolist(), strict=True)
    for row, (sequence, prefix_len, length) in enumerate(numbers):
        index = torch.arange(max(0, length - window) if window > 0 else 0, length, device=q.device)
        if index.numel() == 0:
            continue
        behind = index >= prefix_len
        index = torch.where(
            behind,
            prefix_len + columns[row, (index - prefix_len).clamp(min=0, max=columns.shape[1] - 1)],
            index,
        )
        page = page_table[sequence, (index // page_size).clamp(max=page_table.shape[1] - 1)].long()
        slots = page * page_size + index % page_size
        k, v = (plane.flatten(0, 1)[slots].float() for plane in (k_plane, v_plane))  # [length, kv_heads, dim]
        grouped = q[row].float().reshape(kv_heads, -1, dim)  # [kv_heads, group, dim]
        scores = torch.matmul(grouped, k.permute(1, 2, 0).contiguous()) * scale
        if softcap > 0:
            scores = torch.tanh(scores / softcap) * softcap
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(kv_heads, -1, 1)], dim=-1)
        weights = scores.softmax(-1)[..., : index.numel()].contiguous()
        out[row] = torch.matmul(weights, v.transpose(0, 1).contiguous()).view(heads, dim)
    return out
