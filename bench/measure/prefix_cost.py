"""`outrider bench prefix --shape`: measures the cost and the gain of the prefix cache on in-process engines.

Two engines with the same random weights run in this process, one with the cache and one without. In each pair
of runs, both engines get the same batch of new prompts, in alternating order. No two prompts have a common
prefix. The time with the cache divided by the time without it is therefore the cost of a cache that finds
nothing. The KV pools are small, so that this cost includes evictions. Acceptance is synthetic: the benchmark
determines how many draft tokens are accepted.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.bench.measure.latency import MeasuredShape, parse_shapes, shrinking_lengths
from outrider.bench.report.record import Result, Row, show_and_save
from outrider.bench.stacks.engine_stack import BenchEngine, EngineOptions, running_engine, target_placement
from outrider.shared.obs.progress import Progress

COST_GOAL = 1.01
SYNTHETIC_LENGTH = 3.5
"""Accept length of rounds for which `--rounds` gives none."""
POOL_BATCHES = 2
"""Number of batches that a pool has room for. Later batches evict the stored pages of earlier ones."""
LONG_PAIRS = 5
"""Number of long prompts that are sent twice; the figures are their medians."""
LONG_WARM_UP = 2
"""Number of long prompts beforehand, which do not count."""


@dataclass(frozen=True, slots=True)
class PrefixCostOptions:
    """Options of `outrider bench prefix --shape`. The fields are flags of the command.

    Attributes:
        engine: Options of both engines, without the setting `disable_prefix_cache`.
        shapes: The kinds of rounds.
        batches: Batch sizes.
        prompt, new_tokens: Number of tokens of each prompt and of each answer in the pairs of runs.
        pairs: Number of pairs of runs for each case.
        long_prompt: Number of tokens of the prompt that is sent twice.
    """

    engine: EngineOptions
    shapes: Sequence[MeasuredShape]
    batches: Sequence[int]
    prompt: int
    new_tokens: int
    pairs: int
    long_prompt: int


def cost_options(
    engine: EngineOptions, rounds: str, batch: Sequence[int], prompt: int, new: int, pairs: int, longest: int
) -> PrefixCostOptions:
    """Return the options of `outrider bench prefix --shape`.

    Args:
        engine: Options of the engine. Its limits and its tree shapes are replaced by those that the other
            arguments need.
        rounds: Comma-separated kinds of rounds, in the form that `parse_shapes` reads.
        batch, prompt, new, pairs, longest: See `PrefixCostOptions`.

    Raises:
        ConfigurationError: A kind of round has a wrong form.
    """
    shapes = parse_shapes([text.strip() for text in rounds.split(",")], SYNTHETIC_LENGTH)
    trees = [shape.tree for shape in shapes if shape.tree]
    nodes = max((tree.max_nodes for tree in trees), default=1)
    most = max([*batch, *(size for shape in shapes for size in shape.batches)])
    # The two engines share one GPU's memory, so neither of them may take as much as it can.
    tokens = POOL_BATCHES * max(most * (prompt + new + nodes + 1), longest + nodes + 1)
    sized = replace(
        engine,
        max_batch=most,
        max_len=max(prompt + new, longest) + nodes + 1,
        trees=trees,
        settings={**engine.settings, "kv_tokens": str(tokens)},
    )
    return PrefixCostOptions(sized, shapes, batch, prompt, new, pairs, longest)


def run_prefix_cost(options: PrefixCostOptions, output: Path) -> int:
    """Run `outrider bench prefix --shape`: measure, print the table, save the result in `output`, return 0.

    Raises:
        ConfigurationError: A setting is wrong, or two engines do not fit into the GPU's memory.
        OutriderError: A request failed.
    """
    device, dtype = target_placement(options.engine)
    rows: list[Row] = []
    settings = {
        "shape": options.engine.shape.name,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "weights": "random",
        "transport": options.engine.transport.value,
        "prompt": options.prompt,
        "new_tokens": options.new_tokens,
        "pairs": options.pairs,
        "long_prompt": options.long_prompt,
        **options.engine.settings,
    }
    result = Result("prefix", settings, rows, note="random weights, synthetic acceptance")
    with ExitStack() as cleanup:
        on, off = (
            cleanup.enter_context(running_engine(_with_cache(options.engine, enabled)))
            for enabled in (True, False)
        )
        cases = [(shape, batch) for shape in options.shapes for batch in shape.batches or options.batches]
        # A thread that redraws the bar would disturb the measurement.
        with Progress("prefix", 1 + len(cases), still=True) as progress:
            progress.tell(0, step=f"prompt of {options.long_prompt} tokens")
            rows += _long_rows(on, options)
            for number, (shape, batch) in enumerate(cases, 1):
                progress.tell(number, step=f"{shape.label}, batch {batch}")
                for engine in (on, off):
                    engine.set_accept_length(shape.accept_length)
                rows.append(_cost_row(on, off, shape, batch, options))
                result.save(output)
    return show_and_save(result, output, ("on_off", "goal"))


def _with_cache(engine: EngineOptions, enabled: bool) -> EngineOptions:
    """Return the options of an engine with or without the cache."""
    return replace(engine, settings={**engine.settings, "disable_prefix_cache": str(not enabled)})


def _long_rows(engine: BenchEngine, options: PrefixCostOptions) -> list[Row]:
    """Measure the time to the first token of a long prompt and of the same prompt again."""
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(LONG_WARM_UP + LONG_PAIRS):
        prompt = _prompts(engine, f"long {index}", options.long_prompt, 1)
        for measured in times:
            seconds, _ = engine.run_batch(prompt, 1, None)
            measured.append(seconds * 1e3)
    first, second = (statistics.median(measured[LONG_WARM_UP:]) for measured in times)
    runs = [[round(one, 3) for one in measured[LONG_WARM_UP:]] for measured in times]
    return [
        Row(f"TTFT of {options.long_prompt} tokens, first time", first, "ms", more={"runs_ms": runs[0]}),
        Row(f"TTFT of {options.long_prompt} tokens, second time", second, "ms", more={"runs_ms": runs[1]}),
    ]


def _cost_row(
    on: BenchEngine, off: BenchEngine, shape: MeasuredShape, batch: int, options: PrefixCostOptions
) -> Row:
    """Measure one case. The figure is the time with the cache; the floor is the time without it."""
    case = f"nothing shared, {shape.label}, batch {batch}"
    lengths = shrinking_lengths(batch, options.new_tokens)
    for engine in (on, off):
        engine.run_batch(_prompts(engine, f"{case} warm-up", options.prompt, batch), lengths, shape.tree)
    times: dict[BenchEngine, list[float]] = {on: [], off: []}
    for pair in range(options.pairs):
        prompts = _prompts(on, f"{case} {pair}", options.prompt, batch)
        for engine in (on, off) if pair % 2 else (off, on):
            seconds, _ = engine.run_batch(prompts, options.new_tokens, shape.tree)
            times[engine].append(seconds)
    ratios = [with_cache / without for with_cache, without in zip(times[on], times[off], strict=True)]
    return Row(
        case,
        statistics.median(times[on]) * 1e3,
        "ms",
        statistics.median(times[off]) * 1e3,
        "cache off",
        more={
            "on_off": round(statistics.median(ratios), 4),
            "goal": COST_GOAL,
            "ratios": [round(ratio, 4) for ratio in ratios],
            "batch": batch,
        },
    )


def _prompts(engine: BenchEngine, name: str, length: int, count: int) -> list[list[int]]:
    """Return random prompts. Equal names give equal prompts."""
    drawn = random.Random(name)
    vocab = engine.decoder.config.vocab_size
    return [[drawn.randrange(vocab) for _ in range(length)] for _ in range(count)]
