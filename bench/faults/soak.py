"""`outrider bench soak`: sends all kinds of requests while each service is killed, suspended and restarted.

The command runs in phases. Each phase repeatedly disturbs one service. The last phase disturbs none. Between
two phases, the clients pause. No sequence, session or page may then be in use in the services.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.bench.faults.answers import AnswerPart, Asker, RequestEnding, check
from outrider.bench.faults.leftovers import settle
from outrider.bench.faults.processes import survivors, usages
from outrider.bench.faults.questions import SPECULATIONS, Question, soak_questions
from outrider.bench.load.server import find_server
from outrider.bench.report.record import Result, Row, show_and_save
from outrider.services.stack.launch import Stack
from outrider.services.stack.options import StackOptions
from outrider.services.stack.started_services import started_services
from outrider.shared.base.errors import UnavailableError
from outrider.shared.obs.progress import Progress

STREAMED_SHARE, CANCELLED_SHARE = 0.6, 0.25
"""Share of requests that stream, and share of streams that the client cancels."""
MOST_EVENTS = 12
PAUSE_AFTER_FAILURE_S = 1.0
WARM_UP_SHARE = 0.1
SUSPENDED_S = 3.0
RECOVERY_S = 60.0
POLL_S = 0.1
SAMPLE_S = 15.0
TELL_S = 1.0
"""Seconds between two updates of the progress bar."""
EXAMPLES = 20
RSS_GOAL, DESCRIPTORS_GOAL = 1.05, 4
"""Limits of a service's growth: a factor for its memory in the last phase, and a number of additional open
files in any phase after the warm-up. Memory is measured in the last phase only, because new processes fill
their caches."""
VOCAB = 1000
FAULTS = ("kill", "suspend", "terminate")
PHASES = {
    "draft disturbed": "draft",
    "target disturbed": "target",
    "gateway disturbed": "gateway",
    "undisturbed, first half": "",
    "undisturbed, second half": "",
}
"""Name of each phase → the service that it disturbs, or an empty text."""


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """Options of `outrider bench soak`. Most fields are its flags.

    Attributes:
        stack: The stack of services to start.
        minutes: Duration of all phases together, in minutes.
        clients: Number of clients. Each sends one request after the other.
        pause_s: Seconds between the recovery from a fault and the next fault.
        seed: Seed of the requests.
        output: The JSON file for the result.
    """

    stack: StackOptions
    minutes: float
    clients: int
    pause_s: float
    seed: int
    output: Path


@dataclass(slots=True)
class FaultTally:
    """Counts and times that the clients of `outrider bench soak` record.

    Attributes:
        outcomes: Ending → number of requests with this outcome.
        kinds: Kind of question → number of requests of this kind.
        excused: Number of requests that failed while the target or the gateway was down.
        failures: Error → number of requests that failed with it although the target and the gateway were up.
        wrong: Examples of wrong answers.
        down: Times, in seconds of `time.monotonic`, at which the target or the gateway was down.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    excused: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    down: list[list[float]] = field(default_factory=list)

    def is_excused(self, began: float, ended: float) -> bool:
        """Return whether a request ran while the target or the gateway was down."""
        return any(first <= ended and began <= last for first, last in self.down)


def run_soak(options: SoakOptions) -> int:
    """Run `outrider bench soak`: run all phases, print the table and save the result.

    Returns:
        The exit code: 1 if an answer was wrong, a request failed without a reason, or something leaked.
        Otherwise 0.

    Raises:
        ConfigurationError: The stack cannot be started.
        UnavailableError: A service does not become ready again.
    """
    with started_services(options.stack, kept_lines=200) as stack:
        return asyncio.run(_Soak(options, stack).run())


