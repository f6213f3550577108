"""`outrider bench latency`: times decoding rounds and prefills of an in-process engine with random weights.

Each batch consists of prompts of equal length. The time of a round is

    (time for N tokens - time for 1 token) / rounds

Times are wall-clock times from submitting a batch to its last token. The fastest of `repeats` runs counts.
Acceptance is simulated. docs/performance.md lists other servers that were measured in the same way.
"""

from __future__ import annotations

import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from outrider.bench.measure.clock import percentile, summarise_times
from outrider.bench.measure.floors import QuantizedSizes, Work, forward_work, prefill, speculative_round
from outrider.bench.measure.idle import Profile, profiled
from outrider.bench.measure.roofline import Ceilings, measure_ceilings
from outrider.bench.report.record import Result, Row, show_and_save
from outrider.bench.report.surroundings import (
    compiled_kernels,
    multi_process_service,
    under_mps,
)
from outrider.bench.stacks.answers import delivery_gaps
from outrider.bench.stacks.engine_stack import (
    BenchEngine,
    EngineOptions,
    RunningBatch,
    check_accept_length,
    running_engine,
    target_placement,
)
from outrider.bench.stacks.remote_draft import check_draft_device
from outrider.services.stack.option_checks import check_mps_device
from outrider.shared.base.errors import ConfigurationError, OutriderError
from outrider.shared.base.process_age import process_age_s
from outrider.shared.obs.progress import Progress
from outrider.shared.spec.tree import DraftShape

