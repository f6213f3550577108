"""Finds the best tree shapes and the best mode: predicts the speed of all shapes, and measures the best.

1. Answer the prompts once with the largest tree, and record the trees of all rounds. From these trees,
   predict the accept length of every shape (`replay`).
2. For each batch size, run a few rounds of a few shapes. From the times of these rounds, predict the time of
   a round of every shape (`round_times`). The predicted speed of a shape is its accept length, divided by the
   time of its round. From the predicted speeds, choose the limits of mode `auto` (`modes`).
3. For each batch size, measure plain decoding, mode `auto` and the shapes with the best predictions in
   alternating passes over the prompts (`paired`).
4. If the user requests a check, measure all shapes. Then compare the shape chosen in step 3 with the best of
   all shapes, again in alternating passes.

The server is never restarted, because every request can have its own mode and shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from outrider.services.tune.candidates import AutoLimits, candidate_shapes, shape_name
from outrider.services.tune.live import LiveClient, LiveRun
from outrider.services.tune.modes import choose_limits, faster
from outrider.services.tune.paired import Run, measure_paired
from outrider.services.tune.replay import RecordedTree, accept_length
from outrider.services.tune.round_times import RoundTimes, probe_shapes
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

LARGEST_RECORDED = DraftShape(10, 8, 64)
"""Largest tree whose rounds are recorded. A larger tree costs more time but accepts few additional tokens."""
PROBE_TOKENS = 24
"""Length of the answers that measure the times of rounds."""
CHECKED = 3
"""Number of shapes that a check measures again, after one pass over all shapes."""
FINALISTS = 3
"""Number of shapes that are measured for each batch size."""


@dataclass(frozen=True, slots=True)
class TuneSizes:
    """The amount of work for one search of tree shapes.

    Attributes:
        batches: Numbers of concurrent requests. Each number is searched separately.
        tokens: Largest length of an answer, in tokens.
        largest: The largest depth, width and number of nodes that the server allows.
        passes: Number of passes over the prompts in which all finalists are measured.
        most_passes: Largest number of passes. The passes after `passes` measure only shapes that may still be
            the fastest ones.
        exhaustive: True to measure all shapes instead of the finalists only.
        check: Number of passes that compare the chosen shape with the best of all shapes; 0 for no check.
    """

    batches: Sequence[int]
    tokens: int
    largest: DraftShape
    passes: int = 3
    most_passes: int = 7
    exhaustive: bool = False
    check: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison of the tree shape that the search chose with the best of all shapes.

    Attributes:
        choice: The shape that the search chose.
        best: The fastest shape in a measurement of all shapes.
        ratios: Speed of `choice` divided by the speed of `best`, for each pass.
        seconds: Duration of the measurements of all shapes.
    """

    choice: DraftShape
    best: DraftShape
    ratios: Sequence[float]
    seconds: float

    @property
    def ratio(self) -> float:
        """The median ratio."""
        return median(self.ratios)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Predicted and measured speeds of tree shapes for one batch size.

    Attributes:
        batch: Number of concurrent requests.
        predicted: Shape → predicted speed, relative to plain decoding. The predictions are scaled so that
            predictions of measured shapes match the measured speeds.
        measured: Shape → measured speed, in tokens per second of all requests together. Includes `NO_DRAFT`.
        ratios: Shape → speed relative to plain decoding in each pass.
        auto: Measured speed of mode `auto`, in tokens per second. None if it was not measured.
        to_auto: Shape → speed relative to mode `auto` in each pass. Includes `NO_DRAFT`.
        seconds: Duration of the search for this batch size, without the check.
        check: The comparison with the best of all shapes. None if no check was requested.
    """

    batch: int
    predicted: Mapping[DraftShape, float]
    measured: Mapping[DraftShape, float]
    ratios: Mapping[DraftShape, Sequence[float]] = field(default_factory=dict)
    auto: float | None = None
    to_auto: Mapping[DraftShape, Sequence[float]] = field(default_factory=dict)
    seconds: float = 0.0
    check: Check | None = None

    @property
    def best(self) -> DraftShape:
        """The fastest measured shape, which may be plain decoding."""
        return max(self.measured, key=lambda shape: self.measured[shape])

    def speedup(self, shape: DraftShape) -> float | None:
        """Return the measured speed of a shape relative to plain decoding; None if it was not measured."""
        if shape not in self.measured:
            return None
        return self.measured[shape] / self.measured[NO_DRAFT]

    @property
    def auto_speedup(self) -> float | None:
        """The measured speed of mode `auto` relative to plain decoding; None if it was not measured."""
        return None if self.auto is None else self.auto / self.measured[NO_DRAFT]


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The result of a search.

    Attributes:
        accept_lengths: Shape → predicted accept length.
        batches: The results for each batch size.
        seconds: Duration of the search.
        limits: The limits of mode `auto`. None if mode `auto` was not measured.
        shape: The measured shape that is the best one over all batch sizes.
        mode: The best mode. With `ON`, requests use `shape`, and with `AUTO`, shapes within `limits`.
    """

    accept_lengths: Mapping[DraftShape, float]
    batches: Sequence[BatchResult]
    seconds: float = 0.0
    limits: AutoLimits | None = None
    shape: DraftShape = field(init=False)
    mode: SpeculationMode = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self._overall())
        object.__setattr__(self, "mode", self._best_mode())

    @property
    def default_shape(self) -> DraftShape:
        """The default shape of a server in the best mode. It also limits the shapes of mode `auto`."""
        return self.limits.shape if self.mode is SpeculationMode.AUTO and self.limits else self.shape

    def _best_mode(self) -> SpeculationMode:
        """Return the best mode.

        The mode is `OFF` if no draft pays at any batch size. Otherwise, it is `AUTO`, unless the best shape
        or plain decoding is faster than mode `auto` at every batch size by more than the noise.
        """
        gains = [[1 / ratio for ratio in one.to_auto.get(NO_DRAFT, ())] for one in self.batches]
        if self.shape == NO_DRAFT and not any(faster(gain) for gain in gains):
            return SpeculationMode.OFF
        better = [
            shape
            for shape in (self.shape, NO_DRAFT)
            if all(faster(one.to_auto.get(shape, ())) for one in self.batches)
        ]
        if not better:
            return SpeculationMode.AUTO
        return SpeculationMode.ON if better[0].drafts else SpeculationMode.OFF

    def _overall(self) -> DraftShape:
        """Return the measured tree shape with the best mean speed-up over all batch sizes.

        A speed-up below 1 counts as 1, because mode `auto` then decodes without drafts. The result is
        `NO_DRAFT` if no shape is faster than plain decoding at any batch size at which it was measured.
        """
        best, most = NO_DRAFT, 1.0
        for shape in self.accept_lengths:
            product = 1.0
            for one in self.batches:
                speedup = one.speedup(shape)
                product *= max(1.0, one.predicted[shape] if speedup is None else speedup)
            mean = product ** (1 / len(self.batches))
            if mean > most and any((one.speedup(shape) or 0.0) > 1 for one in self.batches):
                best, most = shape, mean
        return best


