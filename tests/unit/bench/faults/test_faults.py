"""The commands that disturb services: what counts as a wrong answer, a leak, a pause and a refusal."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.services.fake_openai import FakeServer

from outrider.bench.faults import leftovers, move, overload, soak, stall
from outrider.bench.faults.answers import AnswerPart, Asker, AskFailedError, RequestEnding, check
from outrider.bench.faults.processes import ProcessUsage, cpu_seconds, survivors, usage_of
from outrider.bench.faults.questions import CHAT, COMPLETIONS, GENERATE, Question, soak_questions
from outrider.bench.load.open_loop import Experience, LoadRequest, ask
from outrider.bench.load.rest import RestLoad
from outrider.bench.load.server import find_server
from outrider.gateway.v1 import gateway_pb2
from outrider.services.stack.options import StackOptions

QUESTION = Question("chat", CHAT, {})
EXPECTED: dict[int, AnswerPart] = {0: "hello", 1: (1, 2, 3)}


class ScriptedAsker:
    """Answers with the given parts, and then fails if there is an error."""

    def __init__(
        self, *parts: Mapping[int, AnswerPart], error: str = "", retry_after: str | None = None
    ) -> None:
        self._parts = parts
        self._error = error
        self._retry_after = retry_after

    async def whole(self, question: Question, speculation: Mapping[str, Any]) -> Mapping[int, AnswerPart]:
        if self._error:
            raise AskFailedError(self._error, retry_after=self._retry_after)
        return self._parts[-1]

    async def pieces(
        self, question: Question, speculation: Mapping[str, Any]
    ) -> AsyncGenerator[Mapping[int, AnswerPart], None]:
        for parts in self._parts:
            yield parts
        if self._error:
            raise AskFailedError(self._error, self._parts[-1])


def verdict(asker: ScriptedAsker, *, stream: bool = True, cancel_after: int | None = None) -> RequestEnding:
    found = check(asker, QUESTION, EXPECTED, {}, stream, cancel_after)  # type: ignore[arg-type]
    return asyncio.run(found).outcome


def test_an_answer_is_right_only_if_it_is_complete() -> None:
    whole = dict(EXPECTED)
    assert verdict(ScriptedAsker(whole), stream=False) is RequestEnding.RIGHT
    assert verdict(ScriptedAsker({0: "he"}, whole)) is RequestEnding.RIGHT
    assert verdict(ScriptedAsker({0: "he"})) is RequestEnding.WRONG
    assert verdict(ScriptedAsker({**whole, 2: "more"})) is RequestEnding.WRONG
    assert verdict(ScriptedAsker({0: "hello", 1: (1, 2, 4)}), stream=False) is RequestEnding.WRONG


def test_a_part_of_an_answer_must_be_its_beginning() -> None:
    right, wrong = {0: "hel", 1: (1, 2)}, {0: "hel", 1: (2,)}
    assert verdict(ScriptedAsker(right, EXPECTED), cancel_after=1) is RequestEnding.CANCELLED
    assert verdict(ScriptedAsker(wrong, EXPECTED), cancel_after=1) is RequestEnding.WRONG
    assert verdict(ScriptedAsker(right, error="503")) is RequestEnding.FAILED
    assert verdict(ScriptedAsker(wrong, error="503")) is RequestEnding.WRONG
    assert verdict(ScriptedAsker(error="503"), stream=False) is RequestEnding.FAILED
    refused = ScriptedAsker(error="429", retry_after="1")
    assert verdict(refused, stream=False) is RequestEnding.REFUSED


def test_the_requests_of_a_soak_are_the_same_every_time_and_differ_in_kind() -> None:
    questions = soak_questions(1000, 2048, 1)
    assert questions == soak_questions(1000, 2048, 1) != soak_questions(1000, 2048, 2)
    assert {one.path for one in questions} == {GENERATE, COMPLETIONS, CHAT}
    kinds = {one.kind for one in questions}
    assert kinds >= {"shared prefix", "schema", "penalties", "several answers", "stop"}
    short = soak_questions(1000, 350, 1)
    assert max(len(one.body.get("input_ids", ())) for one in short) == 300
    for one in questions:
        fields = one.body.get("sampling_params", one.body)
        assert fields["temperature"] == 0 or "seed" in fields


def test_streams_of_all_routes_are_read() -> None:
    server = FakeServer("outrider")
    try:

        async def read(question: Question) -> Mapping[int, AnswerPart]:
            asker = Asker(server.url)
            found = [dict(parts) async for parts in asker.pieces(question, {"mode": "off"})]
            await asker.close()
            return found[-1]

        completion = Question("text", COMPLETIONS, {"prompt": [1, 2], "max_tokens": 4})
        (text,) = asyncio.run(read(completion)).values()
        assert text
        assert server.seen[-1][1]["speculation"] == {"mode": "off"}
        server.refuse = lambda body: (503, {"error": {"message": "away"}})
        with pytest.raises(AskFailedError, match="503"):
            asyncio.run(read(completion))
    finally:
        server.close()


class ScriptedServer:
    """Answers `/metrics` and `/server_info` with one pair of texts after the other."""

    def __init__(self, *states: tuple[str, int]) -> None:
        self._states = list(states)
        self.flushed = 0

    async def post(self, path: str) -> None:
        self.flushed += 1

    async def get(self, path: str) -> Any:
        metrics, free = self._states[0]
        if path == "/metrics":
            return SimpleNamespace(is_success=True, text=metrics)
        if len(self._states) > 1:
            self._states.pop(0)
        info = {"internal_states": [{"kv_pages_total": 10, "kv_pages_free": free}]}
        return SimpleNamespace(is_success=True, json=lambda: info)


def test_what_is_left_over_is_named_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "POLL_S", 0.0)
    busy, idle = 'outrider_draft_sessions 2\noutrider_x_running{model="a"} 1\n', "outrider_draft_sessions 0\n"
    server = ScriptedServer((busy, 4), (idle, 4), (idle, 10))
    assert asyncio.run(leftovers.settle(server)) == {}  # type: ignore[arg-type]
    assert server.flushed == 1
    monkeypatch.setattr(leftovers, "SETTLE_S", 0.0)
    left = asyncio.run(leftovers.settle(ScriptedServer((busy, 4))))  # type: ignore[arg-type]
    assert left == {"outrider_draft_sessions": 2, 'outrider_x_running{model="a"}': 1, "pages not free": 6}
    counters = "outrider_draft_sessions_evicted_total 3\noutrider_num_requests_waiting_created 5\n"
    assert asyncio.run(leftovers.settle(ScriptedServer((counters, 10)))) == {}  # type: ignore[arg-type]


def test_only_processes_that_ran_all_the_time_are_compared() -> None:
    own = usage_of(os.getpid())
    assert own is not None
    assert own.rss_mib > 10
    assert own.descriptors >= 3
    assert usage_of(2**22 + 1) is None
    other = ProcessUsage((1, 2), 5.0, 3, 1)
    again = ProcessUsage((1, 3), 5.0, 3, 1)
    assert survivors({"a": own, "b": other, "c": other}, {"a": own, "b": again}) == {"a": (own, own)}


def test_the_time_of_all_threads_counts() -> None:
    before = cpu_seconds(os.getpid())
    worker = threading.Thread(target=lambda: sum(number * number for number in range(500_000)))
    worker.start()
    worker.join()
    running = threading.Event()
    threading.Thread(target=running.wait).start()
    assert cpu_seconds(os.getpid()) >= before
    own = time.process_time()
    assert 0 < cpu_seconds(os.getpid()) <= own + 1.0
    running.set()


def test_failures_are_excused_only_while_a_service_is_down() -> None:
    tally = soak.FaultTally(down=[[10.0, 12.0], [20.0, float("inf")]])
    assert [tally.is_excused(*times) for times in ((8, 9), (9, 10.5), (12.5, 15), (11, 30), (25, 26))] == [
        *(False, True, False, True, True)
    ]


def test_the_pause_of_a_stream_includes_the_wait_since_its_last_event() -> None:
    stream = move._Stream([1.0, 2.0, 2.5, 4.5, 5.0])
    assert stream.pause(2.6) == 2.0
    assert stream.pause(4.6) == 0.5
    assert stream.pause(6.0) == 0.0


def test_pauses_are_counted_if_they_overlap_and_not_between_two_streams() -> None:
    nan = math.nan
    arrivals = stall.Arrivals([[nan, 1.0, 1.5, 3.0, nan, 9.0], [nan, 2.0, 2.1]])
    assert arrivals.pauses(1.6, 2.05) == pytest.approx([1.5, 0.1])
    assert arrivals.pauses(4.0, 8.0) == []


def test_the_expensive_bodies_have_the_size_they_should() -> None:
    bodies = stall.expensive_bodies(10_000)
    for name, body in bodies.items():
        size = 1_000 if name.endswith("a tenth") else 40_000 if name.endswith("gRPC") else 10_000
        assert 0.6 * size < len(body.content) < 1.2 * size, name
    assert json.loads(bodies["numbers as messages"].content)["messages"][-1] == 1
    assert json.loads(bodies["digits in a chat"].content)["max_tokens"] == 1
    assert gateway_pb2.CompleteRequest.FromString(bodies["digits over gRPC"].content).text.startswith("1234")


def offer(count: int, first_token_s: float, refused: int = 0, retry_after_s: float | None = 1.0) -> Any:
    answered = [Experience(0.0, [first_token_s], 1.0, 5) for _ in range(count)]
    refusals = [Experience(0.0, [], 0.1, error="429", status=429, retry_after_s=retry_after_s)] * refused
    return overload.LoadResult(5.0, [*answered, *refusals], (10.0, 12.0), {"target": 100.0})


@pytest.mark.parametrize(("retry_after_s", "code"), [(1.0, 0), (None, 1)])
def test_the_report_of_an_overload_compares_the_loads(
    tmp_path: Path, retry_after_s: float | None, code: int
) -> None:
    file = tmp_path / "overload.json"
    options = overload.OverloadOptions(StackOptions(device="cpu"), 15, 5.0, [4], 1.0, 0, 0.1, file)
    offers = {
        "0.8": offer(8, 0.5),
        "1.5": offer(10, 2.0, 5, retry_after_s),
        "alone": offer(4, 0.5),
        "beside": offer(3, 0.6),
        "flood": offer(9, 2.0, 6),
    }
    assert overload._report(options, [4.0, 6.0, 5.0], offers, (2.0, 1.8)) == code
    written = json.loads(file.read_text())
    rows = {row["case"]: row for row in written["rows"]}
    assert rows["capacity"]["value"] == 5.0
    ratio = rows["first token, 1.5 × ÷ 0.8 × capacity, p99"]
    assert (ratio["value"], ratio["met"]) == (4.0, False)
    kept = rows["requests/s of a key within its limits, beside a flood ÷ alone"]
    assert (kept["value"], kept["met"]) == (0.75, False)
    closed = rows["requests/s of 2 clients, beside 60 of a limited key ÷ alone"]
    assert (closed["value"], closed["met"], closed["flood_share"]) == (0.9, True, 0.1)
    assert rows["refused with 429 at 1.5 × capacity"]["value"] == pytest.approx(1 / 3)
    assert rows["429 without Retry-After"]["value"] == (0 if code == 0 else 5)


def test_a_load_records_the_status_of_a_refusal() -> None:
    server = FakeServer()
    server.refuse = lambda body: (429, {"error": {"message": "full"}})
    try:

        async def refused() -> Experience:
            load = RestLoad(find_server(server.url, None), None)
            experience = await ask(load, LoadRequest([1, 2], 4, {"temperature": 0.0}, 0, {}))
            await load.close()
            return experience

        experience = asyncio.run(refused())
    finally:
        server.close()
    assert (experience.status, experience.retry_after_s) == (429, None)
    assert "full" in experience.error