SYNTHETIC = "synthetic acceptance"
WARM_UP_TOKENS = 24
WARM_UP_RUNS = 3
"""Number of runs in which a remote draft learns the rounds' sizes and begins to take part in every round."""
HALVING_TOKENS = 12
"""Extra tokens per answer in each further half of the batch. The batch thus shrinks through all its sizes."""
STEADY_AFTER = 5
"""Steps until a batch is steady, to cover the last prefill, the draft's catch-up and first device rounds."""
PROFILED_ROUNDS = 40
SHAPE_TEXT = re.compile(r"(\d+)/(\d+)/(\d+)(?:@(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class MeasuredShape:
    """A kind of round that `outrider bench latency` measures, with its accept length and batch sizes.

    Attributes:
        tree: Tree shape of every round; None for plain decoding.
        accept_length: Intended mean accept length.
        batches: Batch sizes for this kind of round. If empty, `LatencyOptions.batches` applies.
    """

    tree: DraftShape | None
    accept_length: float
    batches: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Name of the kind in the rows, e.g. plain, chain 5 or tree 5/8/32."""
        if self.tree is None:
            return "plain"
        return (
            f"chain {self.tree.depth}"
            if self.tree.topk == 1
            else f"tree {self.tree.depth}/{self.tree.topk}/{self.tree.max_nodes}"
        )


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """Options of the measurement. Its fields are the flags of `outrider bench latency`."""

    engine: EngineOptions
    shapes: Sequence[MeasuredShape]
    batches: Sequence[int]
    prompt: int
    new_tokens: int
    repeats: int
    prefills: Sequence[int]
    profile: bool
    output: Path | None
    mps: bool = False


def parse_shapes(texts: Sequence[str], accept_length: float) -> list[MeasuredShape]:
    """Parse kinds of rounds: ``plain``, ``chain5`` or ``5/8/32`` (steps, topk and nodes of a draft tree).

    The suffix ``@2.4`` sets the accept length to 2.4, and ``:1+16`` sets the batch sizes to 1 and 16.

    Raises:
        ConfigurationError: A text has none of these forms.
    """
    shapes = []
    for given in texts:
        text, _, sizes = given.partition(":")
        batches = tuple(int(size) for size in sizes.split("+") if size.isdigit())
        if sizes and (not batches or min(batches) < 1 or "+".join(map(str, batches)) != sizes):
            raise ConfigurationError(
                f"--rounds {given}: give batch sizes as numbers, such as :1+16.", field="--rounds"
            )
        kind, _, own = text.partition("@")
        if kind == "plain":
            shapes.append(MeasuredShape(None, 1.0, batches))
            continue
        if kind.startswith("chain") and kind[5:].isdigit() and int(kind[5:]) > 0:
            steps = int(kind[5:])
            text = f"{steps}/1/{steps + 1}" + (f"@{own}" if own else "")
        found = SHAPE_TEXT.fullmatch(text)
        if found is None or min(int(found[1]), int(found[2])) < 1 or int(found[3]) < 2:
            raise ConfigurationError(
                f"--rounds {text}: expected plain, chain5 or steps/topk/nodes such as 5/8/32@3.5.",
                field="--rounds",
            )
        tree = DraftShape(int(found[1]), int(found[2]), int(found[3])).bounded()
        length = float(found[4] or accept_length)
        check_accept_length(length)
        shapes.append(MeasuredShape(tree, length, batches))
    return shapes


def run_latency(options: LatencyOptions) -> int:
    """Run `outrider bench latency`: run all cases, print the table and save the result after every row.

    Returns:
        The exit code, which is 1 if a case failed.

    Raises:
        ConfigurationError: A setting is wrong, or MPS is requested where it is not available.
    """
    engine = options.engine
    for flag, given in (("--mps", options.mps), ("--draft-device", engine.draft_device is not None)):
        if given and not engine.draft_is_apart:
            raise ConfigurationError(
                f"{flag} needs a draft in its own process: use --transport ipc, grpc or unix, and "
                "--rounds with a draft.",
                field=flag,
            )
    if options.mps:
        check_mps_device(engine.device)
    with multi_process_service(options.mps) as around:
        return _run(replace(options, engine=replace(options.engine, around=around)))


def _run(options: LatencyOptions) -> int:
    device, dtype = target_placement(options.engine)
    if options.engine.draft_device is not None:
        check_draft_device(options.engine.draft_device)
    torch.zeros(1, device=device)  # creating the CUDA context is part of the startup time
    imported_s = process_age_s()
    assert imported_s is not None, "a benchmark needs Linux's /proc"
    ceilings = measure_ceilings(device, dtype, small=device.type == "cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the engine derives the size of its KV cache from the free memory
    rows: list[Row] = []
    failed: dict[str, str] = {}
    profiles: dict[str, Any] = {}
    note = SYNTHETIC if any(shape.tree for shape in options.shapes) else ""
    start: dict[str, Any] = {}
    more: dict[str, Any] = {"start": start, "profiles": profiles, "failed": failed}
    result = Result("latency", _settings(options, device, dtype, ceilings), rows, more, note)
    began, cached = time.perf_counter(), compiled_kernels()
    with running_engine(options.engine) as engine:
        engine_s = time.perf_counter() - began
        start |= {
            "seconds": round(imported_s + engine_s, 2),
            "engine_s": round(engine_s, 2),
            "kernels_cached": cached,
            "kernels_compiled": compiled_kernels() - cached,
        }
        bench = Latency(engine, options, ceilings, profiles)
        cases = list(bench.cases())
        # A thread that redraws the bar would disturb the measurement.
        with Progress("latency", len(cases), counts=False, still=True) as progress:
            for number, (case, measured) in enumerate(cases):
                progress.tell(number, step=case)
                bench.on_run = partial(_tell, progress, number, case)
                try:
                    rows.append(measured())
                except (OutriderError, RuntimeError) as error:  # the other cases are still valid
                    failed[case] = f"{type(error).__name__}: {error}"[:500]
                    print(f"{case} failed: {failed[case]}", file=sys.stderr)
                more["graphs"] = engine.graphs
                result.save(options.output)
    return show_and_save(
        result, options.output, ("tok_s", "accept_length", "gap_p99_ms", "gpu_idle_between")
    ) or int(bool(failed))


def _tell(progress: Progress, number: int, case: str, share: float) -> None:
    progress.tell(number + share, step=case)


def _settings(
    options: LatencyOptions, device: torch.device, dtype: torch.dtype, ceilings: Ceilings
) -> dict[str, Any]:
    engine = options.engine
    return {
        "shape": engine.shape.name,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "weights": "random",
        "transport": engine.transport.value if engine.drafts else "none",
        "draft_device": engine.draft_device,
        "tp": engine.tp if engine.tp > 1 else None,
        "prompt": options.prompt,
        "new_tokens": options.new_tokens,
        "repeats": options.repeats,
        "read_bandwidth_gbs": round(ceilings.read_bandwidth / 1e9, 1),
        "matrix_rate_tflops": round(ceilings.matrix_rate / 1e12, 2),
        "mps": under_mps() or None,
        **engine.settings,
    }


class Latency:
    """Measures the cases of `outrider bench latency` on one engine.

    Args:
        engine: A running engine.
        options: The options, which define the cases to measure.
        ceilings: Measured limits of this machine. The floors (best possible times) are computed from them.
        profiles: Mapping that receives the profile of each profiled case, by the case's name.

    Attributes:
        on_run: Called after each run of a batch with the finished share of the case.
    """

    def __init__(
        self, engine: BenchEngine, options: LatencyOptions, ceilings: Ceilings, profiles: dict[str, Any]
    ) -> None:
        self._profiles = profiles
        self._engine = engine
        self._options = options
        self._ceilings = ceilings
        self._random = random.Random(0)
        self.on_run: Callable[[float], None] = lambda share: None

    def cases(self) -> Iterator[tuple[str, Callable[[], Row]]]:
        """Yield each case's name and the function that measures the case, in the order of measurement."""
        for shape in self._options.shapes:
            for batch in shape.batches or self._options.batches:
                yield f"round {shape.label}, batch {batch}", partial(self.round, shape, batch)
        for tokens in self._options.prefills:
            yield f"prefill {tokens}", partial(self.prefill, tokens)

    def prefill(self, tokens: int) -> Row:
        """Return the row for the prefill of a prompt of this length, from submission to the first token."""
        work = prefill(self._engine.decoder.config, tokens, self._itemsize).times(1 / self._options.engine.tp)
        seconds, runs = [], self._options.repeats + 3
        for number in range(runs):
            taken, _answers = self._engine.run_batch(self._prompts(1, tokens), 1, None)
            seconds.append(taken)
            self.on_run((number + 1) / runs)
        times = summarise_times(seconds[2:])
        rate = work.flops / times.median
        more = {
            "tflops": round(rate / 1e12, 5),
            "share_of_matrix_rate": round(rate / self._ceilings.matrix_rate, 6),
            "repeats": times.samples,
        }
        return Row(
            f"prefill {tokens}",
            times.median * 1e3,
            "ms",
            self._floor_ms([work]),
            self._ceilings.bound(work.nbytes, work.flops),
            more,
        )

    def round(self, shape: MeasuredShape, batch: int) -> Row:
        """Return the row for one kind of round at one batch size."""
        options, engine = self._options, self._engine
        acceptance = engine.set_accept_length(shape.accept_length) if shape.tree else "none"
        # 1. List the runs by their lengths of answers. First, three runs warm up: they capture the graphs of
        #    all batch sizes, and let the draft join. A run precedes the prefill, as in the peers' runs,
        #    because an earlier run can bring a GPU to its power limit and slow down the prefill. The run of
        #    N tokens has the same condition.
        lengths = shrinking_lengths(batch, options.new_tokens)
        runs: list[int | list[int]] = [lengths] * WARM_UP_RUNS
        runs += [2, 1, 1, *[options.new_tokens] * options.repeats]
        # 2. Measure.
        done = []
        for number, tokens in enumerate(runs, 1):
            done.append(engine.run_batch(self._prompts(batch), tokens, shape.tree))
            self.on_run(number / len(runs))
        first = min(taken for taken, _answers in done[-options.repeats - 2 : -options.repeats])
        total, answers = min(done[-options.repeats :], key=itemgetter(0))
        # 3. Summarise the fastest run.
        rounds = statistics.mean(answer.rounds for answer in answers)
        decoded = sum(answer.tokens - 1 for answer in answers)
        works = self._works(shape, batch)
        gaps = delivery_gaps(answers)
        more: dict[str, Any] = {
            "batch": batch,
            "kind": shape.label,
            "tok_s": round(decoded / (total - first), 1),
            "tok_s_whole": round(batch * options.new_tokens / total, 1),
            "accept_length": round(decoded / sum(answer.rounds for answer in answers), 4),
            "acceptance": acceptance,
            "rounds": round(rounds, 2),
            "total_s": round(total, 4),
            "first_token_s": round(first, 4),
            "gap_p50_ms": round(percentile(gaps, 50) * 1e3, 4),
            "gap_p90_ms": round(percentile(gaps, 90) * 1e3, 4),
            "gap_p99_ms": round(percentile(gaps, 99) * 1e3, 4),
        }
        if shape.tree and (undrafted := sum(answer.rounds - answer.draft_rounds for answer in answers)):
            more["rounds_without_draft"] = undrafted
            more["fallback"] = next((answer.fallback for answer in answers if answer.fallback), "")
        if profile := self._profile(shape, batch):
            more |= {"gpu_idle": profile.idle, "gpu_idle_between": profile.idle_between}
            self._profiles[f"{shape.label}, batch {batch}"] = profile.as_json()
        bound = self._ceilings.bound(sum(work.nbytes for work in works), sum(work.flops for work in works))
        return Row(
            f"round {shape.label}, batch {batch}",
            (total - first) / rounds * 1e3,
            "ms",
            self._floor_ms(works),
            bound,
            more,
        )

    def _profile(self, shape: MeasuredShape, batch: int) -> Profile | None:
        """Profile rounds in which the whole batch decodes. Returns None without a GPU or `--profile`."""
        if not self._options.profile or self._engine.device.type != "cuda":
            return None
        running: list[RunningBatch] = []

        def start() -> None:
            running.append(
                self._engine.start_batch(self._prompts(batch), self._options.new_tokens, shape.tree)
            )
            running[0].wait_for_steps(STEADY_AFTER)

        profile = profiled(start, lambda: running[0].wait_for_steps(PROFILED_ROUNDS))
        running[0].wait()
        return profile

    def _works(self, shape: MeasuredShape, batch: int) -> list[Work]:
        config, context = self._engine.decoder.config, self._options.prompt + self._options.new_tokens // 2
        share = 1 / self._options.engine.tp
        if shape.tree is None:
            return [forward_work(config, batch, batch, context, self._itemsize, self._sizes).times(share)]
        tree, head = shape.tree, self._options.engine.shape.head
        shaped = (tree.depth, tree.topk, tree.max_nodes)
        return speculative_round(config, head, batch, *shaped, context, self._itemsize, share, self._sizes)

    def _floor_ms(self, works: Sequence[Work]) -> float:
        return sum(self._ceilings.seconds(work.nbytes, work.flops) for work in works) * 1e3

    def _prompts(self, batch: int, tokens: int | None = None) -> list[list[int]]:
        vocab = self._engine.decoder.config.vocab_size
        return [
            [self._random.randrange(vocab) for _ in range(tokens or self._options.prompt)]
            for _ in range(batch)
        ]

    @property
    def _sizes(self) -> QuantizedSizes:
        settings = self._options.engine.settings
        return QuantizedSizes(
            1 if settings.get("quantization") == "fp8" else None,
            1 if settings.get("kv_cache_dtype") == "fp8_e4m3" else None,
        )

    @property
    def _itemsize(self) -> int:
        dtype: torch.dtype = self._engine.decoder.dtype
        return dtype.itemsize


def shrinking_lengths(batch: int, most: int) -> list[int]:
    """Return answer lengths of at most `most` tokens, chosen so that the running batch halves repeatedly.

    The engine then captures rounds of all batch sizes.
    """
    halvings = [(batch // place).bit_length() - 1 for place in range(1, batch + 1)]
    return [min(WARM_UP_TOKENS + HALVING_TOKENS * survived, most) for survived in halvings]
