"""Runs the draft service: loads the draft, warms up, serves the service's address, and drains on SIGTERM."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import torch

from outrider.kernels.ahead import CompileWork
from outrider.services.draft.build import build_engine
from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.serving.ipc import IpcServer
from outrider.services.draft.serving.loop import DraftLoop
from outrider.services.draft.serving.protocol import DraftProtocol
from outrider.services.draft.serving.servicer import SERVICE_NAME, DraftServicer, register_draft
from outrider.services.draft.settings import DraftSettings, plan_threads
from outrider.services.draft.warmup import warm_up
from outrider.shared.base.errors import UnavailableError
from outrider.shared.base.lifecycle import DrainStep, StopSignal, run_steps
from outrider.shared.engine.current_device import use_device
from outrider.shared.engine.device_health import ending_if_lost
from outrider.shared.nn.checkpoint.tokenizer_file import tokenizer_fingerprint
from outrider.shared.obs.logging import configure_logging, get_logger
from outrider.shared.obs.open_tracer import open_tracer
from outrider.shared.rpc.address import IpcAddress, grpc_address
from outrider.shared.rpc.server import SyncServer, sync_server

MAX_WORKERS = 64
"""Number of threads of the gRPC server. Each target keeps two streams open, which occupy two threads. Short
calls need further threads."""

LOST_GRACE_S = 5
"""Seconds after which the process ends at the latest if its GPU cannot be used any more."""

log = get_logger("outrider.draft")


def run(settings: DraftSettings) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code.

    Raises:
        OutriderError: The settings or the checkpoint cannot be served. The message names the fix.
    """
    settings.check()
    configure_logging("draft", settings.log_level, settings.log_json)
    log.info("settings", **settings.for_log())
    settings.secure_process()
    lost = threading.Event()
    with StopSignal() as stop:

        def end(error: UnavailableError) -> None:
            log.critical("ending the process", error=error.message)
            lost.set()
            stop.set()

        service = DraftService(settings, ending_if_lost(settings.torch_device(), end))
        try:
            service.start()
            log.info("ready", listen=service.address, draft=service.engine.strategy.info.model_id)
            stop.wait()
        finally:
            if lost.is_set():  # a shutdown step may wait for the device forever
                signal.alarm(LOST_GRACE_S)
            service.stop()
    return 1 if lost.is_set() else 0


class DraftService:
    """A draft service that listens on one address. Call `start`, then `stop`.

    The service always serves gRPC. With an address such as ``ipc:///path``, it also listens on a unix socket
    for targets on this host.

    Args:
        settings: The resolved settings.
        on_error: Called with each unexpected error while the service runs.

    Raises:
        OutriderError: The draft's checkpoint cannot be served, or the address is in use.
    """

    def __init__(
        self, settings: DraftSettings, on_error: Callable[[Exception], None] = lambda error: None
    ) -> None:
        began_s = time.monotonic()
        self._settings = settings
        device = settings.torch_device()
        use_device(device)
        self.engine: DraftEngine = build_engine(settings, device, settings.torch_dtype(device))
        threads = plan_threads(settings, self.engine.strategy.info.hidden_size)
        if threads:
            torch.set_num_threads(threads)
        self.loop = DraftLoop(self.engine, on_error)
        self.engine.spans.tracer = open_tracer("draft", settings.otlp_endpoint, settings.trace_share)
        protocol = DraftProtocol(
            self.loop,
            device,
            _tokenizer(settings),
            tiles=not settings.disable_tile_trial,
            began_s=began_s,
        )
        ipc = IpcAddress.parse(settings.listen, "listen")
        self._ipc = IpcServer(ipc.streams, protocol) if ipc else None
        self._server: SyncServer = sync_server(
            grpc_address(settings.listen, "listen"),
            [(register_draft, DraftServicer(protocol))],
            [SERVICE_NAME],
            max_workers=MAX_WORKERS,
        )

    @property
    def address(self) -> str:
        """The address that the service listens on, with the actual port."""
        return self._settings.listen if self._ipc else self._server.address

    def start(self) -> None:
        """Warm up, then accept streams. The rest of the warm-up runs while no session is open."""
        further: list[CompileWork] = []
        if not self.engine.strategy.missing():
            tiles = not self._settings.disable_tile_trial
            further = warm_up(self.engine, self._settings.torch_device(), tiles=tiles)
        self.loop.start()
        self.loop.call(lambda: use_device(self._settings.torch_device()))
        self.loop.call(lambda: self.loop.later(*further))
        if self._ipc:
            self._ipc.start()
        self._server.start()
        self._server.set_serving(True)

    def stop(self) -> None:
        """Report not serving, join the engine, end the streams, and stop the server."""
        done = run_steps(
            [
                DrainStep("not serving", lambda: self._server.set_serving(False)),
                DrainStep("join the engine", self.loop.stop),
                DrainStep("hang up on this host's targets", self._hang_up),
                DrainStep("stop the server", lambda: self._server.stop(self._settings.drain_grace_s)),
                DrainStep("send the last spans", self.engine.spans.tracer.close),
            ]
        )
        log.info("stopped", clean=done)

    def _hang_up(self) -> None:
        if self._ipc:
            self._ipc.stop()


def _tokenizer(settings: DraftSettings) -> str:
    """Return the fingerprint of the draft's tokenizer, or of the target's if the draft has no tokenizer.

    The result is empty if neither the draft nor the target has a tokenizer.
    """
    prints = (
        tokenizer_fingerprint(folder)
        for folder in (settings.draft, settings.target_weights)
        if folder is not None
    )
    return next(filter(None, prints), "")
