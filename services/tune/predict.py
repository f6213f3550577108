"""Predicts the speed of every tree shape from recorded trees and from the times of a few rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.services.tune.live import LiveClient, LiveRun
from outrider.services.tune.replay import RecordedTree, accept_length
from outrider.services.tune.step_times import StepTimes, probe_shapes
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

LARGEST_RECORDED = DraftShape(16, 8, 64)
"""Largest tree whose rounds are recorded. It is as deep, wide and large as the largest candidates."""
PROBE_TOKENS = 24
"""Length of the answers that measure the times of rounds."""


def record(client: LiveClient, prompts: Sequence[Sequence[int]], largest: DraftShape, tokens: int) -> LiveRun:
    """Answer the prompts with a large tree, and return the answers with their traces.

    Args:
        client: Client of the running server.
        prompts: Prompts as token ids.
        largest: The largest depth, width and number of nodes that the server allows.
        tokens: Largest length of an answer, in tokens.
    """
    bound = LARGEST_RECORDED
    tree = DraftShape(
        min(largest.depth, bound.depth),
        min(largest.topk, bound.topk),
        min(largest.max_nodes, bound.max_nodes),
    ).bounded()
    return client.run(prompts, tree, streams=4, tokens=tokens, trace=True)


def predict_accept_lengths(recorded: LiveRun, candidates: Sequence[DraftShape]) -> dict[DraftShape, float]:
    """Return the predicted accept length of each shape."""
    trees = [
        RecordedTree.of(entry, answer.prompt_len, answer.token_ids)
        for answer in recorded.answers
        for entry in answer.rounds
        if len(entry["nodes"]) > 1
    ]
    lengths = [len(answer.token_ids) for answer in recorded.answers]
    return {shape: accept_length(trees, shape, lengths) for shape in candidates}


def predicted_speeds(
    client: LiveClient,
    prompts: Sequence[Sequence[int]],
    lengths: Mapping[DraftShape, float],
    batch: int,
) -> dict[DraftShape, float]:
    """Return the predicted speed of each shape, relative to plain decoding.

    Args:
        client: Client of the running server, which answers a few prompts with a few shapes.
        prompts: Prompts as token ids.
        lengths: Shape → accept length.
        batch: Number of concurrent requests.
    """
    times = _round_times(client, prompts, list(lengths), batch)
    if not times.measured:
        return dict.fromkeys(lengths, 1.0)
    plain_ms = times.round_ms(NO_DRAFT)
    return {shape: length * plain_ms / times.round_ms(shape) for shape, length in lengths.items()}


def _round_times(
    client: LiveClient, prompts: Sequence[Sequence[int]], candidates: Sequence[DraftShape], batch: int
) -> StepTimes:
    times = StepTimes()
    chosen = [prompts[index % len(prompts)] for index in range(batch)]
    for shape in probe_shapes(candidates):
        tokens = PROBE_TOKENS * (2 if shape.drafts else 1)
        run = client.run(chosen, shape, streams=batch, tokens=tokens, trace=True)
        rounds = [one for answer in run.answers for one in answer.rounds[1:] if _has_shape(one, shape)]
        times.add(shape, rounds, _mean_round_ms(run))
    return times


def _has_shape(entry: Mapping[str, Sequence[object]], shape: DraftShape) -> bool:
    return (len(entry["nodes"]) > 1) is shape.drafts


def _mean_round_ms(run: LiveRun) -> float | None:
    known = [answer.round_ms for answer in run.answers if answer.round_ms is not None]
    return sum(known) / len(known) if known else None
