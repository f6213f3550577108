"""`outrider bench auto`: compares mode `auto` with plain decoding and fixed shapes, on an in-process engine.

Acceptance is synthetic: a draft token is accepted with the same probability at every position and in every
shape. The probability is chosen so that chains of 5 draft tokens have a given accept length. With an accept
length of 1, no draft token is accepted, so plain decoding is the best choice. Times are wall-clock times of
whole batches, prompts included.

The speed of a batch depends on luck, because the batch lasts until its last answer ends. In batches of 16
answers of 256 tokens, luck alone changes the ratio of two speeds by 4 % (standard deviation in a simulation).
All choices of a pass therefore have the same prompts and the same seeds of the acceptance. Luck then hardly
affects the ratio.
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
from outrider.bench.report.surroundings import compiled_kernels
from outrider.bench.stacks.engine_stack import BenchEngine, EngineOptions, running_engine, target_placement
from outrider.shared.base.errors import ConfigurationError, OutriderError
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.obs.progress import Progress

LEVELS = 16
LAW_DEPTH = 5
"""Depth of the chains whose accept length is given."""
USELESS_GOAL, BEST_GOAL = 0.985, 0.97
MOST_WARM_UPS = 3
"""Largest number of further batches in mode `auto` before the measurement."""
HOPELESS = 0.85
"""A fixed choice whose speed is below this share of the fastest choice's speed is not measured again."""
SEEDS = 1000
"""Number of seeds of a pass."""


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
        pairs: Number of passes. A pass measures mode `auto` and all shapes in turn. Shapes that are far
            slower than the best are left out of further passes. The figures are medians over the passes.
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


class _Case:
    """Runs the batches of one case."""

    def __init__(
        self, engine: BenchEngine, options: AutoOptions, accept_length: float, batch: int, new_tokens: int
    ) -> None:
        self._engine = engine
        self._options = options
        self._rates = law_of(accept_length)
        self._batch = batch
        self._new_tokens = new_tokens
        self._passes = 0
        self.begin_pass()

    def begin_pass(self) -> None:
        """Choose other prompts and other seeds of the acceptance. All choices of a pass share them."""
        self._passes += 1
        drawn = random.Random(self._passes)
        vocab = self._engine.decoder.config.vocab_size
        self._prompts = [
            [drawn.randrange(vocab) for _ in range(self._options.prompt)] for _ in range(self._batch)
        ]

    def speed(self, choice: MeasuredShape | None) -> float:
        """Return the tokens per second of a batch with a fixed choice, or in mode `auto` if it is None."""
        tree, mode = (None, SpeculationMode.AUTO) if choice is None else (choice.tree, None)
        seconds, _ = self._engine.run_batch(self._prompts, self._new_tokens, tree, mode, SEEDS * self._passes)
        return self._batch * self._new_tokens / seconds

    def warm_up(self) -> float:
        """Warm up all choices. Return the speed of the first batch in mode `auto`.

        At this batch, `auto` has no statistics of the drafter. Batches in mode `auto` are repeated as long as
        they record graphs or compile kernels, because a server does this only once.
        """
        self._engine.set_rates(self._rates)
        for shape in self._options.shapes:
            lengths = shrinking_lengths(self._batch, self._new_tokens)
            self._engine.run_batch(self._prompts, lengths, shape.tree)
        self._engine.forget()
        first, made = self.speed(None), self.made
        for _ in range(MOST_WARM_UPS):
            self.begin_pass()
            self.speed(None)
            if self.made == made:
                break
            made = self.made
        return first

    @property
    def made(self) -> int:
        """Number of graphs and kernels that exist so far."""
        return self._engine.graphs + compiled_kernels()


def _measured(
    engine: BenchEngine, options: AutoOptions, name: str, accept_length: float, batch: int, new_tokens: int
) -> Row:
    """Return the row of one case. The figure is the speed of `auto` ÷ the speed of the best fixed choice."""
    # 1. Warm up.
    case = _Case(engine, options, accept_length, batch, new_tokens)
    first = case.warm_up()
    # 2. Measure all choices in turn, so that a change of the GPU's clock affects all of them. The order
    # changes from pass to pass.
    auto: list[float] = []
    speeds: dict[str, list[float]] = {shape.label: [] for shape in options.shapes}
    rivals: list[MeasuredShape] = list(options.shapes)
    made: list[int] = []
    for number in range(options.pairs):
        case.begin_pass()
        choices = [None, *rivals]
        for choice in choices if number % 2 == 0 else reversed(choices):
            before = case.made
            speed = case.speed(choice)
            if choice is None:
                auto.append(speed)
                made.append(case.made - before)
            else:
                speeds[choice.label].append(speed)
        fastest = max(max(found) for found in speeds.values())
        rivals = [shape for shape in rivals if max(speeds[shape.label]) > HOPELESS * fastest]
    # 3. Compare `auto` with the fixed choice whose median speed is the highest.
    medians = {label: statistics.median(found) for label, found in speeds.items()}
    best = max((shape.label for shape in rivals), key=lambda label: medians[label])
    ratios = [mine / other for mine, other in zip(auto, speeds[best], strict=True)]
    more: dict[str, Any] = {
        "auto_tok_s": round(statistics.median(auto), 1),
        "best": best,
        "best_tok_s": round(medians[best], 1),
        "goal": USELESS_GOAL if accept_length == 1 else BEST_GOAL,
        "first_ratio": round(first / medians[best], 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "made_late": made,
        "fixed_tok_s": {label: round(value, 1) for label, value in medians.items()},
        "decision": engine.auto_decision(),
        "batch": batch,
        "new_tokens": new_tokens,
        "accept_length": accept_length,
    }
    return Row(f"auto ÷ best, {name}", statistics.median(ratios), "×", more=more)
