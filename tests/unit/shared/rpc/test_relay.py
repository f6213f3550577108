"""The host's part of the relay, which passes blobs to a waiting stream. tests/gpu covers the GPU's part."""

from __future__ import annotations

import contextlib

import pytest
import torch

from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc import relay
from outrider.shared.rpc.ipc.doorbells import Doorbells, Side
from outrider.shared.rpc.relay import LAYOUT, LEAST_STATE_BYTES, StreamRelay
from outrider.shared.spec.resident import HEADER_BYTES

SIZE = 2048


class Slots:
    """Memory that no GPU can access."""

    def __init__(self, num_bytes: int) -> None:
        self.array = torch.zeros(num_bytes, dtype=torch.uint8).numpy()
        self.bytes = self.array.data


class Mailbox:
    """Records the words that a GPU stream would poll for the host's announcements."""

    def __init__(
        self, layout: object, memory: object, slots: object, side: Side, device: torch.device
    ) -> None:
        self.words = Doorbells(memory, side)  # type: ignore[arg-type]

    def receive(self, number: int, blob: torch.Tensor, expected: torch.Tensor, limit_s: float) -> None:
        pass


class Stream:
    """The stream of an idle GPU."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture(params=Side, ids=lambda side: str(side.value))
def side(request: pytest.FixtureRequest) -> Side:
    assert isinstance(request.param, Side)
    return request.param


@pytest.fixture
def waiting(side: Side, monkeypatch: pytest.MonkeyPatch) -> StreamRelay:
    """A relay whose stream waits for the blob of round 1."""
    monkeypatch.setattr(relay, "PinnedSlots", Slots)
    monkeypatch.setattr(relay, "StreamMailbox", Mailbox)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _of: contextlib.nullcontext())
    for name in ("Event", "Stream"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    made = StreamRelay(side, torch.device("cpu"))
    made.take(1, torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32), 1.0)
    return made


def given(waiting: StreamRelay) -> int:
    mailbox = waiting._mailbox
    assert isinstance(mailbox, Mailbox)
    return mailbox.words.awaited


def slot(waiting: StreamRelay, side: Side) -> bytes:
    start = LAYOUT.trees_slot(1) if side is Side.TARGET else LAYOUT.state_slot(1)
    return bytes(waiting._slots.bytes[start : start + SIZE])


def test_put_writes_the_slot_and_its_number_before_it_writes_the_word(
    waiting: StreamRelay, side: Side
) -> None:
    waiting.put(1, bytes([7]) * SIZE)
    assert slot(waiting, side) == (1).to_bytes(4, "little") + bytes([7]) * (SIZE - 4)
    assert given(waiting) == 1


def test_a_state_may_end_after_its_header_but_trees_must_be_complete(
    waiting: StreamRelay, side: Side
) -> None:
    assert LEAST_STATE_BYTES == HEADER_BYTES
    least = LEAST_STATE_BYTES if side is Side.DRAFT else SIZE
    for size in (0, 1, least - 1, SIZE + 1):
        with pytest.raises(ProtocolError):
            waiting.put(1, bytes([7]) * size)
        assert given(waiting) == 0, "the wait continues"
        assert not any(slot(waiting, side))
    waiting.put(1, bytes([7]) * least)
    assert given(waiting) == 1


def test_a_blob_of_another_round_is_refused(waiting: StreamRelay) -> None:
    with pytest.raises(ProtocolError):
        waiting.put(3, bytes(SIZE))
    assert given(waiting) == 0


def test_release_ends_the_wait_of_a_round_without_a_blob(waiting: StreamRelay, side: Side) -> None:
    waiting.release(1)
    assert given(waiting) == 1
    assert not any(slot(waiting, side)), "the slot contains no round"
