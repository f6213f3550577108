"""`outrider bench move`: kills one of two targets that serve streams, and measures the streams' pause.

Every stream first runs undisturbed, to record the expected tokens. In each round of the benchmark, all
streams run at the same time. When all of them have tokens, one target gets SIGKILL. Its streams continue on
the other target, which first computes their prompts and their emitted tokens again.

To time this computation alone, the command then sends new prompts of the same lengths to the remaining
target. The number and the speculation modes of the streams that run meanwhile are the same as before.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench.faults.answers import Asker, AskFailedError
from outrider.bench.faults.questions import GENERATE, Question
from outrider.bench.faults.two_targets import TwoTargets
from outrider.bench.measure.clock import percentile
from outrider.bench.report.record import Result, Row, show_and_save
from outrider.services.stack.private_folder import private_folder
from outrider.services.stack.start_bar import StartBar
from outrider.shared.base.errors import UnavailableError
from outrider.shared.obs.progress import Progress

FIRST_ID, VOCAB = 10, 1000
MODES = ("on", "auto", "off")
BEGUN_EVENTS = 4
"""Number of events that each stream must have had before the target is killed."""
PAUSE_GOAL_S = 1.0
AT_ONCE = 4
PERCENTILES = (50, 90, 99, 100)
PARTS = 3
"""Parts of a round for the progress bar: streams, prefills, and a start of the target."""


@dataclass(frozen=True, slots=True)
class MoveOptions:
    """Options of `outrider bench move`. Most fields are its flags.

    Attributes:
        target, draft: Folders of the models. The draft runs in the target's process; None disables it.
        devices: Devices of the two targets.
        streams, rounds: Number of streams at the same time, and number of kills.
        prompt, new: Number of tokens of each prompt and of each answer.
        flags: Further flags of both targets.
        seed: Seed of the prompts.
        output: The JSON file for the result.
    """

    target: Path
    draft: Path | None
    devices: Sequence[str]
    streams: int
    rounds: int
    prompt: int
    new: int
    flags: Sequence[str]
    seed: int
    output: Path


@dataclass(slots=True)
class _Stream:
    """The received events of one stream: the time of each event, and the tokens."""

    arrivals: list[float]
    tokens: tuple[int, ...] = ()

    def pause(self, moment: float) -> float:
        """Return the longest time between two events at or after a moment. 0 if the stream has ended."""
        later = [one for one in self.arrivals if one > moment]
        if not later:
            return 0.0
        last = [one for one in self.arrivals if one <= moment][-1:]
        return max(second - first for first, second in zip([*last, *later], later, strict=False))


@dataclass(frozen=True, slots=True)
class _KillFigures:
    """Figures of one kill of a target. Times are in seconds.

    Attributes:
        moved: Number of streams that continued on the other target.
        pauses: Longest pause of each moved stream after the kill.
        others: Longest pause of each other stream after the kill.
        prefills: Times to the first token of new prompts with the lengths of the moved streams.
        wrong: Number of streams whose tokens differ from those of the undisturbed run.
    """

    moved: int
    pauses: list[float]
    others: list[float]
    prefills: list[float]
    wrong: int

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {
            "moved": self.moved,
            "pauses_s": [round(one, 4) for one in self.pauses],
            "pauses_of_others_s": [round(one, 4) for one in self.others],
            "prefills_s": [round(one, 4) for one in self.prefills],
            "wrong": self.wrong,
        }


def run_move(options: MoveOptions) -> int:
    """Run `outrider bench move`: kill a target in each round, print the table and save the result.

    Returns:
        The exit code: 1 if a stream got wrong tokens, otherwise 0.

    Raises:
        UnavailableError: A service does not start, or a stream fails.
    """
    log: deque[str] = deque(maxlen=40)
    bar = StartBar()

    def echo(name: str, line: str) -> None:
        log.append(f"{name} | {line}")
        bar.hear(name, line)

    try:
        with ExitStack() as cleanup:
            folder = cleanup.enter_context(private_folder())
            with bar:
                two = TwoTargets(
                    cleanup,
                    folder,
                    echo,
                    options.target,
                    options.draft,
                    [
                        # Each target has room for all streams, so that moved streams need not wait.
                        ("--device", device, "--max-running-requests", str(options.streams), *options.flags)
                        for device in options.devices
                    ],
                )
            return _report(options, asyncio.run(_measure(options, two)))
    except Exception:
        print(*log, sep="\n", file=sys.stderr)
        raise


async def _measure(options: MoveOptions, two: TwoTargets) -> list[_KillFigures]:
    asker = Asker(two.url)
    questions = _questions(options)
    limit = asyncio.Semaphore(AT_ONCE)

    async def alone(index: int, progress: Progress) -> tuple[int, ...]:
        async with limit:
            stream = await _stream(asker, questions[index], _mode(index), _Stream([]))
            progress.advance()
            return stream.tokens

    try:
        with Progress("recording the right tokens", options.streams) as progress:
            expected = await asyncio.gather(*(alone(index, progress) for index in range(options.streams)))
        rounds = []
        with Progress("move", options.rounds * PARTS, counts=False) as progress:
            for number in range(options.rounds):
                rounds.append(await _kill_one(options, two, asker, questions, expected, number, progress))
                await asyncio.to_thread(two.start_again, number % 2)
        return rounds
    finally:
        await asker.close()


async def _kill_one(
    options: MoveOptions,
    two: TwoTargets,
    asker: Asker,
    questions: Sequence[Question],
    expected: Sequence[tuple[int, ...]],
    number: int,
    progress: Progress,
) -> _KillFigures:
    step = f"kill {number + 1} of {options.rounds}"
    progress.tell(PARTS * number, step=f"{step}, streams")
    moved_before = await asyncio.to_thread(two.metric, "moved_sequences")
    streams = [_Stream([]) for _ in questions]
    tasks = [
        asyncio.create_task(_stream(asker, question, _mode(number), stream))
        for number, (question, stream) in enumerate(zip(questions, streams, strict=True))
    ]
    try:
        await _begun(streams, tasks)
        emitted = [len(one.tokens) for one in streams]
        os.kill(two.process_id(number % 2), signal.SIGKILL)
        killed = time.perf_counter()
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    moved = int(await asyncio.to_thread(two.metric, "moved_sequences") - moved_before)
    # The gateway does not tell a client that its stream has moved. The moved streams pause the longest.
    pauses = sorted((one.pause(killed) for one in streams), reverse=True)
    wrong = sum(one.tokens != tokens for one, tokens in zip(streams, expected, strict=True))
    progress.advance(step=f"{step}, prompts of the same lengths")
    prefills = await _prefills(options, asker, moved, int(statistics.mean(emitted)))
    progress.advance(step=f"{step}, the target starts again")
    return _KillFigures(moved, pauses[:moved], pauses[moved:], prefills, wrong)


async def _begun(streams: Sequence[_Stream], tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Return when every stream has tokens.

    Raises:
        UnavailableError: A stream has ended before.
    """
    while any(len(one.arrivals) < BEGUN_EVENTS for one in streams):
        for task in tasks:
            if task.done():
                task.result()
        if any(task.done() for task in tasks):
            raise UnavailableError(
                "A stream has ended before all streams had tokens. Raise --new-tokens.", field="--new-tokens"
            )
        await asyncio.sleep(0.001)