def search(
    client: LiveClient,
    prompts: Sequence[Sequence[int]],
    sizes: TuneSizes,
    progress: Callable[[str], None] = lambda _: None,
    batch_done: Callable[[], None] = lambda: None,
) -> TuneResult:
    """Find the best tree shapes for each batch size, and the best mode for all batch sizes.

    Args:
        client: Client of the running server.
        prompts: Prompts as token ids.
        sizes: The amount of work.
        progress: Called with a text line at each step.
        batch_done: Called when the measurements of a batch size are complete.

    Raises:
        OutriderError: A request failed.
    """
    started = time.perf_counter()
    candidates = candidate_shapes(sizes.largest)
    # 1. Record trees, and predict accept lengths.
    lengths = _accept_lengths(client, prompts, sizes, candidates)
    progress(f"recorded trees: {len(candidates)} shapes have a predicted accept length")
    # 2. Predict speeds.
    predicted: dict[int, dict[DraftShape, float]] = {}
    predicting_s: dict[int, float] = {}
    for batch in sizes.batches:
        began = time.perf_counter()
        predicted[batch] = _speeds(lengths, _round_times(client, prompts, candidates, batch))
        predicting_s[batch] = time.perf_counter() - began
        best = ", ".join(map(shape_name, _finalists(predicted[batch])))
        progress(f"batch {batch}: the best predictions are {best}")
    limits = choose_limits(predicted)
    progress(f"the limits of mode auto are those of {shape_name(limits.shape)}")
    results = []
    for batch in sizes.batches:
        began = time.perf_counter() - predicting_s[batch]
        # 3. Measure.
        finalists = candidates if sizes.exhaustive else _finalists(predicted[batch])
        run = _runner(client, prompts, batch, sizes)
        most = sizes.passes if sizes.exhaustive else sizes.most_passes
        paired = measure_paired(run, [*finalists, limits], sizes.passes, most)
        measured = paired.speeds()
        auto = measured.pop(limits)
        found = BatchResult(
            batch,
            _calibrated(predicted[batch], measured),
            measured,
            {shape: paired.ratios(shape) for shape in measured},
            auto,
            {shape: paired.ratios(shape, limits) for shape in measured},
            time.perf_counter() - began,
        )
        progress(
            f"batch {batch}: the fastest shape is {shape_name(found.best)}, "
            f"{measured[found.best]:.0f} tokens/s; auto has {auto:.0f}"
        )
        # 4. Check the choice.
        if sizes.check:
            found = replace(found, check=_check(run, found.best, candidates, sizes.check))
            assert found.check is not None
            progress(
                f"batch {batch}: its speed is {found.check.ratio:.3f} of that of "
                f"{shape_name(found.check.best)}, the best of all shapes"
            )
        results.append(found)
        batch_done()
    return TuneResult(lengths, results, time.perf_counter() - started, limits)


