"""The pool of processes that compile kernels: every wait for the pool ends, and unstarted work is dropped."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from triton import knobs

from outrider.kernels import ahead
from outrider.kernels.ahead import pool as compiler_pool
from outrider.kernels.ahead.late import log_late_compilations
from outrider.kernels.ahead.pool import CompilerPool

WAIT_S = 30.0


def test_kernels_that_nobody_began_in_time_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_pool, "MOST_PROCESSES", 0)
    pool, stop = CompilerPool(), threading.Event()
    busy = threading.Thread(target=stop.wait, daemon=True)
    busy.start()
    pool._threads = [busy]
    for job in "abc":
        pool.submit(job, job)
    pool.wait(0, limit_s=0.0)
    assert pool.submitted == 0
    pool.wait(pool.submitted)  # must not wait for the dropped kernels
    stop.set()
    busy.join()


def test_waiting_for_kernels_has_an_end() -> None:
    pool, stop = CompilerPool(), threading.Event()
    busy = threading.Thread(target=stop.wait, daemon=True)
    busy.start()
    pool.submitted, pool._threads = 1, [busy]
    started = time.monotonic()
    pool.wait(0, limit_s=0.1)
    assert 0.1 <= time.monotonic() - started < 30.0
    assert busy.is_alive()
    stop.set()
    busy.join()


class FakeProcess:
    """A compiler process that answers every job, and ends only when it is let go."""

    let_go = threading.Event()
    ending = threading.Event()
    answer = "compiled"

    def __init__(self, *_: object, **__: object) -> None:
        self.stdin = SimpleNamespace(write=lambda job: None, flush=lambda: None)
        self.stdout = SimpleNamespace(readline=lambda: self.answer)
        self.kill = lambda: None

    def __enter__(self) -> FakeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self.let_go.wait(WAIT_S)


@pytest.mark.parametrize("answer", ["compiled", ""], ids=["idle", "killed"])
def test_a_kernel_is_compiled_although_it_comes_while_the_only_process_ends(
    monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    class Process(FakeProcess):
        let_go, ending = threading.Event(), threading.Event()

    Process.answer = answer
    monkeypatch.setattr(compiler_pool, "MOST_PROCESSES", 1)
    monkeypatch.setattr(compiler_pool, "IDLE_S", 0.01)
    monkeypatch.setattr(compiler_pool.subprocess, "Popen", Process)
    pool = CompilerPool()
    pool.submit("first", "{}")
    assert Process.ending.wait(WAIT_S)
    assert not Process.let_go.is_set(), "the first process still ends"
    pool.submit("second", "{}")
    pool.wait(0, limit_s=WAIT_S)
    assert (pool.submitted, pool._done) == (2, 2)
    Process.let_go.set()


def test_a_kernel_that_is_compiled_at_its_launch_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(knobs.compilation, "listener", None)
    log_late_compilations()
    listener = knobs.compilation.listener
    assert listener is not None
    caplog.set_level(logging.INFO, "outrider.kernels")
    times = knobs.CompileTimes(1_000, [("ttir", 9_000), ("cubin", 400_000)], 10_000)
    for name, cached in (("_norm", False), ("_merge", True)):
        kernel = SimpleNamespace(arg_names=["x", "BLOCK", "SPLIT"])
        source: Any = SimpleNamespace(name=name, fn=kernel, constants={(1,): 64, (2,): False})
        listener(src=source, metadata={}, metadata_group={}, times=times, cache_hit=cached)
    assert caplog.messages == [
        "kernel _norm was compiled when it was launched, in 0.42 s, with BLOCK=64, SPLIT=False"
    ]


def test_other_threads_do_not_rehearse(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(ahead, "_rehearsing", threading.get_ident())
    other = threading.Thread(target=lambda: seen.append(ahead.rehearsing()))
    other.start()
    other.join()
    assert (ahead.rehearsing(), seen) == (True, [False])