async def _prefills(options: MoveOptions, asker: Asker, moved: int, emitted: int) -> list[float]:
    """Return the times to the first token of new prompts, beside the streams that the target had."""
    draw = random.Random(f"{options.seed} again")
    beside = [_question(draw, options.prompt, options.new) for _ in range(options.streams - moved)]
    streams = [_Stream([]) for _ in beside]
    tasks = [
        asyncio.create_task(_stream(asker, question, _mode(number), stream))
        for number, (question, stream) in enumerate(zip(beside, streams, strict=True))
    ]
    if streams:
        await _begun(streams, tasks)

    async def first_token(number: int) -> float:
        question = _question(draw, options.prompt + emitted, options.new - emitted)
        began, stream = time.perf_counter(), _Stream([])
        await _stream(asker, question, _mode(number), stream)
        return stream.arrivals[0] - began

    found = list(await asyncio.gather(*(first_token(number) for number in range(moved))))
    await asyncio.gather(*tasks)
    return found


async def _stream(asker: Asker, question: Question, mode: str, stream: _Stream) -> _Stream:
    """Read a stream to its end.

    Raises:
        UnavailableError: The stream failed.
    """
    try:
        async with aclosing(asker.pieces(question, {"mode": mode})) as pieces:
            async for parts in pieces:
                stream.arrivals.append(time.perf_counter())
                stream.tokens = tuple(parts[0])  # type: ignore[arg-type]
    except AskFailedError as error:
        raise UnavailableError(f"A stream failed: {error}") from None
    return stream


def _mode(index: int) -> str:
    return MODES[index % len(MODES)]


def _questions(options: MoveOptions) -> list[Question]:
    draw = random.Random(options.seed)
    return [
        _question(draw, options.prompt, options.new, 0.0 if index % 2 else 0.8, index)
        for index in range(options.streams)
    ]


def _question(
    draw: random.Random, prompt: int, new: int, temperature: float = 0.0, seed: int = 0
) -> Question:
    ids = [draw.randrange(FIRST_ID, VOCAB) for _ in range(prompt)]
    sampling = {"temperature": temperature, "seed": seed, "max_new_tokens": new, "ignore_eos": True}
    return Question("move", GENERATE, {"input_ids": ids, "sampling_params": sampling})


def _report(options: MoveOptions, rounds: Sequence[_KillFigures]) -> int:
    pauses = [one for each in rounds for one in each.pauses]
    if not pauses:
        raise UnavailableError("No stream ran on the killed target. Raise --streams.", field="--streams")
    others = [one for each in rounds for one in each.others]
    prefills = [one for each in rounds for one in each.prefills]
    beyond = max(max(each.pauses) - max(each.prefills) for each in rounds if each.pauses)
    wrong = sum(each.wrong for each in rounds)
    rows = [
        Row("streams with wrong tokens", wrong, "streams", more=_goal(wrong, 0)),
        Row("moved streams", len(pauses), "streams"),
        *(_times("pause of the moved streams", pauses)),
        *(_times("prefill of prompts of the same lengths", prefills)),
        Row("longest pause − longest prefill", beyond, "s", more=_goal(beyond, PAUSE_GOAL_S)),
        *(_times("pause of the other streams", others) if others else ()),
    ]
    settings = {
        "device": options.devices[0],
        "devices": list(options.devices),
        "streams": options.streams,
        "rounds": options.rounds,
        "prompt_tokens": options.prompt,
        "new_tokens": options.new,
        "flags": list(options.flags),
        "seed": options.seed,
    }
    more: Mapping[str, Any] = {"kills": [one.as_json() for one in rounds]}
    show_and_save(Result("move", settings, rows, more), options.output, shown=("goal", "met"))
    return int(bool(wrong))


def _times(name: str, seconds: Sequence[float]) -> list[Row]:
    return [
        Row(f"{name}, {'longest' if percent == 100 else f'p{percent}'}", percentile(seconds, percent), "s")
        for percent in PERCENTILES
    ]


def _goal(value: float, goal: float) -> dict[str, Any]:
    return {"goal": goal, "goal_is": "at most", "met": value <= goal}
