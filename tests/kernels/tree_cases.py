"""Checks of tree_build and verify_tree, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

from dataclasses import astuple, fields

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.tree_build import DraftTreeTensors, tree_build
from outrider.kernels.verify import verify_tree


def candidates_of(
    bs: int, depth: int, topk: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scores, tokens and parents ``[bs, C]`` as drafting produces them, level by level.

    Scores have many ties and are never above the parent's.
    """
    levels = [topk] + [topk * topk] * (depth - 1)
    total = sum(levels)
    scores = torch.zeros(bs, total)
    parents = torch.full((bs, total), -1, dtype=torch.int32)
    begin = 0
    for level, size in enumerate(levels):
        end = begin + size
        if level:
            previous = torch.stack(
                [torch.randperm(levels[level - 1], generator=generator)[:topk] for _ in range(bs)]
            )
            parents[:, begin:end] = (
                (previous + begin - levels[level - 1]).repeat_interleave(topk, dim=1).to(torch.int32)
            )
        own = -torch.randint(0, 4, (bs, size), generator=generator) * 0.5
        above = (
            scores.gather(1, parents[:, begin:end].long().clamp(min=0)) if level else torch.zeros(bs, size)
        )
        scores[:, begin:end] = above + own
        begin = end
    tokens = torch.randint(0, 1000, (bs, total), generator=generator, dtype=torch.int32)
    return scores, tokens, parents


def check_tree_build(device: str, bs: int, depth: int, topk: int, columns: int, guards: Guards) -> None:
    generator = torch.Generator().manual_seed(bs * 100 + depth * 10 + topk)
    scores, tokens, parents = candidates_of(bs, depth, topk, generator)
    max_nodes = torch.tensor([columns, 1, columns // 2 + 1, columns + 9, 2], dtype=torch.int32)[:bs]
    scores[-1, topk:] = torch.tensor([-torch.inf, torch.nan])[torch.arange(scores.shape[1] - topk) % 2]
    root_tokens = torch.arange(bs, dtype=torch.int32) + 7
    logprobs = (
        (torch.arange(scores.numel(), dtype=torch.float32) + 1).view(scores.shape).to(device)
        if topk % 2
        else None
    )
    arguments = [tensor.to(device) for tensor in (scores, tokens, parents, root_tokens, max_nodes)]
    with reference_version():
        expected = tree_build(*arguments, columns, logprobs)
    guarded = [guards.put(tensor) for tensor in arguments]
    with triton_version(guards):
        actual = tree_build(*guarded, columns, None if logprobs is None else guards.put(logprobs))
    assert (expected.logprobs is None) == (actual.logprobs is None) == (logprobs is None)
    if expected.logprobs is not None:
        assert torch.equal(expected.logprobs > 0, expected.candidates >= 0)
    for field in fields(DraftTreeTensors):
        have, want = getattr(actual, field.name), getattr(expected, field.name)
        if want is None:
            continue
        assert have.dtype == want.dtype, field.name
        assert have.tolist() == want.tolist(), field.name


def check_verify_tree(device: str, bs: int, columns: int, guards: Guards) -> None:
    generator = torch.Generator().manual_seed(bs * 1000 + columns)
    node = torch.arange(columns)
    parents = torch.stack(
        [(torch.rand(columns, generator=generator) * node).long().clamp(min=0) for _ in range(bs)]
    ).to(torch.int32)
    parents[:, 0] = -1
    if bs > 1:
        parents[1] = node.to(torch.int32) - 1  # a chain
    tokens = torch.randint(0, 2, (bs, columns), generator=generator, dtype=torch.int32)
    chosen = torch.randint(0, 2, (bs, columns), generator=generator)
    num_nodes = torch.tensor(
        [columns, columns, 1, max(1, columns - 3), max(1, columns // 2)], dtype=torch.int32
    )[:bs]
    if bs > 1:
        chosen[1, :-1] = tokens[1, 1:]  # accepted to the end
        chosen[1, -1] = -1  # poisoned there
    arguments = [tensor.to(device) for tensor in (tokens, parents, num_nodes, chosen)]
    with reference_version():
        expected = verify_tree(*arguments)
    with triton_version(guards):
        actual = verify_tree(*(guards.put(tensor) for tensor in arguments))
    for have, want in zip(astuple(actual), astuple(expected), strict=True):
        assert have.dtype == want.dtype
        assert have.tolist() == want.tolist()
    if bs > 1:
        assert actual.num_accepted[1] == columns - 1
        assert actual.emitted[1].tolist() == [*tokens[1, 1:].tolist(), -1]
