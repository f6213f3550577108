"""Starts the services as real processes: `outrider up` (`supervised`), or one by one (`separate`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.common.v1 import common_pb2
from outrider.services.stack.launch import free_port
from outrider.shared.rpc import address as addresses
from outrider.target.v1 import target_pb2, target_pb2_grpc
from support.services.gateway_client import Client

ROOT = Path(__file__).resolve().parents[3]
DEMO_TARGET = ROOT / "models" / "demo" / "target"
DEMO_HEAD = ROOT / "models" / "demo" / "eagle3"
START_TIMEOUT_S = 90
POLL_S, ASK_S = 0.02, 0.5
"""Seconds between two looks at the draft's state, and between two requests while the draft is not ready."""
# Tests with clients of other projects run in an environment of their own and name that of the server.
OUTRIDER = (os.environ.get("OUTRIDER_PYTHON", sys.executable), "-m", "outrider.services.cli")

PROMPTS = (
    "List 3 countries and their capitals.",
    "What is the capital of France?",
    "Explain why the sky is blue.",
    "What is 17 plus 25?",
    "Write a Python function that adds two numbers.",
    "How many centimetres are in 3 metres?",
)


def health_changes(address: str, service: str = "") -> Iterator[int]:
    """Yield the serving statuses that a health Watch reports. The Watch reconnects until the caller stops."""
    while True:
        with grpc.insecure_channel(
            address,
            options=[("grpc.max_reconnect_backoff_ms", 50), ("grpc.initial_reconnect_backoff_ms", 50)],
        ) as channel:
            try:
                for reply in health_pb2_grpc.HealthStub(channel).Watch(
                    health_pb2.HealthCheckRequest(service=service), wait_for_ready=True
                ):
                    yield reply.status
            except grpc.RpcError:
                yield health_pb2.HealthCheckResponse.UNKNOWN


class Process:
    """A running command that writes its output to a file. `stop` kills its whole process group."""

    def __init__(
        self,
        *arguments: str,
        log: Path,
        environment: dict[str, str] | None = None,
        command: Sequence[str] = OUTRIDER,
    ) -> None:
        self.arguments = arguments
        self._log = log
        self._output = log.open("ab")
        self.popen = subprocess.Popen(
            [*command, *arguments],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | (environment or {}),
        )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_serving(self, address: str, service: str = "") -> None:
        """Block until the health service reports SERVING. Fail as soon as the process exits."""
        deadline = threading.Timer(START_TIMEOUT_S, self.popen.kill)
        deadline.start()
        watcher = threading.Thread(target=lambda: (self.popen.wait(), deadline.cancel()), daemon=True)
        watcher.start()
        try:
            with grpc.insecure_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                while self.popen.poll() is None:
                    with contextlib.suppress(grpc.RpcError):
                        for reply in stub.Watch(
                            health_pb2.HealthCheckRequest(service=service), wait_for_ready=True, timeout=5
                        ):
                            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                                return
        finally:
            deadline.cancel()
        raise AssertionError(
            f"outrider {' '.join(self.arguments)} ended with {self.popen.returncode}:\n{self.output[-4000:]}"
        )

    def stop(self, timeout_s: float = 30) -> int:
        """Send SIGTERM, and return the exit code."""
        if self.popen.poll() is None:
            self.popen.terminate()
        try:
            return self.popen.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
            self._output.close()


