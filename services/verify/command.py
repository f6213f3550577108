"""Runs `outrider verify`: answers prompts with and without speculation, and prints the comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from outrider.services.doctor.command import PROBE_SHAPE, dtype_of_flag, torch_device
from outrider.services.doctor.pair import Pair
from outrider.services.doctor.probe import PAGE_SIZE
from outrider.services.doctor.prompts import read_prompts
from outrider.services.target.request import EngineRequest, SpeculationParams
from outrider.services.verify.cases import (
    OPTIONS,
    TEXT_STOP_OPTION,
    greedy_requests,
    requests_of,
    ways,
    without_speculation,
)
from outrider.services.verify.compare import Difference, differences
from outrider.services.verify.forms import compile_forms
from outrider.services.verify.law import LawTest, check_law, law_tokens
from outrider.services.verify.logprobs import LogprobComparison, compare_logprobs, logprob_tolerance
from outrider.services.verify.pair_engine import PairEngine
from outrider.services.verify.states import StateComparison, compare_states
from outrider.services.verify.texts import TextComparison, compare_texts, stop_text
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.checkpoint.tokenizer_file import TOKENIZER_FILE
from outrider.shared.obs.logging import configure_logging
from outrider.shared.obs.progress import Progress
from outrider.shared.spec.algorithm import Algorithm
from outrider.shared.spec.tree import DraftShape

SHOWN = 10


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Options of `outrider verify`.

    Attributes:
        target: Folder of the target.
        draft: Folder of a head or a draft model, or None.
        algorithm: Value of `--speculative-algorithm`.
        token_map: Value of `--speculative-token-map`.
        device, dtype: Device and data type in the services' notation, including ``auto``.
        prompts: JSON lines file with prompts. None selects the built-in prompts.
        num_prompts, tokens: Number of prompts, and length of each answer in tokens.
        samples: Number of sampled answers for the test of the distribution of the output (`law`).
        shape: Shape of the draft trees.
        as_json: True to print one JSON object instead of a table.
    """

    target: Path
    draft: Path | None
    algorithm: Algorithm = Algorithm.AUTO
    token_map: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    prompts: Path | None = None
    num_prompts: int = 4
    tokens: int = 48
    samples: int = 512
    shape: DraftShape = PROBE_SHAPE
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class VerifiedRun:
    """One run with speculation, and its comparison with the run without speculation.

    Attributes:
        name: ``chain``, ``tree``, ``auto`` or ``mixed``.
        requests, tokens: Number of answers, and number of tokens in all answers.
        accept_length: Average number of tokens per round, over rounds with draft nodes.
        differences: The first difference of each answer that is not equal, including near-ties.
        logprobs: The comparison of the log-probabilities.
        states: The comparison of the hidden states and routed experts.
        texts: The comparison of the texts up to a stop string. None if the target has no tokenizer.
    """

    name: str
    requests: int
    tokens: int
    accept_length: float
    differences: Sequence[Difference]
    logprobs: LogprobComparison
    states: StateComparison
    texts: TextComparison | None

    @property
    def holds(self) -> bool:
        """True if rounding explains all differences."""
        texts = self.texts is None or self.texts.holds
        return not self.wrong and self.logprobs.holds and self.states.holds and texts

    @property
    def wrong(self) -> list[Difference]:
        """The differences that rounding does not explain."""
        return [one for one in self.differences if not one.is_near_tie]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The runs, and the test of the output law. `skipped` maps options that were not tried to the reasons."""

    runs: Sequence[VerifiedRun]
    law: LawTest
    skipped: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """True if speculation changed nothing."""
        return self.law.holds and all(run.holds for run in self.runs)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        runs = [
            {
                "name": run.name,
                "requests": run.requests,
                "tokens": run.tokens,
                "accept_length": round(run.accept_length, 3),
                "near_ties": len(run.differences) - len(run.wrong),
                "differences": [_finite(asdict(one)) for one in run.wrong],
                "logprobs": {**_finite(asdict(run.logprobs)), "holds": run.logprobs.holds},
                "states": {**_finite(asdict(run.states)), "holds": run.states.holds},
                "texts": None if run.texts is None else {**asdict(run.texts), "holds": run.texts.holds},
            }
            for run in self.runs
        ]
        return {
            "passed": self.passed,
            "options": [name for name in OPTIONS if name not in self.skipped],
            "skipped": dict(self.skipped),
            "runs": runs,
            "law": {**asdict(self.law), "holds": self.law.holds},
        }


def run_verify(options: VerifyOptions) -> int:
    """Run `outrider verify`: compare a target's answers with and without its draft, and print the report.

    Returns:
        Exit code: 0 if speculation changed nothing, or 1 if it did.

    Raises:
        ConfigurationError: A flag is invalid, or no draft is given.
        OutriderError: The pair cannot be loaded, or a request failed.
    """
    configure_logging("verify", "warning")
    device = torch_device(options.device)
    dtype = dtype_of_flag(options.dtype, device)
    pair = Pair(options.target, options.draft, options.algorithm, device, dtype, options.token_map)
    if not pair.drafts:
        raise ConfigurationError(
            "verify compares speculation on and off. Give a draft with --draft or --speculative-algorithm.",
            field="--draft",
        )
    report = verify_pair(pair, options, Console(stderr=True, highlight=False))
    if options.as_json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        print_verify_report(report, Console(highlight=False))
    return 0 if report.passed else 1


def verify_pair(pair: Pair, options: VerifyOptions, console: Console) -> VerifyReport:
    """Run all comparisons on a pair. `console` gets a progress bar, and a line for each finished run."""
    vocabulary = pair.target_config.vocab_size
    prompts = read_prompts(options.prompts, pair.target, vocabulary, options.num_prompts)
    longest = max(len(prompt) for prompt in prompts) + options.tokens
    engine = PairEngine(pair, longest + options.shape.max_nodes + 2 * PAGE_SIZE, options.shape)
    off_ways = without_speculation(options.shape)
    forms, skipped = compile_forms(pair), {}
    if not engine.has_experts:
        skipped["routed experts"] = "the target has no routed experts"

    def requests_for(
        speculation: Sequence[SpeculationParams], stop_tokens: Sequence[int]
    ) -> dict[str, EngineRequest]:
        return requests_of(
            prompts, options.tokens, speculation, stop_tokens, forms.grammars, experts=engine.has_experts
        )

    planned = requests_for(off_ways, [0] * len(prompts))
    work = len(prompts) * options.tokens + options.samples * law_tokens(options.shape)
    work += (1 + len(ways(options.shape))) * sum(one.max_new_tokens for one in planned.values())
    with Progress("verify", work, counts=False, console=console) as progress:
        engine.on_finish = lambda request: progress.advance(request.max_new_tokens)
        first = greedy_requests(prompts, options.tokens, off_ways[0])
        greedy = list(engine.answer(first, speculate=False).tokens.values())
        stops = [tokens[len(tokens) // 2] for tokens in greedy]
        tokenizer, strings = _stop_strings(pair, greedy)
        if tokenizer is None:
            skipped[TEXT_STOP_OPTION] = f"the target has no {TOKENIZER_FILE}"
        off = engine.answer(requests_for(off_ways, stops).values(), speculate=False)
        console.print("answered without speculation")
        tolerance = logprob_tolerance(engine, prompts)
        runs = []
        for name, speculation in ways(options.shape).items():
            requests = requests_for(speculation, stops)
            on = engine.answer(requests.values(), speculate=True)
            runs.append(
                VerifiedRun(
                    name,
                    len(requests),
                    sum(len(tokens) for tokens in on.tokens.values()),
                    on.accept_length,
                    differences(engine, requests, off, on),
                    compare_logprobs(requests, off, on, tolerance),
                    compare_states(requests, off, on, engine.decoder.dtype),
                    None if tokenizer is None else compare_texts(tokenizer, strings, off, on),
                )
            )
            console.print(f"compared: {name}")
        law = check_law(engine, prompts[0], options.samples, ways(options.shape)["tree"][0])
    return VerifyReport(runs, law, {**forms.skipped, **skipped})


def _stop_strings(pair: Pair, greedy: Sequence[Sequence[int]]) -> tuple[Tokenizer | None, dict[str, str]]:
    """Return the target's tokenizer and request id → stop string. None if the target has no tokenizer."""
    file = pair.target / TOKENIZER_FILE
    if not file.is_file():
        return None, {}
    tokenizer = Tokenizer.from_file(str(file))
    found = [stop_text(tokenizer, tokens) for tokens in greedy]
    named = {f"{TEXT_STOP_OPTION}, prompt {index + 1}": stop for index, stop in enumerate(found)}
    return tokenizer, {name: stop for name, stop in named.items() if stop}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with null instead of infinity, which JSON cannot express."""
    return {name: None if value == math.inf else value for name, value in values.items()}


def print_verify_report(report: VerifyReport, console: Console) -> None:
    """Print the runs as a table. Then print the differences, the test of the output law, and the verdict."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in (
        "speculation",
        "answers",
        "tokens",
        "accept length",
        "equal",
        "near-ties",
        "different",
        "logprobs",
        "hidden states",
    ):
        table.add_column(heading, justify="left" if heading == "speculation" else "right")
    for run in report.runs:
        equal, wrong = run.requests - len(run.differences), len(run.wrong)
        ties = len(run.differences) - wrong
        accepted, apart = f"{run.accept_length:.2f}", f"{run.logprobs.largest:.1e}"
        numbers = (run.requests, run.tokens, accepted, equal, ties, wrong, apart, f"{run.states.largest:.1e}")
        table.add_row(run.name, *(str(number) for number in numbers))
    console.print(table)
    for run in report.runs:
        for one in run.wrong[:SHOWN]:
            console.print(
                f"[red]{run.name}, {one.request}: token {one.token} is {one.on}, without speculation "
                f"{one.off} (gap {one.gap:.4g}, rounding explains {one.allowed:.2g})[/]"
            )
        if not (found := run.logprobs).holds:
            console.print(
                f"[red]{run.name}, {found.request}: logprobs differ by {found.largest:.2g} "
                f"(rounding explains {found.tolerance:.2g})[/]"
            )
        if not (states := run.states).holds:
            console.print(
                f"[red]{run.name}, {states.request}: hidden states differ by {states.largest:.2g} of their "
                f"norm (rounding explains {states.tolerance:.2g}), and {states.missing} tokens have none[/]"
            )
        if run.texts is not None and not run.texts.holds:
            console.print(f"[red]{run.name}: the texts differ: {', '.join(run.texts.different)}[/]")
    for name, reason in report.skipped.items():
        console.print(f"not tried: {name}, because {reason.rstrip('.')}")
    law = report.law
    console.print(
        f"output law: {law.samples} samples at temperature {law.temperature:g}, {law.outcomes} outcomes, "
        f"p = {law.p_value:.3g}"
        + ("" if law.holds else " [red](the counts contradict the target's probabilities)[/]")
    )
    if report.passed:
        console.print(
            "[green]Speculation changes nothing: the same tokens, texts, logprobs and states for every "
            "option that was tried.[/]"
        )
    else:
        console.print(
            "[bold red]Speculation changed answers. Please report this with the output of --json.[/]"
        )
