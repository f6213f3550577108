"""Reference of synthetic_acceptance, on the host. `kernels.synthetic_acceptance` documents the ops."""

from __future__ import annotations

import torch

from outrider.kernels.philox.reference import gumbel_noise

NOISE_CHOICE = 1 << 20
"""Choice index of the noise that decides acceptance. No request has this choice index, so acceptance is
independent of the sampled tokens."""


def synthetic_acceptance(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: torch.Tensor,
    ancestors: torch.Tensor,
    chosen: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    thresholds: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    noise = gumbel_noise(seeds, positions, torch.full_like(num_nodes, NOISE_CHOICE), 1)  # [bs, 1]
    drawn = (noise < thresholds.to(noise.device)).sum(dim=1).tolist()
    out = chosen.clone()
    for row, count in enumerate(num_nodes.tolist()):
        row_tokens, row_parents, row_depths = (
            field[row, :count].tolist() for field in (tokens, parents, depths)
        )
        accepted = min(drawn[row], max(row_depths))
        end = row_depths.index(accepted)
        words = ancestors[row, end].tolist()
        for node in range(1, count):
            if words[node // 32] >> (node % 32) & 1:
                out[row, row_parents[node]] = row_tokens[node]
        children = {token for token, parent in zip(row_tokens, row_parents, strict=True) if parent == end}
        bonus = int(chosen[row, end])
        while bonus in children:
            bonus = (bonus + 1) % vocab_size
        out[row, end] = bonus
    return out


def packed_acceptance(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    starts: torch.Tensor,
    num_nodes: torch.Tensor,
    chosen: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    thresholds: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    out = chosen.clone()
    for tree, (start, count) in enumerate(zip(starts.tolist(), num_nodes.tolist(), strict=False)):
        if count > 1:
            here, root = slice(start, start + count), slice(start, start + 1)
            out[here] = synthetic_acceptance(
                tokens[None, here],
                parents[None, here],
                depths[None, here],
                num_nodes[tree : tree + 1],
                ancestors[None, here],
                chosen[None, here],
                positions[root],
                seeds[root],
                thresholds,
                vocab_size,
            )[0]
    return out