class Stack:
    """A running gateway, target and draft.

    Args:
        processes: Processes to stop on `close`, in this order.
        grpc_address: Address of the gateway's gRPC API.
        target_address: gRPC address of the target.
        draft_address: gRPC address of the draft; empty if it runs in the target's process.
        http_port: Port of the REST API.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        *,
        grpc_address: str,
        target_address: str,
        draft_address: str,
        http_port: int,
    ) -> None:
        self.processes = processes
        self.grpc_address = grpc_address
        self.target_address = target_address
        self.draft_address = draft_address
        self.base_url = f"http://127.0.0.1:{http_port}"
        self.client = Client(grpc_address)
        self._target_channel = grpc.insecure_channel(target_address)
        self.target = target_pb2_grpc.TargetStub(self._target_channel)

    def stats(self) -> target_pb2.GetStatsReply:
        reply: target_pb2.GetStatsReply = self.target.GetStats(target_pb2.GetStatsRequest(), timeout=10)
        return reply

    def wait_drafting(self, timeout_s: float) -> float:
        """Wait until a request is served with drafts, and return the time taken. Fail after `timeout_s`.

        Requests are sent when the target's draft is ready, and otherwise seldom, because each one takes
        processor time that the services need to start.
        """
        started, asks_at, pause = time.monotonic(), 0.0, threading.Event()
        while (elapsed := time.monotonic() - started) < timeout_s:
            if self.stats().draft_state != "on" and elapsed < asks_at:
                pause.wait(POLL_S)
                continue
            asks_at = elapsed + ASK_S
            result = self.client.chat(
                PROMPTS[0], mode=common_pb2.SPECULATION_MODE_ON, max_tokens=8, trace=True
            )
            if any(len(one.nodes) > 1 for one in result.rounds):
                return time.monotonic() - started
        raise AssertionError(f"not drafting after {elapsed:.2f} s; draft state {self.stats().draft_state}")

    def assert_no_page_held(self, timeout_s: float = 5) -> None:
        """Check that no sequence holds KV pages any more.

        The check polls, because pages are freed up to two steps or 250 ms after the last answer is sent.
        """
        deadline, pause = time.monotonic() + timeout_s, threading.Event()
        stats = self.stats()
        while stats.pages_held and time.monotonic() < deadline:
            pause.wait(POLL_S)
            stats = self.stats()
        assert stats.pages_held == 0
        assert stats.pages_free == stats.pages_total

    def close(self) -> None:
        self.client.channel.close()
        self._target_channel.close()
        for process in self.processes:
            process.stop()


@contextlib.contextmanager
def supervised(
    *arguments: str, device: str = "cpu", until: Callable[[Stack], object] | None = None
) -> Iterator[Stack]:
    """Run `outrider up`, by default on the embedded pair.

    Args:
        arguments: Further flags.
        device: Device of the services.
        until: Waits until the stack is ready. None waits until a chat is served with drafts.

    Yields:
        The running stack.
    """
    folder = Path(tempfile.mkdtemp(prefix="outrider-"))
    port = free_port()
    up = Process("up", "--device", device, "--port", str(port), *arguments, log=folder / "up.log")
    try:
        grpc_address = f"127.0.0.1:{port + 1}"
        up.wait_serving(grpc_address)
        target_address = child_argument(child_pid(up.popen.pid, "target"), "--listen")
        draft_address = ""
        with contextlib.suppress(ProcessLookupError):  # no draft process: it runs in the target's process
            draft_address = addresses.grpc_address(
                child_argument(child_pid(up.popen.pid, "draft"), "--listen"), "--listen"
            )
        stack = Stack(
            [up],
            grpc_address=grpc_address,
            target_address=target_address,
            draft_address=draft_address,
            http_port=port,
        )
        if until is not None:
            until(stack)
        else:
            stack.wait_drafting(START_TIMEOUT_S)
        yield stack
    except BaseException:
        print(up.output[-8000:])
        raise
    finally:
        up.stop()


@contextlib.contextmanager
def separate(
    *,
    head: Path = DEMO_HEAD,
    scheme: str = "unix:",
    reach_draft: Callable[[str, str], contextlib.AbstractContextManager[object]] | None = None,
) -> Iterator[Stack]:
    """Run the three services as separate, unsupervised processes.

    Args:
        head: Folder of the draft head.
        scheme: Scheme of the address at which the target reaches the draft: ``unix:`` (gRPC) or ``ipc://``.
        reach_draft: Starts a proxy between target and draft. It is called with the address on which the proxy
            listens and the draft's own address.

    Yields:
        The running stack.
    """
    folder = Path(tempfile.mkdtemp(prefix="outrider-"))
    draft_address, target_address = f"unix:{folder}/draft.sock", f"unix:{folder}/target.sock"
    port = free_port()
    device = ("--device", "cpu")
    with contextlib.ExitStack() as cleanup:

        def start(service: str, *arguments: str) -> Process:
            process = Process("serve", service, *arguments, log=folder / f"{service}.log")
            cleanup.callback(process.stop)
            return process

        reached = f"{scheme}{folder}/draft.sock"
        weights = ("--draft", str(head), "--target-weights", str(DEMO_TARGET))
        draft = start("draft", "--listen", reached, *weights, *device)
        if reach_draft is not None:
            draft.wait_serving(draft_address)  # a proxy may not survive a target that finds no draft
            reached = f"{scheme}{folder}/between.sock"
            cleanup.enter_context(reach_draft(reached, draft_address))
        target = start(
            "target",
            "--listen",
            target_address,
            "--model",
            str(DEMO_TARGET),
            "--draft",
            reached,
            *device,
        )
        ports = ("--port", str(port), "--grpc-port", str(port + 1))
        gateway = start("gateway", *ports, "--target", target_address, "--tokenizer", str(DEMO_TARGET))
        gateway_address = f"127.0.0.1:{port + 1}"
        for process, address in (
            (draft, draft_address),
            (target, target_address),
            (gateway, gateway_address),
        ):
            process.wait_serving(address)
        yield Stack(
            [gateway, target, draft],
            grpc_address=gateway_address,
            target_address=target_address,
            draft_address=draft_address,
            http_port=port,
        )


def child_pid(parent: int, service: str) -> int:
    """Return the id of the `outrider serve SERVICE` process that is a child of `parent` and serves.

    A standby process does not serve. Its standard input is a pipe.
    """
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().decode().split("\0")
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                if (
                    "serve" in command
                    and service in command
                    and int(status[1]) == parent
                    and status[0] != "Z"
                    and not os.readlink(entry / "fd" / "0").startswith("pipe:")
                ):
                    return int(entry.name)
    raise ProcessLookupError(service)


def child_pids(parent: int, word: str) -> list[int]:
    """Return the ids of running children of `parent` whose command line contains `word`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(status[1]) == parent and status[0] != "Z" and word in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
    return found


