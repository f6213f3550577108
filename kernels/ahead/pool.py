"""Worker processes that compile kernels into Triton's cache, and the hook that finds missing kernels."""

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

from outrider.kernels.ahead.types import Compiled
from outrider.kernels.ahead.worker import restored

MOST_PROCESSES = 16
IDLE_S = 15.0
COMPILE_S = 120.0
"""Longest compile time of one Triton kernel, in seconds. Most kernels take a third of a second. After this
time, the worker process is killed, and the kernel is compiled when it is launched."""
WORKER = "outrider.kernels.ahead.worker"

_log = logging.getLogger("outrider.kernels")

Kernel = tuple[str, str, str]
"""Identity of a kernel: its module, its name, and Triton's key of the argument types and constants."""


class CompilerPool:
    """Compiles each submitted Triton kernel once, in worker processes.

    A worker process ends after `IDLE_S` seconds without work, or when the pool's own process ends.

    Attributes:
        submitted: Number of kernels submitted so far, excluding kernels dropped by `wait`.
        compiled: Number of submitted kernels that were compiled.
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
        """Context manager that skips this thread's kernel launches and submits missing kernels to the pool.

        A kernel is missing if it is not in Triton's cache. Launches of cached kernels are skipped too,
        because their input may be the output of a skipped kernel. Other threads launch kernels as usual.

        Args:
            meets: Function to use as Triton's `jit_cache_hook` on this thread. With None, the hook submits
                each missing kernel for compilation.
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
        """Wait until all submitted kernels are done, no worker process is left, or the time limit is reached.

        When the wait ends, compilations that have started continue, and all other kernels are dropped.

        Args:
            since: An earlier value of `submitted`. Kernels submitted before that moment are not counted.
            tell: Progress callback, called with the number of compiled kernels and the total.
            limit_s: Longest wait in seconds.
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
            # Drop the kernels that no worker has started.
            with contextlib.suppress(Empty):
                while True:
                    *_, kernel = self._jobs.get_nowait()
                    self.submitted -= 1
                    if kernel is not None:
                        self._known.discard(kernel)

    def state_of(self, work: Callable[[], object]) -> Compiled:
        """Rehearse work to find out whether the kernels of the work are compiled. Submit no kernels."""
        met: set[Compiled] = set()

        def look(*, fn: Any, compile: dict[str, Any], **_more: Any) -> bool | None:
            if self._is_kept(fn, compile):
                return None
            met.add(Compiled.NO if _kernel(fn, compile) in self._refused else Compiled.NOT_YET)
            return True  # stops Triton from compiling the kernel

        with self.instead_of_launches(look):
            work()
        return next((state for state in (Compiled.NOT_YET, Compiled.NO) if state in met), Compiled.YES)

    def submit(self, name: str, job: str, kernel: Kernel | None = None) -> None:
        """Queue a kernel for compilation. `job` is the JSON line that the worker process reads."""
        with self._changed:
            self.submitted += 1
            self._jobs.put((name, job, kernel))
            self._add_thread()

    def _add_thread(self) -> None:
        """Start a thread for the queued kernels unless there are enough. The lock must be held."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) < min(MOST_PROCESSES, len(os.sched_getaffinity(0))):
            thread = threading.Thread(target=self._work, name="compile-kernels", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _missing(self, *, fn: Any, compile: dict[str, Any], **_more: Any) -> bool | None:
        """Submit a kernel unless it is cached.

        This method is a `jit_cache_hook`. The result True stops Triton from compiling the kernel.
        """
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
        """Return whether a kernel is in Triton's cache on disk."""
        target, data = driver.active.get_current_target(), compile["specialization_data"]
        backend = make_backend(target)
        options = backend.parse_options(restored(json.loads(data)["options"]))
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        key = get_cache_key(source, backend, options, get_cache_invalidating_env_vars())
        name = f"{source.name[:150]}.json"
        return name in (get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name) or {})

    def _work(self) -> None:
        """Run one worker process and feed it jobs until the queue stays empty or the process ends.

        The thread stops counting as a worker before it waits for the end of its process. Otherwise, a kernel
        that is submitted during this wait would stay in the queue without a worker.
        """
        command, variables, pipe = (
            [sys.executable, "-m", WORKER],
            {**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # compiling needs no GPU and must not occupy one
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
                (name, job, kernel), answer = self._next_job(), ""
                limit = threading.Timer(COMPILE_S, process.kill)
                limit.start()
                try:
                    process.stdin.write(job + "\n")
                    process.stdin.flush()
                    answer = process.stdout.readline().strip()
                finally:
                    limit.cancel()
                    self._note(name, kernel, answer)

    def _next_job(self) -> tuple[str, str, Kernel | None]:
        """Wait for a job.

        Raises:
            Empty: There was none for `IDLE_S` seconds. The thread no longer counts as a worker.
        """
        try:
            return self._jobs.get(timeout=IDLE_S)
        except Empty:
            with self._changed:
                with contextlib.suppress(Empty):
                    return self._jobs.get_nowait()
                self._threads.remove(threading.current_thread())
            raise

    def _note(self, name: str, kernel: Kernel | None, answer: str) -> None:
        with self._changed:
            self._done += 1
            self.compiled += answer == "compiled"
            if kernel is not None and answer != "compiled":
                self._refused.add(kernel)
            if not answer and threading.current_thread() in self._threads:
                self._threads.remove(threading.current_thread())
                if not self._jobs.empty():
                    self._add_thread()
            self._changed.notify_all()
        if answer != "compiled":
            _log.warning(
                "%s will be compiled when it is launched: %s", name, answer or "its compiler process ended"
            )


def _kernel(fn: Any, compile: dict[str, Any]) -> Kernel:
    return fn.module, fn.name, str(compile["key"])
