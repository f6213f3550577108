"""`outrider bench speculation`: compares speculative and plain decoding, end to end over REST at batch 1.

For each prompt and temperature, the benchmark sends four requests, one after another. Three of them are sent
to a server with a draft, one in each speculation mode (on, auto, off). The fourth is sent to a second server
with ``--draft none``. The order rotates, so that no kind of request always comes first. Each ratio compares
two requests with the *same* prompt, and the figures are medians of these ratios. A machine that slowly
becomes faster or slower therefore hardly changes the figures.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.measure.near_tie import Judge
from outrider.bench.measure.prompts import HELDOUT_PROMPTS, Messages, load_prompts
from outrider.bench.report.machine import describe_machine
from outrider.bench.report.record import recorded_command, result_path
from outrider.bench.report.source import recorded_source
from outrider.bench.report.surroundings import recorded_environment
from outrider.services.clients.rest import RestClient, StreamedReply
from outrider.services.stack.launch import free_port, running_stack
from outrider.services.stack.options import StackOptions, Transport
from outrider.services.stack.start_bar import StartBar
from outrider.shared.obs.progress import Progress, Waiting

TEMPERATURES = (0.0, 1.0)
SEED = 20_000
WARM_UP_PROMPTS = 2
KV_TOKENS = 16_384


class RunKind(Enum):
    """Kind of a run: a speculation mode of the server with a draft, or the server without a draft."""

    ON = "on"
    AUTO = "auto"
    OFF = "off"
    NO_DRAFT = "no_draft"


DRAFTED = (RunKind.ON, RunKind.AUTO)
SERVERS = {"draft": "with a draft", "plain": "without a draft"}
# Numerator and denominator of each ratio, paired per prompt.
RATIOS = ((RunKind.ON, RunKind.OFF), (RunKind.AUTO, RunKind.OFF), (RunKind.OFF, RunKind.NO_DRAFT))


LABELS = {RunKind.ON: "on", RunKind.AUTO: "auto", RunKind.OFF: "off", RunKind.NO_DRAFT: "--draft none"}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of the measurement. Its fields are the flags of `outrider bench`."""

    prompts: Path | None
    num_prompts: int
    tokens: int
    target: Path
    draft: Path
    device: str
    output: Path | None
    transport: Transport = Transport.AUTO


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """Speed and speculation figures of one request."""

    prompt: int
    temperature: float
    kind: RunKind
    tokens: int
    total_s: float
    first_token_s: float
    accept_length: float
    rounds: int
    token_ids: Sequence[int]

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second of the whole request, including prefill."""
        return self.tokens / self.total_s


Clients = dict[str, RestClient]
Runs = dict[tuple[int, float, RunKind], MeasuredRequest]


def run_bench(options: BenchOptions) -> int:
    """Run `outrider bench speculation`: start two servers, measure, print a table and write the JSON file.

    Returns the exit code.

    Raises:
        ConfigurationError: The stack cannot be started, or the prompts cannot be read.
    """
    prompts = load_prompts(options.prompts or HELDOUT_PROMPTS, options.num_prompts)
    console = Console(highlight=False)
    log: deque[str] = deque(maxlen=40)
    Console(stderr=True).print("starting two servers, one of them without a draft")
    try:
        with ExitStack() as cleanup:
            with StartBar() as bar:
                clients = _start(cleanup, options, log, bar)
            runs = _measure(options, prompts, clients)
            with Waiting("stopping the servers"):
                cleanup.close()
    except Exception:
        print(*log, sep="\n", file=sys.stderr)
        raise
    with Waiting("comparing the answers"):
        machine = describe_machine()
        summary = summarise_runs(runs, len(prompts))
        differences = first_differences(runs, prompts, options.target)
    result = {
        "command": recorded_command(),
        "environment": recorded_environment(),
        "source": recorded_source(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine,
        "prompts": len(prompts),
        "tokens_per_answer": options.tokens,
        "transport": options.transport.value,
        "summary": summary,
        "first_differences": differences,
        "runs": [_as_json(run) for run in runs.values()],
    }
    path = result_path(options.output, "speculation", "cuda" if machine["gpus"] else "cpu")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _print_table(console, summary, options)
    for one in differences:
        console.print(_shown(one), soft_wrap=True)
    console.print(f"wrote {path}")
    return 0


def _start(cleanup: ExitStack, options: BenchOptions, log: deque[str], bar: StartBar) -> Clients:
    """Start the two servers in parallel, because each server takes a while to import, load and warm up."""
    ports = [free_port()]
    while len(ports) < 2:
        if (port := free_port()) not in range(ports[0] - 1, ports[0] + 2):
            ports.append(port)
    given_up = threading.Event()
    with ThreadPoolExecutor(len(ports)) as starting:
        futures = [
            starting.submit(_start_one, options, label, draft, port, log, bar, given_up)
            for port, label, draft in zip(ports, ("draft", "plain"), (options.draft, None), strict=True)
        ]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            given_up.set()
            wait(futures)
            started = [future.result() for future in futures if future.exception() is None]
            for resources, _client in started:
                cleanup.enter_context(resources)
    return dict(zip(("draft", "plain"), (client for _resources, client in started), strict=True))


def _start_one(
    options: BenchOptions,
    label: str,
    draft: Path | None,
    port: int,
    log: deque[str],
    bar: StartBar,
    given_up: threading.Event,
) -> tuple[ExitStack, RestClient]:
    stack_options = StackOptions(
        target=options.target,
        draft=draft,
        device=options.device,
        port=port,
        transport=options.transport,
        kv_tokens=KV_TOKENS,  # the two stacks share one GPU; by default, each would claim most of its memory
    )

    def echo(name: str, line: str) -> None:
        log.append(f"{label}/{name} | {line}")
        bar.hear(name, line, SERVERS[label])

    with ExitStack() as resources:
        stack = resources.enter_context(
            running_stack(stack_options, echo, lambda line: bar.tell(line, SERVERS[label]), given_up.is_set)
        )
        client = resources.enter_context(RestClient(stack.url))
        return resources.pop_all(), client


def _measure(options: BenchOptions, prompts: Sequence[Messages], clients: Clients) -> Runs:
    runs: Runs = {}
    kinds = list(RunKind)
    with Progress("measuring", len(prompts) * len(TEMPERATURES) * len(kinds)) as progress:
        for messages in prompts[:WARM_UP_PROMPTS]:
            for kind in kinds:
                _ask(options, clients, messages, 0, 0.0, kind)
        for index, messages in enumerate(prompts):
            for temperature in TEMPERATURES:
                for kind in kinds[index % len(kinds) :] + kinds[: index % len(kinds)]:
                    runs[index, temperature, kind] = _ask(
                        options, clients, messages, index, temperature, kind
                    )
                    progress.advance()
    return runs


def _ask(
    options: BenchOptions, clients: Clients, messages: Messages, index: int, temperature: float, kind: RunKind
) -> MeasuredRequest:
    client = clients["plain" if kind is RunKind.NO_DRAFT else "draft"]
    body = {
        "max_tokens": options.tokens,
        "ignore_eos": True,
        "temperature": temperature,
        "seed": SEED + index,
        "return_token_ids": True,
        "speculation": {"mode": "off" if kind is RunKind.NO_DRAFT else kind.value},
    }
    reply = StreamedReply()
    for _piece in client.stream_chat(messages, body, reply):
        pass
    speculation = reply.speculation
    accept_length = float(speculation.get("accept_length") or 0.0)
    rounds = int(speculation.get("rounds") or 0)
    return MeasuredRequest(
        index,
        temperature,
        kind,
        reply.completion_tokens,
        reply.total_s,
        reply.first_token_s,
        accept_length,
        rounds,
        reply.token_ids,
    )


def summarise_runs(runs: Runs, num_prompts: int) -> list[dict[str, Any]]:
    """Return one row of results for each temperature: median ratios, median speeds and mean accept lengths.

    The field ``same_text`` of a row is the number of prompts with the same answer as with ``mode: off``.
    """
    rows = []
    for temperature in TEMPERATURES:
        of = {kind: [runs[index, temperature, kind] for index in range(num_prompts)] for kind in RunKind}
        speed = {kind: [run.tokens_per_s for run in of[kind]] for kind in RunKind}
        accepted = {
            kind: round(statistics.mean(run.accept_length for run in of[kind]), 3) for kind in DRAFTED
        }
        rows.append(
            {
                "temperature": temperature,
                **{_ratio_name(a, b): _ratios(speed[a], speed[b], accepted.get(a, 1.0)) for a, b in RATIOS},
                "tokens_per_s": {kind.value: round(statistics.median(speed[kind]), 1) for kind in RunKind},
                "accept_length": {kind.value: accepted[kind] for kind in DRAFTED},
                "same_text": {
                    kind.value: sum(
                        a.token_ids == b.token_ids for a, b in zip(of[kind], of[RunKind.OFF], strict=True)
                    )
                    for kind in DRAFTED
                },
            }
        )
    return rows


def first_differences(runs: Runs, prompts: Sequence[Messages], target: Path) -> list[dict[str, Any]]:
    """Return the first token at which each answer with drafts differs from the answer with ``mode: off``.

    For greedy answers, the result includes the logits at that token. In 16-bit types, two almost equal logits
    can cause a difference.
    """
    found = []
    judge: Judge | None = None
    for (index, temperature, kind), run in runs.items():
        off = runs[index, temperature, RunKind.OFF]
        if kind not in DRAFTED or run.token_ids == off.token_ids:
            continue
        where: dict[str, Any] = {"prompt": index, "temperature": temperature, "kind": kind.value}
        if temperature == 0.0:
            judge = judge or Judge(target)
            where |= judge.parting(prompts[index], off.token_ids, run.token_ids).as_json()
        found.append(where)
    return found


def _ratio_name(numerator: RunKind, denominator: RunKind) -> str:
    return f"{numerator.value}_over_{denominator.value}"


def _ratios(numerators: Sequence[float], denominators: Sequence[float], most: float) -> dict[str, float]:
    """Return the median and the quartiles of the pairwise ratios, together with `most`.

    `most` is the largest possible ratio. With drafts, it is the accept length, which the ratio reaches if a
    round takes no longer than a plain step. Without drafts, it is 1.
    """
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    low, median, high = (
        statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [ratios[0]] * 3
    )
    return {
        "median": round(median, 3),
        "p25": round(low, 3),
        "p75": round(high, 3),
        "floor": most,
        "ratio": round(most / median, 3),
    }


def _as_json(run: MeasuredRequest) -> dict[str, Any]:
    return {
        "prompt": run.prompt,
        "temperature": run.temperature,
        "kind": run.kind.value,
        "tokens": run.tokens,
        "tokens_per_s": round(run.tokens_per_s, 2),
        "first_token_ms": round(run.first_token_s * 1e3, 2),
        "accept_length": round(run.accept_length, 3),
        "rounds": run.rounds,
    }


def _print_table(console: Console, rows: Sequence[dict[str, Any]], options: BenchOptions) -> None:
    """Print the table, with one column for each temperature."""
    table = Table(title=f"{options.num_prompts} prompts, {options.tokens} tokens each, batch 1")
    table.add_column("median (quartiles)")
    for row in rows:
        table.add_column(f"T = {row['temperature']:g}", justify="right")
    for a, b in RATIOS:
        table.add_row(f"{LABELS[a]} ÷ {LABELS[b]}", *(_spread(row[_ratio_name(a, b)]) for row in rows))
    for kind in RunKind:
        table.add_row(
            f"tokens/s, {LABELS[kind]}", *(f"{row['tokens_per_s'][kind.value]:.0f}" for row in rows)
        )
    for kind in DRAFTED:
        table.add_row(
            f"mean accept length, {LABELS[kind]}",
            *(f"{row['accept_length'][kind.value]:.2f}" for row in rows),
        )
    for kind in DRAFTED:
        same = (row["same_text"][kind.value] for row in rows)
        table.add_row(
            f"same text as off, {LABELS[kind]}", *(f"{count} of {options.num_prompts}" for count in same)
        )
    console.print(table)


def _shown(difference: dict[str, Any]) -> str:
    """Return a line that reports where an answer differs and, for a greedy answer, why it differs."""
    where = (
        f"{difference['kind']} differs from off at T = {difference['temperature']:g}, "
        f"prompt {difference['prompt']}"
    )
    if "gap" not in difference:
        return where
    best = ", ".join(f"{token}: {logit}" for token, logit in difference["best_in_fp32"])
    what = "a near-tie" if difference["near_tie"] else "NOT a near-tie"
    choices = " or ".join(map(str, difference["choices"]))
    return (
        f"{where}: token {difference['token']} is {choices}; best logits in fp32 {best}; "
        f"gap {difference['gap']}, {what}"
    )


def _spread(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['p25']:.2f}–{ratio['p75']:.2f})"
