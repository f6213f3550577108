"""Processes that compile kernels into Triton's cache, and the hook by which Triton tells what it would compile."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import ASTSource, make_backend
from triton.runtime import JITFunction
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.driver import driver

from outrider.kernels.ahead import Compiled
from outrider.kernels.ahead.worker import restored

MOST_PROCESSES = 16
IDLE_S = 15.0
COMPILE_S = 120.0
"""Longest time for one kernel (most take a third of a second): then its process is ended, and the kernel is left to who launches it."""
WORKER = "outrider.kernels.ahead.worker"

_log = logging.getLogger("outrider.kernels")

Kernel = tuple[str, str, str]
"""Its module and name, and Triton's key of what it was called with."""


class CompilerPool:
    """Compiles what it is given, each kernel once, in processes that end when nothing has come for a while, or with this process.

    Attributes:
        submitted: Kernels that were missing so far, without those that were forgotten.
        compiled: Those of them that were compiled.
    """

    def __init__(self) -> None:
        self.submitted = 0
        self.compiled = 0
        self._jobs: SimpleQueue[tuple[str, str, Kernel | None]] = SimpleQueue()
        self._known: set[Kernel] = set()
        self._refused: set[Kernel] = set()
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._done = 0

    @contextlib.contextmanager
    def instead_of_launches(self, meets: Callable[..., bool | None] | None = None) -> Iterator[None]:
        """Launch nothing inside the block; kernels that are not in Triton's cache are compiled here.

        Kernels that are compiled already are left out, too: what they would read may be what one that was left out should have written.
        Other threads launch theirs as ever.

        Args:
            meets: The `jit_cache_hook` of this thread; None = the one that has missing kernels compiled.
        """
        met = meets or self._missing
        before, run, own = knobs.runtime.jit_cache_hook, JITFunction.run, threading.get_ident()

        def only_compile(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return run(function, *args, grid=grid, warmup=warmup or threading.get_ident() == own, **options)

        def missing(**kernel: Any) -> bool | None:
            if threading.get_ident() == own:
                return met(**kernel)
            return before(**kernel) if before is not None else None

        knobs.runtime.jit_cache_hook = missing
        JITFunction.run = only_compile
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = before
            JITFunction.run = run

    def wait(
        self, since: int, tell: Callable[[int, int], None] | None = None, limit_s: float = math.inf
    ) -> None:
        """Wait until all that was submitted is compiled, or nobody is left to do it, or the time is up.

        What was not begun by then is forgotten: who submits later does not wait for it. What was begun goes on.

        Args:
            since: Kernels that were submitted before those that `tell` shall hear of.
            tell: Hears how many kernels of how many are compiled.
            limit_s: Wait no longer.
        """
        told, until = 0, time.monotonic() + limit_s
        with self._changed:
            while (
                self._done < self.submitted
                and time.monotonic() < until
                and any(thread.is_alive() for thread in self._threads)
            ):
                self._changed.wait(0.5)
                done = max(0, self._done - since)
                if tell is not None and done > told:
                    told = done
                    tell(done, self.submitted - since)
            with contextlib.suppress(Empty):
                while True:
                    *_, kernel = self._jobs.get_nowait()
                    self.submitted -= 1
                    if kernel is not None:
                        self._known.discard(kernel)

    def state_of(self, work: Callable[[], object]) -> Compiled:
        """Rehearse work to see whether its kernels are compiled; nothing is submitted."""
        met: set[Compiled] = set()

        def look(*, fn: Any, compile: dict[str, Any], **_more: Any) -> bool | None:
            if self._is_kept(fn, compile):
                return None
            met.add(Compiled.NO if _kernel(fn, compile) in self._refused else Compiled.NOT_YET)
            return True

        with self.instead_of_launches(look):
            work()
        return next((state for state in (Compiled.NOT_YET, Compiled.NO) if state in met), Compiled.YES)

    def submit(self, name: str, job: str, kernel: Kernel | None = None) -> None:
        """Compile a kernel that `worker` takes as one line."""
        self.submitted += 1
        self._jobs.put((name, job, kernel))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) < min(MOST_PROCESSES, len(os.sched_getaffinity(0))):
            thread = threading.Thread(target=self._work, name="compile-kernels", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _missing(self, *, fn: Any, compile: dict[str, Any], **_more: Any) -> bool | None:
        """Say whether Triton shall leave a kernel alone: it is on its way. A `jit_cache_hook`."""
        kernel = _kernel(fn, compile)
        if kernel in self._known:
            return True
        if self._is_kept(fn, compile):
            return None
        self._known.add(kernel)
        target = driver.active.get_current_target()
        job = {
            "module": fn.module, "name": fn.name, "target": [target.backend, target.arch, target.warp_size],
            "data": compile["specialization_data"],
        }  # fmt: skip
        self.submit(fn.name, json.dumps(job), kernel)
        return True

    @staticmethod
    def _is_kept(fn: Any, compile: dict[str, Any]) -> bool:
        """Whether a kernel is in Triton's cache on the disk."""
        target, data = driver.active.get_current_target(), compile["specialization_data"]
        backend = make_backend(target)
        options = backend.parse_options(restored(json.loads(data)["options"]))
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        key = get_cache_key(source, backend, options, get_cache_invalidating_env_vars())
        name = f"{source.name[:150]}.json"
        return name in (get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name) or {})

    def _work(self) -> None:
        """Feed one process until nothing more comes, or it is gone."""
        command, variables, pipe = (
            [sys.executable, "-m", WORKER],
            {**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            subprocess.PIPE,
        )
        with (
            contextlib.suppress(OSError, Empty),
            subprocess.Popen(
                command, env=variables, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
            ) as process,
        ):
            assert process.stdin is not None
            assert process.stdout is not None
            answer = "compiled"
            while answer:
                (name, job, kernel), answer = self._jobs.get(timeout=IDLE_S), ""
                limit = threading.Timer(COMPILE_S, process.kill)
                limit.start()
                try:
                    process.stdin.write(job + "\n")
                    process.stdin.flush()
                    answer = process.stdout.readline().strip()
                finally:
                    limit.cancel()
                    self._note(name, kernel, answer)

    def _note(self, name: str, kernel: Kernel | None, answer: str) -> None:
        with self._changed:
            self._done += 1
            self.compiled += answer == "compiled"
            if kernel is not None and answer != "compiled":
                self._refused.add(kernel)
            self._changed.notify_all()
        if answer != "compiled":
            _log.warning(
                "%s is compiled when it is launched: %s", name, answer or "the process that compiled it ended"
            )


def _kernel(fn: Any, compile: dict[str, Any]) -> Kernel:
    return fn.module, fn.name, str(compile["key"])
