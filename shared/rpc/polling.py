"""How the threads of gRPC wait for messages.

By default grpcio leaves the sockets to threads of its event engine, which wake whoever waits in Python. Waking a core that sleeps takes
as long as a small kernel, on a virtual machine 150 µs. Between target and draft the one who waits therefore watches the sockets itself,
and while a message is due within milliseconds it does not sleep at all: it asks again and again, in C, without holding the interpreter.
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
"""How long grpcio's waits sleep before they look whether a signal arrived; grpcio's own number."""
AWAKE_MS = -10
"""A wait until a moment that is past asks once and does not sleep. (Until now would be rounded up to the next millisecond.)"""
LIBRARY = "grpc._cython.cygrpc"

log = get_logger("outrider.rpc")


def watch_sockets() -> None:
    """Have waiting threads watch the sockets. Call it before anything imports grpc; where cores are few nothing changes."""
    if (os.cpu_count() or 1) < MANY_CORES or EXPERIMENTS in os.environ:
        return
    if LIBRARY in sys.modules:
        log.warning(
            "gRPC was imported before it could be told that waits watch the sockets: each message takes some 0.2 ms longer"
        )
        return
    os.environ[EXPERIMENTS] = WITHOUT_EVENT_ENGINE


class PollWindow:
    """When the waits of this process poll instead of sleeping. A wait keeps to what it began with, until its next event.

    One that expects nothing keeps waits asleep.

    Args:
        enabled: None: where waiting threads watch the sockets (otherwise polling is in vain) and there are cores to spare.
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
        """A message is due: waits that begin within so many seconds poll. Any thread."""
        self._until = time.monotonic() + seconds

    def rest(self) -> None:
        """No message is due any more. Any thread."""
        self._until = 0.0
        self.begin()  # the number is the process's: threads that have nothing to do with this would poll too

    def begin(self) -> None:
        """Called by a thread that is about to wait for messages."""
        if self._period is not None:
            self._period.value = AWAKE_MS if time.monotonic() < self._until else SLEEP_MS


def give_way() -> None:
    """Let other threads have the interpreter and the core, between two looks at the clock. (`time.sleep(0)` sleeps: for 50 µs and more.)"""
    os.sched_yield()


def _period_of_library() -> ctypes.c_int | None:
    """Return grpcio's number of milliseconds between two looks, which its extension exports to other extensions; None if it does not."""
    exported = getattr(sys.modules.get(LIBRARY), "__pyx_capi__", {}).get("g_interrupt_check_period_ms")
    if exported is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    try:
        return ctypes.c_int.from_address(pointer(exported, b"int"))
    except ValueError:  # of another type by now
        return None