class _Soak:
    def __init__(self, options: SoakOptions, stack: Stack) -> None:
        self._options = options
        self._supervisor = stack.supervisor
        self._asker = Asker(stack.url)
        server = find_server(stack.url, None)
        self._questions = soak_questions(
            min(server.vocab_size or VOCAB, VOCAB), server.max_model_len or VOCAB, options.seed
        )
        self._expected: list[dict[int, AnswerPart]] = []
        self._tally = FaultTally()
        self._open = asyncio.Event()
        self._idle = asyncio.Condition()
        self._busy = 0
        self._ended = False
        self._clients: list[asyncio.Task[None]] = []
        self._faults: Counter[str] = Counter()
        self._phases: list[dict[str, Any]] = []
        self._peaks: dict[str, float] = {}
        self._memory: list[dict[str, float]] = []
        self._began = time.monotonic()

    async def run(self) -> int:
        with Progress("recording the right answers", len(self._questions)) as progress:
            for one in self._questions:
                self._expected.append(await self._asker.whole(one, {"mode": "off"}))
                progress.advance()
        clients = self._clients = [
            asyncio.create_task(self._client(number)) for number in range(self._options.clients)
        ]
        total = self._options.minutes * 60
        share = (1 - WARM_UP_SHARE) / len(PHASES)
        try:
            with Progress("soak", 1.0, counts=False) as progress:
                await self._told_phase("warm-up", "", total, WARM_UP_SHARE, 0.0, progress)
                for number, (name, disturbed) in enumerate(PHASES.items()):
                    done = WARM_UP_SHARE + number * share
                    await self._told_phase(name, disturbed, total, share, done, progress)
        finally:
            self._ended = True
            self._open.set()
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            await self._asker.close()
        return self._report(time.monotonic() - self._began)

    async def _told_phase(
        self, name: str, disturbed: str, total_s: float, share: float, done: float, progress: Progress
    ) -> None:
        """Run a phase, and show the progress. `done` is the share of the time that earlier phases took."""
        began = time.monotonic()

        async def tell() -> None:
            while True:
                await asyncio.sleep(TELL_S)
                progress.tell(done + min(share, (time.monotonic() - began) / total_s), step=name)

        progress.tell(done, step=name)
        teller = asyncio.create_task(tell())
        try:
            await self._phase(name, disturbed, total_s * share)
        finally:
            teller.cancel()

    async def _phase(self, name: str, disturbed: str, seconds: float) -> None:
        before = usages(self._supervisor)
        answered = self._tally.outcomes.total()
        self._open.set()
        ends = time.monotonic() + seconds
        sampler = asyncio.create_task(self._sample())
        try:
            faults = 0
            while disturbed and time.monotonic() < ends and self._has(disturbed):
                await self._disturb(disturbed, FAULTS[faults % len(FAULTS)])
                faults += 1
                await asyncio.sleep(self._options.pause_s)
            await asyncio.sleep(max(0.0, ends - time.monotonic()))
        finally:
            sampler.cancel()
        # Let no client begin a request, and wait for the running ones.
        self._open.clear()
        async with self._idle:
            await self._idle.wait_for(lambda: self._busy == 0)
        for client in self._clients:
            if client.done():
                client.result()  # an error of this command, not of the server
        left = await settle(self._asker)
        after = usages(self._supervisor)
        self._phases.append(
            {
                "phase": name,
                "seconds": round(seconds, 1),
                "requests": self._tally.outcomes.total() - answered,
                "left_over": left,
                "services": {
                    service: {"before": first.as_json(), "after": last.as_json()}
                    for service, (first, last) in survivors(before, after).items()
                },
            }
        )
        print(f"{name}: {self._phases[-1]}", flush=True)

    def _has(self, service: str) -> bool:
        return any(child.spec.name == service for child in self._supervisor.children)

    async def _sample(self) -> None:
        """Record the memory of all services again and again."""
        while True:
            found = {name: usage.rss_mib for name, usage in usages(self._supervisor).items()}
            for name, rss_mib in found.items():
                self._peaks[name] = max(self._peaks.get(name, 0.0), rss_mib)
            self._memory.append({"second": round(time.monotonic() - self._began), **found})
            await asyncio.sleep(SAMPLE_S)

    async def _disturb(self, service: str, fault: str) -> None:
        """Kill, suspend or terminate a service, and wait until it serves again."""
        child = self._supervisor.child(service)
        process, starts = child.process_id, child.starts
        if process is None:
            return
        self._faults[f"{fault} {service}"] += 1
        window = [time.monotonic(), float("inf")]
        if service != "draft" and fault != "suspend":
            self._tally.down.append(window)
        if fault == "suspend":
            os.kill(process, signal.SIGSTOP)
            await asyncio.sleep(SUSPENDED_S)
            os.kill(process, signal.SIGCONT)
        else:
            os.kill(process, signal.SIGKILL if fault == "kill" else signal.SIGTERM)
        deadline = time.monotonic() + RECOVERY_S
        while not await self._serves(child.starts > starts or fault == "suspend"):
            if time.monotonic() > deadline:
                raise UnavailableError(f"{service} does not serve {RECOVERY_S:g} s after {fault}.")
            await asyncio.sleep(POLL_S)
        window[1] = time.monotonic()

    async def _serves(self, restarted: bool) -> bool:
        """Return whether the gateway is ready and drafts are used."""
        if not restarted:
            return False
        ready = await self._asker.get("/ready")
        if ready is None or ready.status_code != 200:
            return False
        info = await self._asker.get("/server_info")
        if info is None or info.status_code != 200:
            return False
        states = [one["draft_state"] for one in info.json()["internal_states"]]
        return all(state in ("on", "none") for state in states)

    async def _client(self, number: int) -> None:
        draw = random.Random(f"{self._options.seed} {number}")
        while True:
            await self._open.wait()
            if self._ended:
                return
            index = draw.randrange(len(self._questions))
            self._busy += 1
            try:
                await self._ask(draw, self._questions[index], self._expected[index])
            finally:
                self._busy -= 1
                async with self._idle:
                    self._idle.notify_all()

    async def _ask(self, draw: random.Random, question: Question, expected: dict[int, AnswerPart]) -> None:
        stream = draw.random() < STREAMED_SHARE
        cut = draw.randint(1, MOST_EVENTS) if draw.random() < CANCELLED_SHARE else None
        speculation = draw.choice(SPECULATIONS)
        began = time.monotonic()
        verdict = await check(self._asker, question, expected, speculation, stream, cut)
        tally = self._tally
        tally.outcomes[verdict.outcome.value] += 1
        tally.kinds[question.kind] += 1
        if verdict.outcome is RequestEnding.WRONG:
            tally.wrong.append(f"{speculation}, stream {stream}: {verdict.detail}"[:2000])
            print(f"WRONG {tally.wrong[-1]}", flush=True)
        if verdict.outcome is RequestEnding.FAILED:
            if tally.is_excused(began, time.monotonic()):
                tally.excused += 1
            else:
                tally.failures[f"{question.kind}: {verdict.detail}"[:300]] += 1
                print(f"FAILED {question.kind} {verdict.detail}", flush=True)
        if verdict.outcome in (RequestEnding.FAILED, RequestEnding.REFUSED):
            await asyncio.sleep(PAUSE_AFTER_FAILURE_S)

    def _report(self, seconds: float) -> int:
        tally = self._tally
        wrong, failed = tally.outcomes[RequestEnding.WRONG.value], tally.failures.total()
        left = sum(len(phase["left_over"]) for phase in self._phases)
        growths = [
            (pair["after"]["rss_mib"] / pair["before"]["rss_mib"], phase["phase"], name)
            for phase in self._phases[-1:]
            for name, pair in phase["services"].items()
        ]
        opened = [
            (pair["after"]["descriptors"] - pair["before"]["descriptors"], phase["phase"], name)
            for phase in self._phases[1:]
            for name, pair in phase["services"].items()
        ]
        most_rss, most_open = max(growths, default=(1.0, "", "")), max(opened, default=(0, "", ""))
        rows = [
            Row("answers as expected", tally.outcomes[RequestEnding.RIGHT.value], "requests"),
            Row(
                "cancelled streams, as expected so far",
                tally.outcomes[RequestEnding.CANCELLED.value],
                "requests",
            ),
            Row(
                "refused with 429 and Retry-After",
                tally.outcomes[RequestEnding.REFUSED.value],
                "requests",
            ),
            Row("failed while target or gateway was down", tally.excused, "requests"),
            Row("failed for no such reason", failed, "requests", more={"goal": 0}),
            Row("wrong answers", wrong, "requests", more={"goal": 0}),
            Row("faults", self._faults.total(), "faults", more={"faults": dict(self._faults)}),
            Row("left over after a phase", left, "entries", more={"goal": 0}),
            Row(
                "largest growth of memory in the last phase",
                most_rss[0],
                "×",
                more=_where(most_rss, RSS_GOAL),
            ),
            Row(
                "largest growth of open files in a phase",
                most_open[0],
                "files",
                more=_where(most_open, DESCRIPTORS_GOAL),
            ),
        ]
        options = self._options
        settings = {
            "device": options.stack.device,
            "minutes": options.minutes,
            "clients": options.clients,
            "pause_s": options.pause_s,
            "seed": options.seed,
            "questions": len(self._questions),
            "transport": options.stack.transport.value,
        }
        more = {
            "seconds": round(seconds, 1),
            "kinds": dict(tally.kinds),
            "failures": dict(tally.failures),
            "wrong": tally.wrong[:EXAMPLES],
            "peak_rss_mib": self._peaks,
            "rss_mib": self._memory,
            "phases": self._phases,
        }
        show_and_save(Result("soak", settings, rows, more), options.output)
        return int(bool(wrong or failed or left))


def _where(found: Sequence[Any], goal: float) -> dict[str, Any]:
    return {"phase": found[1], "service": found[2], "goal": goal}
