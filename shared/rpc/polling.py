"""Makes gRPC's waiting threads watch the sockets themselves, and busy-poll while they expect a message.

By default, the threads of grpcio's event engine watch the sockets, and wake the waiting Python thread. On a
virtual machine, waking a sleeping core takes 150 µs. In all services, the waiting thread therefore watches
the sockets itself (`watch_sockets`). Between target and draft, it does not sleep while a message is expected
within milliseconds (`PollWindow`). The polling loop is C code that does not hold the GIL.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.ipc.frames import MANY_CORES

EXPERIMENTS = "GRPC_EXPERIMENTS"
WITHOUT_EVENT_ENGINE = "-event_engine_client,-event_engine_listener,-event_engine_callback_cq"
SLEEP_MS = 200
"""Longest sleep within a wait before grpcio checks for signals. This value is grpcio's own."""
AWAKE_MS = -10
"""Sleep period that makes a wait poll. A negative period puts the end of each sleep in the past.

With the value 0, the wait would sleep, because grpcio rounds the end of the sleep up to the next millisecond.
"""
LIBRARY = "grpc._cython.cygrpc"

log = get_logger("outrider.rpc")


def watch_sockets() -> None:
    """Make waiting threads watch the sockets.

    Call this before any module imports grpc. Does nothing on a host with few cores.
    """
    if (os.cpu_count() or 1) < MANY_CORES or EXPERIMENTS in os.environ:
        return
    if LIBRARY in sys.modules:
        log.warning(
            "gRPC was imported before its waiting threads could be set to watch the sockets: "
            "each message takes some 0.2 ms longer"
        )
        return
    os.environ[EXPERIMENTS] = WITHOUT_EVENT_ENGINE


class PollWindow:
    """Decides whether this process's waits for messages poll or sleep.

    Waits sleep unless `expect` has announced a message. A wait that is already running keeps its mode
    (polling or sleeping) until its next event.

    Args:
        enabled: True if waits may poll. With None, waits may poll if the host has enough cores and the
            waiting threads watch the sockets themselves.
    """

    def __init__(self, enabled: bool | None = None) -> None:
        if enabled is None:
            enabled = (
                os.environ.get(EXPERIMENTS) == WITHOUT_EVENT_ENGINE and (os.cpu_count() or 1) >= MANY_CORES
            )
        self.enabled = enabled
        self._period = _period_of_library() if enabled else None
        self._until = 0.0

    def expect(self, seconds: float) -> None:
        """Make waits that begin within the next `seconds` poll, because a message is due.

        May be called from any thread.
        """
        self._until = time.monotonic() + seconds

    def rest(self) -> None:
        """Make waits sleep again, because no message is due. May be called from any thread."""
        self._until = 0.0
        self.begin()  # grpcio's period is global to the process, so unrelated threads would keep polling too

    def begin(self) -> None:
        """Set grpcio's period for the next wait. Called by a thread that is about to wait for messages."""
        if self._period is not None:
            self._period.value = AWAKE_MS if time.monotonic() < self._until else SLEEP_MS


def give_way() -> None:
    """Yield the GIL and the core to other threads while busy-waiting.

    `time.sleep(0)` would sleep for 50 µs or more.
    """
    os.sched_yield()


def _period_of_library() -> ctypes.c_int | None:
    """Return grpcio's sleep period in milliseconds, as a mutable C int.

    grpcio's extension module exports this variable to other extension modules. Return None if this version of
    grpcio does not.
    """
    exported = getattr(sys.modules.get(LIBRARY), "__pyx_capi__", {}).get("g_interrupt_check_period_ms")
    if exported is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    try:
        return ctypes.c_int.from_address(pointer(exported, b"int"))
    except ValueError:  # the variable has another type in this version
        return None
