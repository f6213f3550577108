"""`outrider bench stall`: sends request bodies that are slow to parse, and measures pauses of other streams.

The bodies are malformed lists, objects with very many fields, very long texts over REST and gRPC, and large
requests to the routes for tokens. If the gateway parsed such a body on its event loop, all streams would stop
meanwhile.

Other programs on the machine also cause pauses. The command therefore also measures the CPU time that the
gateway needs for each body, without its time for the streams: for all threads, and for the main thread. The
event loop runs in the main thread, so a body stops the streams for at most the time of the main thread.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

from outrider.bench.faults.processes import cpu_seconds, main_thread_seconds
from outrider.bench.faults.questions import CHAT, COMPLETIONS, GENERATE
from outrider.bench.measure.clock import percentile
from outrider.bench.report.record import Result, Row, show_and_save
from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from outrider.services.stack.options import StackOptions
from outrider.services.stack.started_services import started_services
from outrider.shared.base.errors import UnavailableError
from outrider.shared.obs.progress import Progress

GOAL_S = 0.05
TIMEOUT_S = 60.0
STREAM_TOKENS = 1000
AFTER_S = 0.2
"""Seconds after an answer in which a pause still counts for its body."""
TELL_S = 2.0
"""Seconds between two updates of the progress while the streams run undisturbed."""
MIB = 1 << 20
GRPC_SHARE = 4
"""Size of the texts that are sent over gRPC, divided by the size of the bodies for REST."""
NAMES_WITHIN_LIMIT, VALUES_WITHIN_LIMIT = 16_300, 39_900
"""Numbers of field names, and of values in arguments, just below the limits of the gateway."""
JSON = {"content-type": "application/json"}
REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)
COMPLETE = f"/{gateway_pb2.DESCRIPTOR.services_by_name['Inference'].full_name}/Complete"


@dataclass(frozen=True, slots=True)
class StallOptions:
    """Options of `outrider bench stall`. Most fields are its flags.

    Attributes:
        stack: The stack of services to start.
        streams: Number of streams whose pauses are measured.
        repeats: Number of times that each body is sent.
        quiet_s: Seconds for which the streams run while no body is sent, for comparison.
        output: The JSON file for the result.
    """

    stack: StackOptions
    streams: int
    repeats: int
    quiet_s: float
    output: Path


@dataclass(frozen=True, slots=True)
class Body:
    """One expensive request.

    Attributes:
        path: The route of REST, or `COMPLETE` for a call over gRPC.
        content: The JSON body, or the serialised message.
    """

    path: str
    content: bytes


def expensive_bodies(size: int = MIB) -> dict[str, Body]:
    """Return the bodies by name.

    A body for REST has about `size` bytes, or a tenth of this size if its name says so. A message for gRPC
    has `GRPC_SHARE` times this size.
    """

    def filled(path: str, before: str, element: str, after: str, share: float = 1.0) -> Body:
        count = max(1, int(size * share) // (len(element) + 1))
        return Body(path, f"{before}{','.join([element] * count)}{after}".encode())

    def text(path: str, before: str, after: str, part: str, share: float = 1.0) -> Body:
        count = max(1, int(size * share) // len(part))
        return Body(path, f"{before}{part * count}{after}".encode())

    def complete(part: str) -> Body:
        request = gateway_pb2.CompleteRequest(text=part * (GRPC_SHARE * size // len(part)))
        return Body(COMPLETE, request.SerializeToString())

    chat = ('{"messages":[{"role":"user","content":"', '"}],"max_tokens":1}')
    many = ",".join(f'"field{number}":1' for number in range(max(1, size // 20)))

    def fields(before: str, field: str, after: str, count: int, escaped: bool = False) -> Body:
        made = ",".join(field.format(number) for number in range(max(1, count)))
        return Body(CHAT, (before + (json.dumps(made)[1:-1] if escaped else made) + after).encode())

    user = '{"messages":[{"role":"user","content":"a"}'
    tool = user + '],"max_tokens":1,"tools":[{"type":"function","function":{"name":"f","parameters":{'
    call = ',{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":'
    properties = (tool + '"properties":{', '"p{}":{{}}', "}}}}]}")
    biases = (user + '],"max_tokens":1,"logit_bias":{', '"{}":1', "}}")
    options = (user + '],"chat_template_kwargs":{', '"{}":1', "}}")
    arguments = (user + call + '"{', '"{}":1', '}"}}]}],"max_tokens":1}')
    return {
        "floats as prompt": filled(COMPLETIONS, '{"prompt":[', "1.5", "]}"),
        "numbers as messages": filled(CHAT, '{"messages":[', "1", "]}"),
        "numbers as messages, a tenth": filled(CHAT, '{"messages":[', "1", "]}", 0.1),
        "nulls as token ids": filled(GENERATE, '{"input_ids":[', "null", "]}"),
        "texts as token ids": filled("/detokenize", '{"tokens":[', '"a"', "]}"),
        "unknown fields": Body(COMPLETIONS, ('{"prompt":"a",' + many + "}").encode()),
        "stop strings": filled(COMPLETIONS, '{"prompt":"a","stop":[', '"a"', "]}"),
        "nested lists": Body(COMPLETIONS, b'{"prompt":' + b"[" * (size // 2) + b"]" * (size // 2) + b"}"),
        "properties of a tool": fields(*properties, size // 15),
        "properties of a tool, most allowed": fields(*properties, min(size // 15, NAMES_WITHIN_LIMIT)),
        "numbers in a tool": filled(CHAT, tool + '"enum":[', "1", "]}}}]}"),
        "logit bias": fields(*biases, size // 11),
        "logit bias, most allowed": fields(*biases, min(size // 11, NAMES_WITHIN_LIMIT)),
        "template variables": fields(*options, size // 11),
        "template variables, most allowed": fields(*options, min(size // 11, NAMES_WITHIN_LIMIT)),
        "arguments of a call": fields(*arguments, size // 13, escaped=True),
        "arguments of a call, most allowed": fields(
            *arguments, min(size // 13, VALUES_WITHIN_LIMIT), escaped=True
        ),
        "words in a chat": text(CHAT, *chat, "word and word "),
        "words in a chat, a tenth": text(CHAT, *chat, "word and word ", 0.1),
        "digits in a chat": text(CHAT, *chat, "1234567890"),
        "digits to tokenize": text("/tokenize", '{"prompt":"', '"}', "1234567890"),
        "token ids to detokenize": filled("/detokenize", '{"tokens":[', "77", "]}"),
        "token ids as prompt": filled(GENERATE, '{"input_ids":[', "77", "]}"),
        "words over gRPC": complete("word and word "),
        "digits over gRPC": complete("1234567890"),
    }


@dataclass(slots=True)
class Arrivals:
    """Arrival times of the events of all streams, one list for each client.

    A client starts a new stream when its stream ends. NaN separates the times of two streams.
    """

    streams: list[list[float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def pauses(self, begin: float, end: float) -> list[float]:
        """Return the times between two events of a stream, as far as they overlap an interval, in seconds."""
        return [
            second - first
            for stream in self.streams
            for first, second in itertools.pairwise(tuple(stream))
            if first < end and second > begin  # never true for NaN
        ]


def run_stall(options: StallOptions) -> int:
    """Run `outrider bench stall`: send all request bodies, print the table and save the result.

    Returns:
        The exit code: 1 if a body was answered with a status of 500 or above, otherwise 0.

    Raises:
        ConfigurationError: The stack cannot be started.
        UnavailableError: A stream failed.
    """
    with started_services(options.stack) as stack:
        gateway = stack.supervisor.child("gateway").process_id
        assert gateway is not None
        return _measure(options, stack.url, f"127.0.0.1:{options.stack.grpc}", gateway)


def _wait(seconds: float, progress: Progress) -> None:
    """Sleep, and show the time left every `TELL_S` seconds."""
    began = time.monotonic()
    while (left_s := began + seconds - time.monotonic()) > 0:
        time.sleep(min(TELL_S, left_s))
        progress.tell(min(seconds, time.monotonic() - began))


def _measure(options: StallOptions, url: str, grpc_address: str, gateway: int) -> int:
    rows, statuses = [], {}
    with _streams(url, options.streams) as arrivals:
        began, ran, main = time.perf_counter(), cpu_seconds(gateway), main_thread_seconds(gateway)
        # A thread that redraws a bar would disturb the streams, whose clients are in this process.
        with Progress("streams without a body", options.quiet_s, counts=False, still=True) as progress:
            quiet = _window(arrivals, partial(_wait, options.quiet_s, progress))
        share = (cpu_seconds(gateway) - ran) / (time.perf_counter() - began)
        main_share = (main_thread_seconds(gateway) - main) / (time.perf_counter() - began)
        rows += [
            Row("pause without a body, p99", percentile(quiet, 99), "s"),
            Row("pause without a body, longest", max(quiet), "s"),
        ]
        longest: list[tuple[float, str]] = []
        busiest: list[tuple[float, str]] = []
        main_busiest: list[tuple[float, str]] = []
        bodies = expensive_bodies()
        with Progress("stall", len(bodies), still=True) as progress:
            for number, (name, body) in enumerate(bodies.items()):
                progress.tell(number, step=name)
                answers: list[tuple[int, float]] = []
                pauses: list[float] = []
                began, ran, main = time.perf_counter(), cpu_seconds(gateway), main_thread_seconds(gateway)
                for _ in range(options.repeats):
                    send = partial(_call, grpc_address) if body.path == COMPLETE else partial(_post, url)
                    pauses += _window(arrivals, partial(_answer, send, body, answers))
                statuses[name] = sorted({status for status, _ in answers})
                seconds = time.perf_counter() - began
                cpu_s = max(0.0, (cpu_seconds(gateway) - ran - share * seconds) / options.repeats)
                main_s = main_thread_seconds(gateway) - main - main_share * seconds
                main_s = max(0.0, main_s / options.repeats)
                worst = max(pauses)
                longest.append((worst, name))
                busiest.append((cpu_s, name))
                main_busiest.append((main_s, name))
                more = {
                    "status": statuses[name],
                    "answer_s": round(max(seconds for _, seconds in answers), 4),
                    "gateway_cpu_s": round(cpu_s, 4),
                    "main_thread_s": round(main_s, 4),
                }
                rows.append(Row(f"pause beside: {name}", worst, "s", more={**more, **_goal(worst)}))
    worst, name = max(longest)
    rows.append(Row("longest pause beside a body", worst, "s", more={"body": name, **_goal(worst)}))
    worst, name = max(busiest)
    row = Row("longest run of the gateway for a body", worst, "s", more={"body": name, **_goal(worst)})
    rows.append(row)
    worst, name = max(main_busiest)
    row = Row("longest run of its main thread for a body", worst, "s", more={"body": name, **_goal(worst)})
    rows.append(row)
    settings = {
        "device": options.stack.device,
        "streams": options.streams,
        "repeats": options.repeats,
        "transport": options.stack.transport.value,
    }
    show_and_save(
        Result("stall", settings, rows),
        options.output,
        shown=("status", "gateway_cpu_s", "main_thread_s", "goal", "met"),
    )
    return int(any(status >= 500 for found in statuses.values() for status in found))


def _window(arrivals: Arrivals, action: Callable[[], object]) -> list[float]:
    """Return the pauses of the streams during an action and shortly after.

    Raises:
        UnavailableError: A stream has failed.
    """
    began = time.perf_counter()
    action()
    time.sleep(AFTER_S)
    ended = time.perf_counter()
    while not arrivals.failures and not all(stream[-1] >= ended for stream in arrivals.streams):
        if time.perf_counter() - ended > TIMEOUT_S:
            raise UnavailableError(f"A stream has paused for {TIMEOUT_S:g} s.")
        time.sleep(0.01)
    if arrivals.failures:
        raise UnavailableError(f"A stream failed: {arrivals.failures[0]}")
    return arrivals.pauses(began, ended)


@contextlib.contextmanager
def _streams(url: str, count: int) -> Iterator[Arrivals]:
    """Keep streams running. Each one has a thread of its own, so that sending a body does not delay it."""
    arrivals, stop = Arrivals([[] for _ in range(count)]), threading.Event()

    def read(number: int) -> None:
        try:
            while not stop.is_set():
                _follow(url, number, arrivals.streams[number], stop)
        except Exception as error:  # reported by `_window`
            arrivals.failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        while any(len(stream) < 2 for stream in arrivals.streams) and not arrivals.failures:
            time.sleep(0.01)
        yield arrivals
    finally:
        stop.set()
        for thread in threads:
            thread.join(TIMEOUT_S)


def _follow(url: str, number: int, times: list[float], stop: threading.Event) -> None:
    """Read one stream to its end. The pause before its first event belongs to its prefill and is left out."""
    sampling = {"max_new_tokens": STREAM_TOKENS, "ignore_eos": True, "temperature": 0.0}
    request: Mapping[str, Any] = {
        "input_ids": [10 + number] * 4,
        "sampling_params": sampling,
        "speculation": {"mode": "off"},
        "stream": True,
    }
    connection = _connect(url)
    try:
        connection.request("POST", GENERATE, json.dumps(request), JSON)
        reply = connection.getresponse()
        if reply.status != 200:
            raise UnavailableError(f"{reply.status}: {reply.read(300)!r}")
        times.append(math.nan)
        while (line := reply.readline()) and not stop.is_set():
            if not line.startswith(b"data: {"):
                continue
            if line.startswith(b'data: {"error'):
                raise UnavailableError(line.decode(errors="replace")[:300])
            times.append(time.perf_counter())
    finally:
        connection.close()


def _answer(send: Callable[[Body], int], body: Body, answers: list[tuple[int, float]]) -> None:
    began = time.perf_counter()
    status = send(body)
    answers.append((status, time.perf_counter() - began))


def _post(url: str, body: Body) -> int:
    """Send a body over REST. Return the status of the answer; 0 if the connection broke."""
    connection = _connect(url)
    try:
        connection.request("POST", body.path, body.content, JSON)
        reply = connection.getresponse()
        reply.read()
        return reply.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _call(address: str, body: Body) -> int:
    """Send a message over gRPC. Return the status of REST that corresponds to the status of the call."""
    with grpc.insecure_channel(address) as channel:
        try:
            stub = gateway_pb2_grpc.InferenceStub(channel)
            for _ in stub.Complete(gateway_pb2.CompleteRequest.FromString(body.content), timeout=TIMEOUT_S):
                pass
        except grpc.RpcError as error:
            return 400 if error.code() in REFUSED else 500
    return 200


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)


def _goal(seconds: float) -> dict[str, Any]:
    return {"goal": GOAL_S, "goal_is": "at most", "met": seconds <= GOAL_S}
