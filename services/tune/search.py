"""Finds the best tree shapes and the best mode: predicts the speed of all shapes, and measures the best.

1. Answer the prompts once with the largest tree, and record the trees of all rounds. From these trees,
   predict the accept length of every shape (`replay`).
2. For each batch size, run a few rounds of a few shapes. From the times of these rounds, predict the time of
   a round of every shape (`step_times`). The predicted speed of a shape is its accept length, divided by the
   time of its round. From the predicted speeds, choose the limits of mode `auto` (`modes`).
3. For each batch size, measure plain decoding, mode `auto` and the shapes with the best predictions in
   alternating passes over the prompts (`paired`). The slower half of the shapes drops out after each pass.
4. If the user requests a check, measure all shapes. Then compare the shape chosen in step 3 with the best of
   all shapes, again in alternating passes (`check`).

The server is never restarted, because every request can have its own mode and shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from outrider.services.tune.candidates import AutoLimits, candidate_shapes
from outrider.services.tune.check import check_choice
from outrider.services.tune.live import LiveClient, LiveRun
from outrider.services.tune.modes import choose_limits
from outrider.services.tune.paired import PairedSpeeds, RunShape, measure_paired
from outrider.services.tune.predict import predict_accept_lengths, predicted_speeds, record
from outrider.services.tune.result import BatchResult, TuneResult, TuneSizes
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

FINALISTS = 6
"""Number of shapes that are measured for each batch size."""
FIRST_TOKENS = 16
"""Length of the answers that are discarded before the first measurement of a shape."""


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
        ConfigurationError: The answers to all prompts are empty.
        OutriderError: A request failed.
    """
    started = time.perf_counter()
    candidates = candidate_shapes(sizes.largest)
    # 1. Record trees, and predict accept lengths.
    recorded = record(client, prompts, sizes.largest, sizes.tokens)
    lengths = predict_accept_lengths(recorded, candidates)
    progress(f"recorded trees: {len(candidates)} shapes have a predicted accept length")
    recording_s = (time.perf_counter() - started) / len(sizes.batches)
    # 2. Predict speeds.
    predicted: dict[int, dict[DraftShape, float]] = {}
    predicting_s: dict[int, float] = {}
    for batch in sizes.batches:
        began = time.perf_counter()
        predicted[batch] = predicted_speeds(client, prompts, lengths, batch)
        predicting_s[batch] = recording_s + time.perf_counter() - began
        best = ", ".join(shape.name for shape in finalists(predicted[batch]))
        progress(f"batch {batch}: the best predictions are {best}")
    limits = choose_limits(predicted)
    progress(f"the limits of mode auto are those of {limits.shape.name}")
    results = []
    for batch in sizes.batches:
        began = time.perf_counter() - predicting_s[batch]
        parts = _answered(prompt_parts(len(prompts), batch), recorded)
        run = _runner(client, [[prompts[index] for index in part] for part in parts], batch, sizes.tokens)
        tokens = [sum(len(recorded.answers[index].token_ids) for index in part) for part in parts]
        # 3. Measure.
        paired = _measure(run, predicted[batch], limits, tokens, sizes, predicting_s[batch])
        found = _result(batch, predicted[batch], paired, limits, time.perf_counter() - began)
        exhaustive_s = predicting_s[batch] + sizes.passes * _pass_s(found.predicted, paired, limits)
        found = replace(found, exhaustive_s=found.seconds if sizes.exhaustive else exhaustive_s)
        progress(
            f"batch {batch}: the fastest shape is {found.best.name}, "
            f"{found.measured[found.best]:.0f} tokens/s; auto has {found.auto:.0f}"
        )
        # 4. Check the choice.
        if sizes.check:
            check = check_choice(run, found.best, candidates, tokens, sizes.check)
            found = replace(found, check=check)
            if not sizes.exhaustive:
                found = replace(found, exhaustive_s=predicting_s[batch] + sizes.passes * check.seconds)
            progress(
                f"batch {batch}: its speed is {check.ratio:.3f} times the speed of "
                f"{check.best.name}, the best of all shapes"
            )
        results.append(found)
        batch_done()
    return TuneResult(lengths, results, time.perf_counter() - started, limits)


