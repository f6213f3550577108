"""Kills services that run but no longer answer, or whose socket file is gone, so that they are restarted."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from outrider.services.stack.supervisor import Child, Supervisor

PROBE_INTERVAL_S = 2.0
HUNG_AFTER_S = 30.0

Probe = Callable[[], bool]
"""Function that returns True if a service gives any answer. Must return within a few seconds."""


@dataclass(slots=True)
class _Record:
    """The probe results of one run of a child process.

    Attributes:
        starts: Number of the run, counted from 1.
        answered: True once the child has answered a probe in this run. Before that, the child is starting,
            which may take minutes.
        silent_since: Time of the first failed probe since the last answer. None if the last probe succeeded.
    """

    starts: int = 0
    answered: bool = False
    silent_since: float | None = None


@dataclass(frozen=True, slots=True)
class Socket:
    """The socket on which a child listens.

    Attributes:
        path: File of the socket.
        client: Name of the child that connects to the socket.
    """

    path: Path
    client: str


class Liveness:
    """Context manager that probes child processes on its own thread, and kills children that stop answering.

    Create this object when all children have become ready.

    Args:
        supervisor: The supervisor that started the children. It restarts a killed child.
        probes: Name of a child → the child's probe.
        sockets: Name of a child → the unix socket on which the child listens. See `service_sockets`.
        hung_after_s: Time without an answer, in seconds, after which a child is killed.
        interval_s: Time between two probes of a child, in seconds.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        probes: Mapping[str, Probe],
        sockets: Mapping[str, Socket] | None = None,
        hung_after_s: float = HUNG_AFTER_S,
        interval_s: float = PROBE_INTERVAL_S,
    ) -> None:
        self._children = [(supervisor.child(name), probe, _Record()) for name, probe in probes.items()]
        self._sockets = dict(sockets or {})
        self._client_starts = {
            name: supervisor.child(one.client).starts for name, one in self._sockets.items()
        }
        self._ready_starts = {name: supervisor.child(name).starts for name in self._sockets}
        self._supervisor = supervisor
        self._hung_after_s = hung_after_s
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)

    def __enter__(self) -> Liveness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        # The first probe is not delayed, because the stack has just become ready.
        while not self._stopping.is_set():
            for child, probe, record in self._children:
                self._check(child, probe, record)
                if socket := self._sockets.get(child.spec.name):
                    self._check_socket(child, socket, record)
            self._stopping.wait(self._interval_s)

    def _check_socket(self, child: Child, socket: Socket, record: _Record) -> None:
        """Kill a child process whose unix socket was deleted, if its client (a service) was restarted.

        Deleting a socket does not break existing connections. The child is therefore left alone until its
        client has restarted.
        """
        name = child.spec.name
        starts = self._supervisor.child(socket.client).starts
        if starts == self._client_starts[name]:
            return
        self._client_starts[name] = starts
        # The first run of each child is ready even if the socket was deleted before the first probe.
        ready = record.answered or record.starts == self._ready_starts[name]
        if ready and not socket.path.exists():
            record.answered = False
            child.kill_hung(record.starts, f"its socket {socket.path} is gone; killed")

    def _check(self, child: Child, probe: Probe, record: _Record) -> None:
        starts = child.starts
        if starts != record.starts:
            record.starts, record.answered, record.silent_since = starts, False, None
        if probe():
            record.answered, record.silent_since = True, None
            return
        now = time.monotonic()
        if not record.answered or self._stopping.is_set():
            return
        if record.silent_since is None:
            record.silent_since = now
        elif now - record.silent_since >= self._hung_after_s:
            record.answered = False
            child.kill_hung(starts, f"has not answered for {now - record.silent_since:.0f} s; killed")


def service_probes(
    url: str,
    target_address: str,
    draft_address: str | None,
    cleanup: ExitStack,
    verify: Callable[[], ssl.SSLContext | bool] = lambda: False,
) -> dict[str, Probe]:
    """Return a probe for each service of a stack. A draining service also passes the probe if it answers.

    Args:
        url: REST address of the gateway.
        target_address: gRPC address of the target.
        draft_address: Address of the draft. None if the draft has no process of its own.
        cleanup: Exit stack that closes the connections of the probes.
        verify: Function that returns the TLS parameter for connecting to the gateway:
            `own_certificate.probe_context`.
    """
    from outrider.services.clients.health import DRAFT_SERVICE, TARGET_SERVICE, ServingProbe
    from outrider.services.clients.rest import RestClient
    from outrider.shared.rpc.address import grpc_address

    lasting = None if verify() else cleanup.enter_context(RestClient(url, verify=False))

    def gateway_answers() -> bool:
        if lasting is not None:
            return lasting.status("/health")[0] != 0
        # The certificate of a client may have been renewed.
        with RestClient(url, verify=verify()) as gateway:
            return gateway.status("/health")[0] != 0

    target = cleanup.enter_context(ServingProbe(target_address, TARGET_SERVICE))
    probes: dict[str, Probe] = {
        "gateway": gateway_answers,
        "target": target.answers,
    }
    if draft_address:
        address = grpc_address(draft_address, "draft")
        probes["draft"] = cleanup.enter_context(ServingProbe(address, DRAFT_SERVICE)).answers
    return probes


def service_sockets(target_address: str, draft_address: str | None) -> dict[str, Socket]:
    """Return the unix sockets on which the target and the draft listen, by service name.

    A service with a TCP address has no such socket, and is left out.

    Args:
        target_address: gRPC address of the target.
        draft_address: Address of the draft. None if the draft has no process of its own.
    """
    from outrider.shared.rpc.address import grpc_address

    addresses = {"target": (target_address, "gateway")}
    if draft_address:
        addresses["draft"] = (grpc_address(draft_address, "draft"), "target")
    return {
        name: Socket(Path(address.removeprefix("unix:")), client)
        for name, (address, client) in addresses.items()
        if address.startswith("unix:")
    }
