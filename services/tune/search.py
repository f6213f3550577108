"""Searches for the best shape for each batch size: predicts all shapes, and measures the best ones.

1. Answer the prompts once with the largest tree, and record the trees of all rounds. From these trees,
   predict the accept length of every shape (`replay`).
2. For each batch size, run a few rounds of a few shapes. From the times of these rounds, predict the time of
   a round of every shape (`round_times`).
3. The predicted speed of a shape is its accept length, divided by the time of its round. On the prompts,
   measure plain decoding and the shapes with the best predictions.

The server is never restarted, because every request can have its own shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.services.tune.candidates import candidate_shapes, shape_name
from outrider.services.tune.live import LiveClient, LiveRun
from outrider.services.tune.replay import RecordedTree, accept_length
from outrider.services.tune.round_times import RoundTimes, probe_shapes
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

LARGEST_RECORDED = DraftShape(10, 8, 64)
"""Largest tree whose rounds are recorded. A larger tree costs more time but accepts few additional tokens."""
PROBE_TOKENS = 24
"""Length of the answers that measure the times of rounds."""
FINALISTS = 3
"""Number of shapes that are measured for each batch size."""


@dataclass(frozen=True, slots=True)
class TuneSizes:
    """The amount of work for one search.

    Attributes:
        batches: Numbers of concurrent requests.
        tokens: Largest length of an answer.
        largest: The largest depth, width and number of nodes that the server allows.
        passes: Number of times that each finalist is measured. The fastest pass counts.
        exhaustive: True to measure all shapes instead of the finalists only.
    """

    batches: Sequence[int]
    tokens: int
    largest: DraftShape
    passes: int = 2
    exhaustive: bool = False


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The results for one batch size.

    Attributes:
        batch: Number of concurrent requests.
        predicted: Shape → predicted speed, relative to plain decoding.
        measured: Shape → measured speed, in tokens per second of all requests together. Includes `NO_DRAFT`.
    """

    batch: int
    predicted: Mapping[DraftShape, float]
    measured: Mapping[DraftShape, float]

    @property
    def best(self) -> DraftShape:
        """The fastest measured choice, which may be plain decoding."""
        return max(self.measured, key=lambda shape: self.measured[shape])

    def speedup(self, shape: DraftShape) -> float | None:
        """Return the measured speed of a shape relative to plain decoding; None if it was not measured."""
        if shape not in self.measured:
            return None
        return self.measured[shape] / self.measured[NO_DRAFT]


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The result of a search.

    Attributes:
        accept_lengths: Shape → predicted accept length.
        batches: The results for each batch size.
        seconds: Duration of the search.
    """

    accept_lengths: Mapping[DraftShape, float]
    batches: Sequence[BatchResult]
    seconds: float = 0.0
    shape: DraftShape = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self._overall())

    def _overall(self) -> DraftShape:
        """Return the measured shape with the best mean speed-up over all batch sizes.

        The result is `NO_DRAFT` if no shape is faster than plain decoding.

        A speed-up below 1 counts as 1, because mode ``auto`` then decodes without drafts.
        """
        best, most = NO_DRAFT, 1.0
        for shape in self.accept_lengths:
            product = 1.0
            for one in self.batches:
                speedup = one.speedup(shape)
                product *= max(1.0, one.predicted[shape] if speedup is None else speedup)
            mean = product ** (1 / len(self.batches))
            measured = any(shape in one.measured for one in self.batches)
            if measured and mean > most:
                best, most = shape, mean
        return best


def search(
    client: LiveClient,
    prompts: Sequence[Sequence[int]],
    sizes: TuneSizes,
    progress: Callable[[str], None] = lambda _: None,
) -> TuneResult:
    """Find the best shape for each batch size.

    Args:
        client: Client of the running server.
        prompts: Prompts as token ids.
        sizes: The amount of work.
        progress: Called with a line about each step.

    Raises:
        OutriderError: A request failed.
    """
    started = time.perf_counter()
    candidates = candidate_shapes(sizes.largest)
    # 1. Record trees, and predict accept lengths.
    lengths: dict[DraftShape, float] = {}
    if not sizes.exhaustive:
        lengths = _accept_lengths(client, prompts, sizes, candidates)
        progress(f"recorded trees: {len(candidates)} shapes have a predicted accept length")
    results = []
    for batch in sizes.batches:
        # 2. Predict speeds.
        predicted: dict[DraftShape, float] = dict.fromkeys(candidates, 1.0)
        finalists: Sequence[DraftShape] = candidates
        if not sizes.exhaustive:
            times = _round_times(client, prompts, candidates, batch)
            predicted = _speeds(lengths, times)
            finalists = sorted(predicted, key=lambda shape: -predicted[shape])[:FINALISTS]
            progress(f"batch {batch}: the best predictions are {', '.join(map(shape_name, finalists))}")
        # 3. Measure.
        measured = _measure(client, prompts, [NO_DRAFT, *finalists], batch, sizes)
        results.append(BatchResult(batch, predicted, measured))
        best = results[-1].best
        progress(f"batch {batch}: the fastest choice is {shape_name(best)}, {measured[best]:.0f} tokens/s")
    if sizes.exhaustive:
        lengths = dict.fromkeys(candidates, 1.0)
    return TuneResult(lengths, results, time.perf_counter() - started)


def _accept_lengths(
    client: LiveClient, prompts: Sequence[Sequence[int]], sizes: TuneSizes, candidates: Sequence[DraftShape]
) -> dict[DraftShape, float]:
    largest, bound = sizes.largest, LARGEST_RECORDED
    tree = DraftShape(
        min(largest.depth, bound.depth),
        min(largest.topk, bound.topk),
        min(largest.max_nodes, bound.max_nodes),
    ).bounded()
    run = client.run(prompts, tree, streams=4, tokens=sizes.tokens, trace=True)
    trees = [
        RecordedTree.of(entry, answer.prompt_len, answer.token_ids)
        for answer in run.answers
        for entry in answer.rounds
        if len(entry["nodes"]) > 1
    ]
    return {shape: accept_length(trees, shape) for shape in candidates}


def _round_times(
    client: LiveClient, prompts: Sequence[Sequence[int]], candidates: Sequence[DraftShape], batch: int
) -> RoundTimes:
    times = RoundTimes()
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


def _speeds(lengths: Mapping[DraftShape, float], times: RoundTimes) -> dict[DraftShape, float]:
    """Return the predicted speed of each shape, relative to plain decoding."""
    if not times.measured:
        return dict.fromkeys(lengths, 1.0)
    plain_ms = times.round_ms(NO_DRAFT)
    return {shape: length * plain_ms / times.round_ms(shape) for shape, length in lengths.items()}


def _measure(
    client: LiveClient,
    prompts: Sequence[Sequence[int]],
    shapes: Sequence[DraftShape],
    batch: int,
    sizes: TuneSizes,
) -> dict[DraftShape, float]:
    """Return the tokens per second of each shape. Shapes take turns, so that a drift affects all shapes."""
    enough = [prompts[index % len(prompts)] for index in range(max(len(prompts), batch))]
    measured: dict[DraftShape, float] = {}
    for _ in range(sizes.passes):
        for shape in shapes:
            run = client.run(enough, shape, streams=batch, tokens=sizes.tokens)
            measured[shape] = max(measured.get(shape, 0.0), run.tokens_per_s)
    return measured