def _finalists(predicted: Mapping[DraftShape, float]) -> list[DraftShape]:
    """Return the tree shapes with the best predictions, among them at least one chain and one branching tree.

    Similar shapes have similar prediction errors. If only the best predictions counted, one slow measurement
    of a chain could exclude all chains.
    """
    order = sorted(predicted, key=lambda shape: -predicted[shape])
    finalists = order[: FINALISTS - 1]
    chains = {shape.topk == 1 for shape in finalists}
    others = [shape for shape in order if shape not in finalists]
    return finalists + (others if len(chains) > 1 else _of_form(others, chain=False in chains))[:1]


def _of_form(shapes: Sequence[DraftShape], *, chain: bool) -> list[DraftShape]:
    return [shape for shape in shapes if (shape.topk == 1) is chain] or list(shapes)


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


def _calibrated(
    predicted: Mapping[DraftShape, float], measured: Mapping[DraftShape, float]
) -> dict[DraftShape, float]:
    """Scale the predicted speeds of all tree shapes so that predictions match the shapes measured so far.

    Predictions are relative to plain rounds. Only a few plain rounds were timed, so their mean may be wrong.
    """
    known = [measured[shape] / measured[NO_DRAFT] / predicted[shape] for shape in measured if shape.drafts]
    return {shape: median(known) * speed for shape, speed in predicted.items()}


def _runner(client: LiveClient, prompts: Sequence[Sequence[int]], batch: int, sizes: TuneSizes) -> Run:
    """Return a function that runs the prompts with a shape, and returns the tokens per second."""
    enough = [prompts[index % len(prompts)] for index in range(max(len(prompts), batch))]

    def run(shape: DraftShape) -> float:
        return client.run(enough, shape, streams=batch, tokens=sizes.tokens).tokens_per_s

    return run


def _check(run: Run, choice: DraftShape, candidates: Sequence[DraftShape], passes: int) -> Check:
    """Find the fastest of all tree shapes, and compare the shape that the search chose with it.

    The fastest of many noisy measurements is often just lucky. After one pass over all shapes, the fastest
    shapes of that pass are therefore measured again, together with the chosen shape.
    """
    started = time.perf_counter()
    once = measure_paired(run, candidates, 1, 1).speeds()
    seconds = time.perf_counter() - started
    first = sorted(once, key=lambda shape: -once[shape])[:CHECKED]
    shapes = [shape for shape in dict.fromkeys([choice, *first]) if shape.drafts]
    paired = measure_paired(run, shapes, passes, passes)
    speeds = paired.speeds()
    best = max(speeds, key=lambda shape: speeds[shape])
    return Check(choice, best, paired.ratios(choice, best), seconds)