def finalists(predicted: Mapping[DraftShape, float]) -> list[DraftShape]:
    """Return the tree shapes with the best predictions, among them at least one chain and one branching tree.

    Of shapes with the same depth and the same number of nodes, only the one with the best prediction is
    included, because such shapes differ little. Chains and trees have different prediction errors. If only
    the best predictions counted, one slow measurement of a chain could exclude all chains.
    """
    alike: dict[tuple[int, int], DraftShape] = {}
    for shape in sorted(predicted, key=lambda shape: -predicted[shape]):
        alike.setdefault((shape.depth, shape.max_nodes), shape)
    order = list(alike.values())
    chosen, others = order[: FINALISTS - 1], order[FINALISTS - 1 :]
    forms = {shape.topk == 1 for shape in chosen}
    missing = [shape for shape in others if (shape.topk == 1) not in forms]
    return chosen + (missing or others)[:1]


def prompt_parts(num_prompts: int, batch: int) -> list[list[int]]:
    """Return the indices of the prompts of each part of a pass.

    Every part has one prompt if requests run one at a time. Concurrent requests need all prompts in one
    part: otherwise, only a few requests would run at the end of each part. There are at least as many
    prompts as concurrent requests, so prompts may occur repeatedly.
    """
    if batch == 1:
        return [[index] for index in range(num_prompts)]
    return [[index % num_prompts for index in range(max(num_prompts, batch))]]


def _answered(parts: Sequence[Sequence[int]], recorded: LiveRun) -> list[Sequence[int]]:
    """Return the parts with a token in any answer. An empty answer has no speed."""
    found = [part for part in parts if any(recorded.answers[index].token_ids for index in part)]
    if not found:
        raise ConfigurationError(
            "The answers to all prompts are empty, so no speed can be measured. Give other prompts with "
            "--prompts.",
            field="--prompts",
        )
    return found


def _runner(
    client: LiveClient, parts: Sequence[Sequence[Sequence[int]]], batch: int, tokens: int
) -> RunShape:
    """Return a function that answers a part of the prompts with a shape, and returns the tokens/s.

    Before the first run of a shape, short answers with this shape are discarded. A server may compile or
    record something for a new shape, and the time for this would count as a slow run.
    """
    known: set[DraftShape] = set()

    def run(shape: DraftShape, part: int) -> float:
        if shape not in known:
            known.add(shape)
            client.run(parts[part][:batch], shape, streams=batch, tokens=FIRST_TOKENS)
        return client.run(parts[part], shape, streams=batch, tokens=tokens).tokens_per_s

    return run


def _measure(
    run: RunShape,
    predicted: Mapping[DraftShape, float],
    limits: AutoLimits,
    tokens: Sequence[int],
    sizes: TuneSizes,
    spent_s: float,
) -> PairedSpeeds:
    """Measure plain decoding, mode `auto` and the finalists, or all shapes if the search is exhaustive."""
    if sizes.exhaustive:
        return measure_paired(run, [NO_DRAFT, *predicted, limits], tokens, sizes.passes, sizes.passes)

    def most_s(measured: PairedSpeeds) -> float:
        one = _pass_s(_calibrated(predicted, measured.speeds()), measured, limits)
        return sizes.share * (spent_s + sizes.passes * one) - spent_s

    shapes = [NO_DRAFT, *finalists(predicted), limits]
    return measure_paired(run, shapes, tokens, sizes.passes, sizes.most_passes, narrow=True, most_s=most_s)


def _result(
    batch: int,
    predicted: Mapping[DraftShape, float],
    paired: PairedSpeeds,
    limits: AutoLimits,
    seconds: float,
) -> BatchResult:
    measured = paired.speeds()
    auto = measured.pop(limits)
    return BatchResult(
        batch,
        _calibrated(predicted, measured),
        measured,
        {shape: paired.ratios(shape) for shape in measured},
        auto,
        {shape: paired.ratios(shape, limits) for shape in measured},
        seconds,
        left=[shape for shape in paired.passes[-1] if shape != limits],
    )


def _pass_s(predicted: Mapping[DraftShape, float], measured: PairedSpeeds, limits: AutoLimits) -> float:
    """Return the expected duration of a pass of an exhaustive search, in seconds."""
    plain_s = measured.pass_seconds([NO_DRAFT])
    return measured.pass_seconds([NO_DRAFT, limits]) + sum(plain_s / speed for speed in predicted.values())


def _calibrated(
    predicted: Mapping[DraftShape, float], measured: Mapping[DraftShape, float]
) -> dict[DraftShape, float]:
    """Scale the predicted speeds of all tree shapes so that predictions match the shapes measured so far.

    Predictions are relative to plain rounds. Only a few plain rounds were timed, so their mean may be wrong.
    """
    known = [
        measured[shape] / measured[NO_DRAFT] / predicted[shape] for shape in predicted if shape in measured
    ]
    return {shape: median(known) * speed for shape, speed in predicted.items()}
