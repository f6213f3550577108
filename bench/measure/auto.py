"""`outrider bench auto`: compares mode `auto` with plain decoding and fixed shapes, on an in-process engine.

Acceptance is synthetic: a draft token is accepted with the same probability at every position and in every
shape. The probability is chosen so that chains of 5 draft tokens have a given accept length. With an accept
length of 1, no draft token is accepted, so plain decoding is the best choice. Times are wall-clock times of
whole batches, prompts included.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from outrider.bench.measure.latency import MeasuredShape, shrinking_lengths
from outrider.bench.report.record import Result, Row, show_and_save
from outrider.bench.stacks.engine_stack import BenchEngine, EngineOptions, running_engine, target_placement
from outrider.shared.base.errors import ConfigurationError, OutriderError
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.obs.progress import Progress
from outrider.shared.spec.tree import DraftShape

LEVELS = 16
LAW_DEPTH = 5
"""Depth of the chains whose accept length is given."""
USELESS_GOAL, BEST_GOAL = 0.985, 0.97


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """Options of `outrider bench auto`. The fields are its flags.

    Attributes:
        engine: Options of the engine to build.
        shapes: The fixed shapes to compare with mode `auto`, including plain decoding.
        accept_lengths: Accept lengths to simulate, including the bonus token. They apply to chains of
            `LAW_DEPTH` draft tokens.
        batches, new_tokens: Batch sizes, and numbers of tokens per answer.
        prompt: Number of tokens per prompt.
        pairs: Number of passes. A pass measures mode `auto` and all shapes in turn. The figures are medians
            over the passes.
        output: The JSON file for the result.
    """

    engine: EngineOptions
    shapes: Sequence[MeasuredShape]
    accept_lengths: Sequence[float]
    batches: Sequence[int]
    new_tokens: Sequence[int]
    prompt: int
    pairs: int
    output: Path | None


def run_auto(options: AutoOptions) -> int:
    """Run `outrider bench auto`: run all cases, print the table and save the result after every case.

    Returns:
        The exit code, which is 1 if a case failed. A missed goal does not count as a failure.

    Raises:
        ConfigurationError: A setting is wrong.
    """
    device, dtype = target_placement(options.engine)
    rows: list[Row] = []
    failed: dict[str, str] = {}
    settings = {
        "shape": options.engine.shape.name,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "weights": "random",
        "transport": options.engine.transport.value,
        "prompt": options.prompt,
        "pairs": options.pairs,
        **options.engine.settings,
    }
    result = Result("auto", settings, rows, {"failed": failed}, "synthetic acceptance")
    with running_engine(options.engine) as engine:
        cases = list(product(options.accept_lengths, options.batches, options.new_tokens))
        # A thread that redraws the bar would disturb the measurement.
        with Progress("auto", len(cases), still=True) as progress:
            for number, (accept_length, batch, new_tokens) in enumerate(cases):
                case = f"accept length {accept_length:g}, batch {batch}, {new_tokens} tokens"
                progress.tell(number, step=case)
                try:
                    rows.append(_measured(engine, options, case, accept_length, batch, new_tokens))
                except (OutriderError, RuntimeError) as error:  # the other cases are still valid
                    failed[case] = f"{type(error).__name__}: {error}"[:500]
                    print(f"{case} failed: {failed[case]}", file=sys.stderr)
                result.save(options.output)
    shown = ("auto_tok_s", "best", "best_tok_s", "first_ratio", "goal")
    return show_and_save(result, options.output, shown) or int(bool(failed))


def parse_accept_lengths(text: str) -> list[float]:
    """Parse a comma-separated list of accept lengths.

    Raises:
        ConfigurationError: An entry of the list is not a number from 1 to `LAW_DEPTH` + 1.
    """
    try:
        lengths = [float(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or not all(1 <= length <= LAW_DEPTH + 1 for length in lengths):
        raise ConfigurationError(
            f"--accept-length {text}: expected numbers from 1 to {LAW_DEPTH + 1}, separated by commas.",
            field="--accept-length",
        )
    return lengths


def law_of(accept_length: float) -> list[float]:
    """Return `LEVELS` equal acceptance probabilities that give chains of `LAW_DEPTH` this accept length.

    Args:
        accept_length: Mean number of tokens per round, including the bonus token: from 1 to `LAW_DEPTH` + 1.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if 1 + sum(middle**depth for depth in range(1, LAW_DEPTH + 1)) < accept_length:
            low = middle
        else:
            high = middle
    rate = round(high, 9)
    return [rate if accept_length > 1 else 0.0] * LEVELS


def _measured(
    engine: BenchEngine, options: AutoOptions, case: str, accept_length: float, batch: int, new_tokens: int
) -> Row:
    """Return the row of one case. The figure is the speed of `auto` ÷ the speed of the best fixed choice."""
    drawn = random.Random(0)
    vocab = engine.decoder.config.vocab_size

    def prompts() -> list[list[int]]:
        return [[drawn.randrange(vocab) for _ in range(options.prompt)] for _ in range(batch)]

    def speed(tree: DraftShape | None, mode: SpeculationMode | None = None) -> float:
        seconds, _ = engine.run_batch(prompts(), new_tokens, tree, mode)
        return batch * new_tokens / seconds

    # 1. Warm up the fixed choices. Then measure `auto` once while it has no statistics of the drafter.
    engine.set_rates(law_of(accept_length))
    for shape in options.shapes:
        engine.run_batch(prompts(), shrinking_lengths(batch, new_tokens), shape.tree)
    engine.forget()
    first = speed(None, SpeculationMode.AUTO)
    # 2. Measure all choices in turn, so that a change of the GPU's clock affects all of them.
    speeds: dict[str, list[float]] = {shape.label: [] for shape in options.shapes}
    auto: list[float] = []
    for _ in range(options.pairs):
        auto.append(speed(None, SpeculationMode.AUTO))
        for shape in options.shapes:
            speeds[shape.label].append(speed(shape.tree))
    # 3. Compare `auto` with the fixed choice whose median speed is the highest.
    medians = {label: statistics.median(found) for label, found in speeds.items()}
    best = max(medians, key=lambda label: medians[label])
    ratios = [mine / other for mine, other in zip(auto, speeds[best], strict=True)]
    more: dict[str, Any] = {
        "auto_tok_s": round(statistics.median(auto), 1),
        "best": best,
        "best_tok_s": round(medians[best], 1),
        "goal": USELESS_GOAL if accept_length == 1 else BEST_GOAL,
        "first_ratio": round(first / medians[best], 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "fixed_tok_s": {label: round(value, 1) for label, value in medians.items()},
        "decision": engine.auto_decision(),
        "batch": batch,
        "new_tokens": new_tokens,
        "accept_length": accept_length,
    }
    return Row(f"auto ÷ best, {case}", statistics.median(ratios), "×", more=more)
