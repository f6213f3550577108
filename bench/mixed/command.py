"""`outrider bench mixed`: finds or starts a server, runs the cases and reports the figures."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from outrider.bench.load.server import Server, find_server
from outrider.bench.mixed.cases import FORM_GOALS, RULES_GOALS, Section
from outrider.bench.mixed.client import MixedClient, RequestFormat
from outrider.bench.mixed.figures import MixedFigure, figure_table
from outrider.bench.mixed.plan import (
    AUTO_BATCHES,
    BATCH,
    VOCAB,
    MixedCase,
    Only,
    Wishes,
    plan_cases,
    sizes_for,
)
from outrider.bench.report.record import WIDTH, Result
from outrider.services.stack.options import StackOptions
from outrider.services.stack.started_services import started_services
from outrider.shared.base.errors import ConfigurationError, OutriderError, UnavailableError
from outrider.shared.obs.progress import Progress

DRAFT_WAIT_S = 60.0
POLL_S = 0.25
READY, DRAFTLESS = "on", ("none", "")
SMALLEST_VOCAB = 16


@dataclass(frozen=True, slots=True)
class MixedOptions:
    """Options of `outrider bench mixed`. The fields are its flags.

    Attributes:
        stack: The stack to start if no address is given.
        url: Address of a running server, or None.
        api: Format of the requests.
        api_key: API key to send, or None.
        only: Parts and cases to run.
        omitted: Fields to leave out of every request.
        vocab: All token ids of the prompts are below this number. None uses the size of the server's
            vocabulary.
        wishes: Sizes of the cases that were given on the command line.
        output: The JSON file.
    """

    stack: StackOptions
    url: str | None
    api: RequestFormat
    api_key: str | None
    only: Only
    omitted: Collection[str]
    vocab: int | None
    wishes: Wishes
    output: Path


def run_mixed(options: MixedOptions) -> int:
    """Run `outrider bench mixed`: run all cases, print the table and save the result after every case.

    Returns:
        The exit code, which is 1 if a case failed.

    Raises:
        ConfigurationError: An option does not fit the server, or the server refuses a request.
        UnavailableError: No server answers at the address, or its draft does not become ready.
    """
    with ExitStack() as cleanup:
        url = options.url or cleanup.enter_context(started_services(_roomy(options))).url
        return _run(options, url)


def _roomy(options: MixedOptions) -> StackOptions:
    """Return the options of a stack that runs all requests of a batch at the same time."""
    wishes = options.wishes
    needed = []
    if Section.ODD in options.only or Section.FORM in options.only:
        needed.append((wishes.batch or BATCH) + 1)
    if Section.FORM in options.only:
        needed += FORM_GOALS
    if Section.RULES in options.only:
        needed += RULES_GOALS
    if Section.AUTO in options.only:
        needed += wishes.auto_batches or AUTO_BATCHES
    return replace(options.stack, max_running_requests=max(needed)) if needed else options.stack


def _run(options: MixedOptions, url: str) -> int:
    server = _check_api(find_server(url, options.api_key), options.api)
    sizes = sizes_for(options.wishes, server, options.only)
    vocab = _vocabulary(options.vocab, server)
    cases, skipped = plan_cases(options.only, sizes, server, options.api, options.omitted)
    if any(kind.drafts for case in cases for kind in case.kinds):
        _await_draft(url, options.api_key)
    settings = {
        "device": options.stack.device if options.url is None else "remote",
        "api": options.api.value,
        "model": server.model,
        "server": server.as_json(),
        "omitted": sorted(options.omitted),
        "vocab": vocab,
        **{
            name: list(value) if isinstance(value, Sequence) else value
            for name in sizes.__dataclass_fields__
            for value in (getattr(sizes, name),)
        },
    }
    figures: list[MixedFigure] = []
    failed: dict[str, str] = {}

    def save() -> None:
        rows = [figure.as_row() for figure in figures]
        Result("mixed", settings, rows, {"skipped": skipped, "failed": failed}).save(options.output)

    async def measure() -> None:
        client = MixedClient(server, options.api, vocab, options.omitted, options.api_key, sizes.seed)
        try:
            await _check_kinds(client, cases)
            with Progress("mixed", len(cases)) as progress:
                for number, case in enumerate(cases):
                    name = f"{case.section.value}: {case.name}"
                    progress.tell(number, step=name)
                    try:
                        figures.extend(await case.measure(client))
                    except OutriderError as error:  # the other cases are still valid
                        failed[name] = error.message[:500]
                        print(f"{name} failed: {failed[name]}", file=sys.stderr)
                    save()
        finally:
            await client.close()

    asyncio.run(measure())
    _print(figures, skipped, server, options.output)
    return int(bool(failed))


def _print(figures: list[MixedFigure], skipped: dict[str, str], server: Server, output: Path) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    console.print(figure_table(f"mixed: {server.model}", figures))
    for name, reason in skipped.items():
        console.print(f"left out {name}: {reason}", soft_wrap=True)
    console.print(f"wrote {output}", soft_wrap=True)


def _check_api(server: Server, api: RequestFormat) -> Server:
    if api is RequestFormat.OUTRIDER and not server.is_outrider:
        raise ConfigurationError(
            f"--api outrider: the model's owner is {server.owner or 'not stated'}, so the server is not "
            "Outrider. Use --api openai.",
            field="--api",
        )
    return server


def _vocabulary(given: int | None, server: Server) -> int:
    """Return the limit of the prompts' token ids: all ids are below this number.

    Raises:
        ConfigurationError: The given number is too small, or larger than the model's vocabulary.
    """
    known = server.vocab_size
    if given is not None and (given < SMALLEST_VOCAB or (known is not None and given > known)):
        most = "" if known is None else f" and at most the model's {known}"
        raise ConfigurationError(
            f"--vocab {given}: expected at least {SMALLEST_VOCAB}{most}.", field="--vocab"
        )
    return given or known or VOCAB


def _await_draft(url: str, api_key: str | None) -> None:
    """Wait until the draft of an Outrider server is ready.

    Other servers, and Outrider servers without a draft, count as ready.

    Raises:
        UnavailableError: The draft is not ready in time.
    """
    ends = time.monotonic() + DRAFT_WAIT_S
    while (state := find_server(url, api_key).draft_state) != READY and state not in DRAFTLESS:
        if time.monotonic() >= ends:
            raise UnavailableError(
                f"The server's draft is not ready after {DRAFT_WAIT_S:g} s (state {state}). Start it, or "
                "choose cases without a draft with --only.",
                field="--only",
            )
        time.sleep(POLL_S)


async def _check_kinds(client: MixedClient, cases: Sequence[MixedCase]) -> None:
    """Send one short request of each kind, so that a refusal ends the run before anything is measured.

    Raises:
        ConfigurationError: The server refuses a request. The message names the option to change.
        UnavailableError: The server fails.
    """
    kinds = {str(kind): kind for case in cases for kind in case.kinds}
    for kind in kinds.values():
        await client.send(client.body(1, 1, kind))
