"""Torch reference of verify. `kernels.verify` documents the ops."""

from __future__ import annotations

from dataclasses import fields

import torch

from outrider.kernels.philox.reference import gumbel_noise
from outrider.kernels.verify.filters import filter_logits
from outrider.kernels.verify.types import SamplingTensors, VerifiedTree


def choose_tokens(logits: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor) -> torch.Tensor:
    chosen = _argmax(logits)
    best = logits.gather(1, chosen[:, None])[:, 0]
    if not sampling.all_greedy:
        rows = (sampling.temperature > 0).nonzero().squeeze(1)
        if rows.numel() == logits.shape[0]:
            chosen = _sample(logits, sampling, positions)
        elif rows.numel():
            some = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
            some |= {name: column[rows] for name, column in some.items() if isinstance(column, torch.Tensor)}
            chosen[rows] = _sample(logits[rows], SamplingTensors(**some), positions[rows])
    return chosen.masked_fill_(~best.isfinite(), -1)


def _sample(logits: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor) -> torch.Tensor:
    """Choose tokens for rows that all have a temperature above 0."""
    scores = logits.float() / sampling.temperature[:, None]
    if sampling.any_filter:
        scores = _filtered(scores, sampling.top_k, sampling.top_p, sampling.min_p)
    scores += gumbel_noise(sampling.seeds, positions, sampling.choices, logits.shape[1])
    return _argmax(scores)


def _filtered(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Filter the rows that have a filter. If some rows have no filter, `scores` is changed in place."""
    rows = ((top_k > 0) | (top_p < 1) | (min_p > 0)).nonzero().squeeze(1)
    if rows.numel() == scores.shape[0]:
        return filter_logits(scores, top_k, top_p, min_p)
    scores[rows] = filter_logits(scores[rows], top_k[rows], top_p[rows], min_p[rows])
    return scores


def _argmax(scores: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's first maximum, ``[rows] int64``; a NaN counts as a maximum."""
    # On a CPU, numpy's argmax is ten times as fast as torch's.
    if scores.is_cuda or scores.dtype is not torch.float32:
        return scores.argmax(dim=-1)
    return torch.from_numpy(scores.detach().numpy().argmax(axis=-1))


def verify_tree(
    tokens: torch.Tensor, parents: torch.Tensor, num_nodes: torch.Tensor, chosen: torch.Tensor
) -> VerifiedTree:
    """Compute `outrider.kernels.verify.verify_tree`.

    Parents precede children, so one pass over the nodes of a tree completes the tree's walk.
    """
    width = tokens.shape[1]
    paths: list[list[int]] = []
    emissions: list[list[int]] = []
    rows = zip(tokens.tolist(), parents.tolist(), num_nodes.tolist(), chosen.tolist(), strict=True)
    for row_tokens, row_parents, nodes, row_chosen in rows:
        at, wanted = 0, row_chosen[0]
        path, emitted = [0], [wanted]
        for node in range(1, nodes):
            if row_parents[node] == at and row_tokens[node] == wanted:
                at, wanted = node, row_chosen[node]
                path.append(node)
                emitted.append(wanted)
        paths.append(path + [-1] * (width - len(path)))
        emissions.append(emitted + [-1] * (width - len(emitted)))
    device = tokens.device
    return VerifiedTree(
        path=torch.tensor(paths, dtype=torch.int32, device=device).view(-1, width),
        num_accepted=torch.tensor(
            [width - row.count(-1) - 1 for row in paths], dtype=torch.int32, device=device
        ),
        emitted=torch.tensor(emissions, dtype=torch.int32, device=device).view(-1, width),
    )
