"""Starts two targets with one gateway, so that a command can kill one of the targets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx

from outrider.services.clients.health import TARGET_SERVICE, ServingProbe
from outrider.services.clients.rest import RestClient
from outrider.services.stack.launch import free_port, outrider_command
from outrider.services.stack.supervisor import ChildSpec, Echo, Supervisor
from outrider.shared.base.errors import UnavailableError

START_TIMEOUT_S = 600.0
POLL_S = 0.05
NAMES = ("a", "b")


class TwoTargets:
    """Two targets, each in one process with its draft, and a gateway. A target that dies is not restarted.

    Args:
        cleanup: Stops all processes when it is closed.
        folder: A private folder for the sockets.
        echo: Called with (service, line) for each line that a service prints.
        target: Folder of the target model.
        draft: Folder of the draft, or None.
        flags: Further flags of each target.
        gateway_flags: Further flags of the gateway.

    Attributes:
        url: REST address of the gateway.

    Raises:
        UnavailableError: A service stops while it starts, or is not ready in time.
    """

    def __init__(
        self,
        cleanup: ExitStack,
        folder: Path,
        echo: Echo,
        target: Path,
        draft: Path | None,
        flags: Sequence[Sequence[str]],
        gateway_flags: Sequence[str] = (),
    ) -> None:
        self._cleanup = cleanup
        self._echo = echo
        self._addresses = [f"unix:{folder / name}.sock" for name in NAMES]
        drafter = f"inproc:{draft}" if draft else "none"
        self._specs = [
            ChildSpec(
                f"target {name}",
                (
                    *(outrider_command(), "serve", "target", "--listen", address),
                    *("--model", str(target), "--draft", drafter, *own),
                ),
            )
            for name, address, own in zip(NAMES, self._addresses, flags, strict=True)
        ]
        self._targets = [self._start(spec) for spec in self._specs]
        for index in range(len(NAMES)):
            self.wait_serving(index)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        gateway = (
            *(outrider_command(), "serve", "gateway", "--port", str(port), "--tokenizer", str(target)),
            *("--target", ",".join(self._addresses), *gateway_flags),
        )
        self._gateway = self._start(ChildSpec("gateway", gateway))
        self.wait_ready(len(NAMES))

    def _start(self, spec: ChildSpec) -> Supervisor:
        return self._cleanup.enter_context(Supervisor([spec], self._echo))

    def process_id(self, index: int) -> int:
        """Return the id of a target's process.

        Raises:
            UnavailableError: The target is down.
        """
        process = self._targets[index].children[0].process_id
        if process is None:
            raise UnavailableError(f"target {NAMES[index]} has ended.")
        return process

    def start_again(self, index: int) -> None:
        """Start a killed target, and wait until the gateway uses it."""
        self._targets[index] = self._start(self._specs[index])
        self.wait_serving(index)
        self.wait_ready(len(NAMES))

    def wait_serving(self, index: int) -> None:
        """Wait until a target serves."""
        with ServingProbe(self._addresses[index], TARGET_SERVICE) as probe:
            self._wait(probe.serving, f"target {NAMES[index]} does not serve")

    def wait_ready(self, count: int) -> None:
        """Wait until the gateway can use this many targets."""

        def ready() -> bool:
            with RestClient(self.url) as client:
                found = client.status("/status.json")[1].get("targets", ())
            return sum(bool(one["ready"]) for one in found) == count

        self._wait(ready, f"the gateway does not see {count} targets")

    def metric(self, part: str) -> float:
        """Return the sum of the gateway's metrics whose names contain a text."""
        metrics = httpx.get(f"{self.url}/status.json", timeout=30.0, trust_env=False).json()["metrics"]
        return float(sum(value for name, value in metrics.items() if part in name))

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        ends = time.monotonic() + START_TIMEOUT_S
        while not condition():
            if time.monotonic() > ends:
                raise UnavailableError(f"{what} after {START_TIMEOUT_S:g} s.")
            for one in [*getattr(self, "_targets", ()), *filter(None, [getattr(self, "_gateway", None)])]:
                if (failed := one.failed()) and failed.exit_code not in (None, -9):
                    raise UnavailableError(f"{what}: {failed.spec.name} ended: {failed.last_lines[-1:]}")
            time.sleep(POLL_S)
