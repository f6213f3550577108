"""Deferred release of GPU memory on a thread of its own, so that dropping the last reference never blocks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from outrider.shared.rpc.ipc import cuda_blob_mailbox
from outrider.shared.rpc.ipc import deferred_release as module
from outrider.shared.rpc.ipc.blob_mailbox import BlobLayout
from outrider.shared.rpc.ipc.cuda import CudaError, PeerMemory
from outrider.shared.rpc.ipc.cuda_blob_mailbox import RELEASED, StreamMailbox
from outrider.shared.rpc.ipc.deferred_release import DeferredRelease
from outrider.shared.rpc.ipc.doorbells import Doorbells, DoorbellWatchdog, Side
from outrider.shared.rpc.ipc.slots import SharedMemory

TIMEOUT_S = 20.0


class Owner:
    """An object whose last reference the tests drop."""


class Mapped(PeerMemory):
    """Memory that pretends to be mapped from a peer."""

    def __init__(self) -> None:
        self.pointer = 0
        self.unmapped = threading.Event()

    def close(self) -> None:
        self.unmapped.set()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event that holds up a release until the test has seen that it does not block."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_dropping_the_last_reference_does_not_wait(gate: threading.Event) -> None:
    disposal, began, done = DeferredRelease(), threading.Event(), threading.Event()

    def free() -> None:
        began.set()
        assert gate.wait(TIMEOUT_S)
        done.set()

    owner = Owner()
    disposal.when_gone(owner, free)
    assert not began.wait(0.05), "there is still a reference"
    del owner
    assert began.wait(TIMEOUT_S)
    assert not done.is_set(), "this thread did not wait for the release"
    gate.set()
    assert done.wait(TIMEOUT_S)


def test_releases_run_in_order_on_one_thread_and_a_failure_does_not_stop_them() -> None:
    disposal, done, order, threads = DeferredRelease(), threading.Event(), list[int](), set[int]()

    def note(number: int) -> None:
        threads.add(threading.get_ident())
        order.append(number)
        if number == 1:
            raise CudaError("the device is lost")
        if number == 3:
            done.set()

    for number in range(4):
        owner = Owner()
        disposal.when_gone(owner, lambda number=number: note(number))  # type: ignore[misc]
        del owner
    assert done.wait(TIMEOUT_S)
    assert order == [0, 1, 2, 3]
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_memory_that_a_peer_may_still_write_to_is_kept_for_a_while() -> None:
    disposal, done = DeferredRelease(), threading.Event()
    owner = Owner()
    disposal.when_gone(owner, done.set, after_s=0.2)
    dropped = time.monotonic()
    del owner
    assert done.wait(TIMEOUT_S)
    assert time.monotonic() - dropped >= 0.2


class Waiting:
    """An object whose stream waits."""

    def __init__(self) -> None:
        self.waiting = True


def test_releases_are_delayed_while_a_stream_waits_but_not_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    disposal, stream, done = DeferredRelease(), Waiting(), threading.Event()
    disposal.spare(stream)
    owner = Owner()
    disposal.when_gone(owner, done.set)
    del owner
    assert not done.wait(0.1), "the release would block launches"
    stream.waiting = False
    assert done.wait(TIMEOUT_S)
    done.clear()
    stream.waiting = True
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    owner = Owner()
    disposal.when_gone(owner, done.set)
    del owner
    assert done.wait(TIMEOUT_S)


def test_a_watchdog_reports_whether_a_wait_is_pending() -> None:
    layout = BlobLayout(inside=False)
    memory, file = SharedMemory.create(layout.memory)
    os.close(file)
    words = Doorbells(memory, Side.TARGET)
    watch = DoorbellWatchdog(words)
    assert not watch.waiting
    watch.expect(1, TIMEOUT_S)
    assert watch.waiting
    ctypes.c_uint32.from_buffer(memory.bytes, words.passed_at).value = 1
    assert not watch.waiting
    watch.close()


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(cuda_blob_mailbox, "_register", lambda _memory, _device: 0)
    monkeypatch.setattr(StreamMailbox, "_try", lambda _self: None)


def make_mailbox(slots: PeerMemory) -> tuple[StreamMailbox, Doorbells]:
    """Make a mailbox, and return it with its words."""
    layout = BlobLayout(inside=False)
    memory, file = SharedMemory.create(layout.memory)
    os.close(file)
    return StreamMailbox(layout, memory, slots, Side.TARGET, torch.device("cuda", 0)), Doorbells(
        memory, Side.TARGET
    )


@pytest.mark.usefixtures("without_gpu")
def test_a_dropped_mailbox_ends_its_waits_immediately_and_is_freed_later(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def call(name: str, *_arguments: object) -> None:
        assert gate.wait(TIMEOUT_S)  # blocks as the driver would until the device is done
        calls.append(name)

    monkeypatch.setattr(cuda_blob_mailbox, "runtime_call", call)
    slots = Mapped()
    mailbox, words = make_mailbox(slots)
    assert words.awaited == 0
    del mailbox
    assert words.awaited == RELEASED
    assert not slots.unmapped.is_set()
    gate.set()
    assert slots.unmapped.wait(TIMEOUT_S)
    assert calls == ["cudaHostUnregister"], "must not wait for the device, where a graph may be recording"


@pytest.mark.usefixtures("without_gpu")
def test_a_peers_slots_are_unmapped_if_the_mailbox_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_arguments: object) -> int:
        raise CudaError("no such memory here")

    monkeypatch.setattr(cuda_blob_mailbox, "_register", refuse)
    slots = Mapped()
    with pytest.raises(CudaError):
        make_mailbox(slots)
    assert slots.unmapped.is_set()