def child_argument(pid: int, flag: str) -> str:
    """Return the value of a flag on a process's command line."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return command[command.index(flag) + 1]


class TokenCounter:
    """Counts the tokens of all streams. Calls `action` once, when the count reaches `threshold`."""

    def __init__(self, threshold: int, action: Callable[[], None]) -> None:
        self._threshold = threshold
        self._action = action
        self._count = 0
        self._lock = threading.Lock()
        self.acted = False

    def __call__(self, tokens: int) -> None:
        with self._lock:
            self._count += tokens
            if self._count < self._threshold or self.acted:
                return
            self.acted = True
        self._action()


def assert_ranks_serve(first: Process, second: Process, address: str, num_tokens: int) -> None:
    """Check that two ranks serve a request together, and exit with 0 when the first one receives SIGTERM."""
    try:
        first.wait_serving(address, "outrider.target.v1.Target")
        with grpc.insecure_channel(address) as channel:
            request = target_pb2.GenerateRequest(
                request_id="a", prompt_ids=[1, 2, 3], max_new_tokens=num_tokens, ignore_eos=True
            )
            replies = list(target_pb2_grpc.TargetStub(channel).Generate(request, timeout=60))
        assert sum(len(reply.delta.token_ids) for reply in replies) == num_tokens
        first.popen.terminate()
        assert first.popen.wait(30) == 0
        assert second.popen.wait(30) == 0
    finally:
        first.stop()
        second.stop()
