"""How long a decoding round takes, and a prefill: the engine in this process, random weights, batches of equal prompts.

Milliseconds per round = (time for N tokens - time for 1 token) / rounds, by the wall clock from handing over the batch to its last token,
best of `repeats`: the way the peers' figures in docs/performance.md were taken. Acceptance is synthetic and says so.
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
from pathlib import Path
from typing import Any

import torch

from outrider.bench.measure.clock import percentile, summarise
from outrider.bench.measure.floors import Narrow, Work, forward_pass, prefill, speculative_round
from outrider.bench.measure.idle import Profile, profiled
from outrider.bench.measure.roofline import Ceilings, measure_ceilings
from outrider.bench.report.record import Result, Row, finish
from outrider.bench.report.surroundings import (
    compiled_kernels,
    multi_process_service,
    process_age_s,
    under_mps,
)
from outrider.bench.stacks.answers import TimedAnswer
from outrider.bench.stacks.engine_stack import (
    BenchEngine,
    EngineOptions,
    RunningBatch,
    check_accept_length,
    check_draft_device,
    placement,
    running_engine,
)
from outrider.services.stack.option_checks import check_mps_device
from outrider.shared.base.errors import ConfigurationError, OutriderError
from outrider.shared.spec.tree import DraftShape

SYNTHETIC = "synthetic acceptance"
WARM_UP_TOKENS = 24
WARM_UP_RUNS = 3
"""A draft in a process of its own meets the size of the rounds in the first, and takes part in all of them by the last."""
HALVING_TOKENS = 12
"""What the answers of each half are longer by than those of the other, so that the batch shrinks through all sizes."""
STEADY_AFTER = 5
"""Steps after which a batch is steady: its last prefill, what the draft makes up for, the first rounds on the device."""
PROFILED_ROUNDS = 40
SHAPE_TEXT = re.compile(r"(\d+)/(\d+)/(\d+)(?:@(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class MeasuredShape:
    """A kind of round to measure.

    Attributes:
        tree: Of every round; None is plain decoding.
        accept_length: That rounds shall have on average.
        batches: Sizes to measure it at; empty: those of the options.
    """

    tree: DraftShape | None
    accept_length: float
    batches: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """How the rows call it: plain, chain 5, tree 5/8/32."""
        if self.tree is None:
            return "plain"
        return (
            f"chain {self.tree.depth}"
            if self.tree.topk == 1
            else f"tree {self.tree.depth}/{self.tree.topk}/{self.tree.max_nodes}"
        )


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """What to measure; the fields are the flags of `outrider bench latency`."""

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
    """Parse ``plain``, ``chain5`` and ``5/8/32`` (steps/topk/nodes), with ``@2.4`` for an accept length, ``:1+16`` for batches of its own.

    Raises:
        ConfigurationError: Anything else.
    """
    shapes = []
    for given in texts:
        text, _, sizes = given.partition(":")
        batches = tuple(int(size) for size in sizes.split("+") if size.isdigit())
        if sizes and (not batches or min(batches) < 1 or "+".join(map(str, batches)) != sizes):
            raise ConfigurationError(
                f"--rounds {given}: batch sizes are numbers such as :1+16.", field="--rounds"
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
    """Measure, print and save; the file is there from the first row on. Returns the exit code, 1 if a case failed.

    Raises:
        ConfigurationError: A setting is wrong, or the multi-process service is wanted where it cannot be.
    """
    engine = options.engine
    for flag, given in (("--mps", options.mps), ("--draft-device", engine.draft_device is not None)):
        if given and not engine.draft_is_apart:
            raise ConfigurationError(
                f"{flag} is for a draft in a process of its own: --transport ipc, grpc or unix, and --rounds that draft.",
                field=flag,
            )
    if options.mps:
        check_mps_device(engine.device)
    with multi_process_service(options.mps) as around:
        return _run(replace(options, engine=replace(options.engine, around=around)))


def _run(options: LatencyOptions) -> int:
    device, dtype = placement(options.engine)
    if options.engine.draft_device is not None:
        check_draft_device(options.engine.draft_device)
    torch.zeros(1, device=device)  # the context of a GPU is part of a start
    imported_s = process_age_s()
    ceilings = measure_ceilings(device, dtype, small=device.type == "cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the engine shares out what is free
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
        for case, measured in bench.cases():
            try:
                rows.append(measured())
            except (OutriderError, RuntimeError) as error:  # the other cases still count
                failed[case] = f"{type(error).__name__}: {error}"[:500]
                print(f"{case} failed: {failed[case]}", file=sys.stderr)
            more["graphs"] = engine.graphs
            result.save(options.output)
    return finish(
        result, options.output, ("tok_s", "accept_length", "gap_p99_ms", "gpu_idle_between")
    ) or int(bool(failed))


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
    """Measures one engine.

    Args:
        engine: Running.
        options: What to measure.
        ceilings: Of this machine, for the floors.
        profiles: Takes case → where the GPU's time goes, of what is profiled.
    """

    def __init__(
        self, engine: BenchEngine, options: LatencyOptions, ceilings: Ceilings, profiles: dict[str, Any]
    ) -> None:
        self._profiles = profiles
        self._engine = engine
        self._options = options
        self._ceilings = ceilings
        self._random = random.Random(0)

    def cases(self) -> Iterator[tuple[str, Callable[[], Row]]]:
        """Yield every case's name and what measures it, in order."""
        for shape in self._options.shapes:
            for batch in shape.batches or self._options.batches:
                yield f"round {shape.label}, batch {batch}", partial(self.round, shape, batch)
        for tokens in self._options.prefills:
            yield f"prefill {tokens}", partial(self.prefill, tokens)

    def prefill(self, tokens: int) -> Row:
        """Return the row of a prompt of so many tokens: from handing it over to its first token."""
        work = prefill(self._engine.decoder.config, tokens, self._itemsize).times(1 / self._options.engine.tp)
        seconds = []
        for _ in range(self._options.repeats + 3):
            taken, _answers = self._engine.run_batch(self._prompts(1, tokens), 1, None)
            seconds.append(taken)
        times = summarise(seconds[2:])
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
        """Return the row of one kind of round at one batch size."""
        options, engine = self._options, self._engine
        acceptance = engine.set_accept_length(shape.accept_length) if shape.tree else "none"
        for _ in range(WARM_UP_RUNS):
            engine.run_batch(self._prompts(batch), shrinking_lengths(batch, options.new_tokens), shape.tree)
        # As in the peers' runs: a prompt's pass takes longer on a GPU that is at its power limit from one before, as N tokens' is too.
        engine.run_batch(self._prompts(batch), 2, shape.tree)
        first = min(engine.run_batch(self._prompts(batch), 1, shape.tree)[0] for _ in range(2))
        total, answers = min(
            (
                engine.run_batch(self._prompts(batch), options.new_tokens, shape.tree)
                for _ in range(options.repeats)
            ),
            key=_taken,
        )
        rounds = statistics.mean(answer.rounds for answer in answers)
        decoded = sum(answer.tokens - 1 for answer in answers)
        works = self._works(shape, batch)
        gaps = _gaps(answers)
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
        """Profile some rounds of which all sequences of the batch have a part; None where there is no GPU."""
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
            return [forward_pass(config, batch, batch, context, self._itemsize, self._narrow).times(share)]
        tree, head = shape.tree, self._options.engine.shape.head
        shaped = (tree.depth, tree.topk, tree.max_nodes)
        return speculative_round(config, head, batch, *shaped, context, self._itemsize, share, self._narrow)

    def _floor_ms(self, works: Sequence[Work]) -> float:
        return sum(self._ceilings.seconds(work.nbytes, work.flops) for work in works) * 1e3

    def _prompts(self, batch: int, tokens: int | None = None) -> list[list[int]]:
        vocab = self._engine.decoder.config.vocab_size
        return [
            [self._random.randrange(vocab) for _ in range(tokens or self._options.prompt)]
            for _ in range(batch)
        ]

    @property
    def _narrow(self) -> Narrow:
        settings = self._options.engine.settings
        return Narrow(
            1 if settings.get("quantization") == "fp8" else None,
            1 if settings.get("kv_cache_dtype") == "fp8_e4m3" else None,
        )

    @property
    def _itemsize(self) -> int:
        dtype: torch.dtype = self._engine.decoder.dtype
        return dtype.itemsize


def shrinking_lengths(batch: int, most: int) -> list[int]:
    """Return lengths of answers, `most` at most, with which a batch halves again and again: rounds of all its sizes are recorded then."""
    halvings = [(batch // place).bit_length() - 1 for place in range(1, batch + 1)]
    return [min(WARM_UP_TOKENS + HALVING_TOKENS * survived, most) for survived in halvings]


def _taken(run: tuple[float, list[TimedAnswer]]) -> float:
    return run[0]


def _gaps(answers: Sequence[TimedAnswer]) -> list[float]:
    """Return the seconds between deliveries, the wait for the first token and the gap that may hold others' prefills left out."""
    gaps = [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.arrivals[1:], answer.arrivals[2:], strict=False)
    ]
    return gaps or [0.0]
