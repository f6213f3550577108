"""Rounds that stay on the device, over a gRPC stream: the host waits for the state, sends it, and waits for the trees.

The message of the round goes ahead, while the device still works, and what surrounds the state is encoded by then, so that only bytes are
left to be copied when it is there; feature rows that the round did not choose stay behind. On a GPU the next pass goes ahead too: it is
enqueued behind a word that the host writes when the trees have come (see `shared.rpc.relay`).

The host waits awake (see `shared.rpc.polling`): when the pass is done its result is on its way at once, and so is the next pass when trees
come.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.draft.v1 import draft_pb2
from outrider.shared.base.errors import ProtocolError
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.blob_staging import BlobStaging
from outrider.shared.rpc.direct import ClientStream
from outrider.shared.rpc.envelopes import BlobEnvelopes
from outrider.shared.rpc.ipc.cuda import CudaError
from outrider.shared.rpc.polling import PollWindow, give_way
from outrider.shared.rpc.relay import STATE_BYTES, StreamRelay
from outrider.shared.spec.resident import PackedExtent, RoundState

LOOK_S = 0.001
"""Trees are looked for at least so long: they may lie there since before their time was over."""

LEAD = 2.5
"""The target tells the draft before its pass is over by all experience: so many times as long before as it takes to tell.

Where the two share a GPU without MPS it shall turn to the draft when the pass is over: told later it does so later, and told 100 µs sooner
it turns in the middle of one pass in three, which lasts 350 µs longer then (H200). How long it takes to tell is what says how fast a host
is. The target does not know whether they share one, so it tells every draft whose rounds are enqueued ahead; elsewhere the message and the
answer to it are of use too, as the next ones find their way travelled: code and buffers of both processes are in caches again, which saves
each hop 20 to 60 µs. It tells, and calls the GPU back, only where waits are awake (`PollWindow.enabled`, from eight cores on), since it
lies in wait for the moment."""
LEAST_TELLING_S, MOST_TELLING_S = 0.00005, 0.0003
"""What telling is taken to take, whatever it took last."""
MOST_PRACTICE_BYTES = 64 * 1024
"""What is put together for practice must be so before the state is there."""
SHARE_OF_DRAFT = 0.5
"""After this part of what the draft takes by all experience it is at work, and the GPU is called back for the time when it is done. Trees
that come sooner, as none do when the draft works as it did, lie there until then: the network is not looked at meanwhile."""
MOST_TAKEN_S = 0.01
"""What takes longer is not counted on to take as long again."""
TAKEN = draft_pb2.SessionReply(round_taken=draft_pb2.RoundTaken()).SerializeToString()
SOON = draft_pb2.SessionRequest(round_soon=draft_pb2.RoundSoon()).SerializeToString()

log = get_logger("outrider.target.draft")


@dataclass(frozen=True, slots=True)
class _Round:
    """What is known of an exchange before its state is there.

    Attributes:
        number: Of the round.
        state: Where it comes from, packed.
        extent: Of the state.
        envelopes: Of its messages.
        limit_s: How long the trees are waited for.
    """

    number: int
    state: torch.Tensor
    extent: PackedExtent
    envelopes: BlobEnvelopes
    limit_s: float


class StreamRounds:
    """`RoundsChannel` over a stream.

    Args:
        stream: Of the session.
        poll_window: Decides when the stream's waits poll.
        dispatch: Takes in a message that the engine thread happened to receive; a method of the carrier, which is not kept by this.
        relay: Of the connection; None where nothing is enqueued ahead.
    """

    def __init__(
        self,
        stream: ClientStream,
        poll_window: PollWindow,
        dispatch: Callable[[bytes], None],
        relay: StreamRelay | None = None,
    ) -> None:
        self._stream = stream
        self._poll_window = poll_window
        # The carrier has this channel: a cycle would keep the relay until the garbage collector runs.
        self._dispatch = weakref.WeakMethod(dispatch)
        self._relay = relay
        self._staging = BlobStaging()
        self._arrived: deque[draft_pb2.RoundTrees] = deque()
        # A round whose exchange is left to `hand_over` and `carry`; its state may not have been enqueued, where that failed. And how long
        # its trees are waited for.
        self._enqueued: _Round | None = None
        self._until = 0.0
        # When the last state was sent, and trees were put; how long the draft's part took then, and the target's.
        self._sent_at = self._put_at = 0.0
        self._drafted_s = self._verified_s = 0.0
        # How long it took to tell the draft that a state comes, and the size of the last one.
        self._telling_s = LEAST_TELLING_S
        self._last_bytes = 0
        self._missed = False
        self._closed = False

    @property
    def broken(self) -> bool:
        """See `RoundsChannel.broken`."""
        return self._missed or self._closed or (self._relay is not None and self._relay.broken)

    def arrived(self, trees: draft_pb2.RoundTrees) -> None:
        """Take in the trees of a round; any thread."""
        self._arrived.append(trees)

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        """See `RoundsChannel.fits`."""
        return state.nbytes <= STATE_BYTES

    def exchange(
        self,
        message: draft_pb2.RoundsNext,
        state: RoundState,
        trees: torch.Tensor,
        expected: torch.Tensor,
        limit_s: float,
        ahead: bool,
    ) -> None:
        """See `RoundsChannel.exchange`."""
        assert state.packed is not None, "the engine's states are packed"
        self._look()
        self._stream.send(draft_pb2.SessionRequest(rounds_next=message).SerializeToString())
        coming = _Round(message.number, state.packed, state.extent, BlobEnvelopes.of(message), limit_s)
        if ahead and self._relay is not None and self._relay.fits(state.packed, trees):
            self._enqueue(self._relay, coming, trees, expected)
            return
        expected.fill_(message.number)
        fetched = self._staging.fetch(state.packed).numpy()
        self._look()
        self._staging.settle(state.packed)
        self._post(coming, fetched)
        data = self._await_trees(coming)
        if data:
            try:
                self._staging.load(data, message.number, trees)
            except ProtocolError as error:
                self._distrust(error)
        self._poll_window.rest()

    def hand_over(self) -> None:
        """See `RoundsChannel.hand_over`."""
        enqueued = self._enqueued
        if enqueued is None or self._relay is None:
            return
        if self._put_at and self._poll_window.enabled:
            self._announce(self._relay, enqueued)
        self._look()
        late = self._relay.given(enqueued.number)
        state = self._relay.settle(enqueued.number, enqueued.state.nbytes)
        verified_s = _reliable(time.monotonic() - self._put_at)
        self._post(enqueued, state)
        # Who is late only knows that it took no longer.
        self._verified_s = min(verified_s, self._verified_s or verified_s) if late else verified_s

    def carry(self, wanted: bool) -> None:
        """See `RoundsChannel.carry`."""
        enqueued, self._enqueued = self._enqueued, None
        if enqueued is None or self._relay is None:
            return
        came = False
        try:
            if wanted and self._poll_window.enabled:
                self._call_back(self._relay)
            data = self._await_trees(enqueued) if wanted else b""
            self._put_at = 0.0
            if data:
                self._relay.put(enqueued.number, data)
                came = True
                self._put_at = time.monotonic()
                self._drafted_s = _reliable(self._put_at - self._sent_at)
        except ProtocolError as error:
            self._distrust(error)
        finally:
            if not came:
                self._relay.release(enqueued.number)
            self._poll_window.rest()

    def mend(self) -> bool:
        """See `RoundsChannel.mend`."""
        if self._closed or (self._relay is not None and not self._relay.mend()):
            return False
        self._missed = False
        self._arrived.clear()
        return not self.broken

    def close(self) -> None:
        """See `RoundsChannel.close`. Who waits hears of it when the stream is cancelled."""
        self._closed = True
        if self._relay is not None:
            self._relay.close()

    def _enqueue(
        self,
        relay: StreamRelay,
        coming: _Round,
        trees: torch.Tensor,
        expected: torch.Tensor,
    ) -> None:
        """Enqueue the exchange, and leave the host's part to `carry`."""
        try:
            relay.give(coming.number, coming.state)
            self._enqueued = coming
            relay.take(coming.number, trees, expected, coming.limit_s)
        except CudaError as error:
            log.warning("rounds are launched when their messages arrive", reason=error.message)
            relay.close()
            self._relay, self._enqueued = None, None
            self._missed = True

    def _post(self, coming: _Round, state: NDArray[np.uint8]) -> None:
        """Send a state."""
        whole = state.data
        self._last_bytes = coming.extent.used_bytes(whole)
        self._stream.send(coming.envelopes.state.seal(whole[: self._last_bytes]))
        self._poll_window.expect(coming.limit_s)
        self._sent_at = time.monotonic()
        self._until = self._sent_at + coming.limit_s

    def _announce(self, relay: StreamRelay, coming: _Round) -> None:
        """Tell the draft shortly before the state is there: if the two share a GPU, it turns to the draft while the state travels."""
        if not self._verified_s:
            return
        until = self._put_at + self._verified_s - LEAD * self._telling_s
        while (now := time.monotonic()) < until and not relay.given(coming.number):
            give_way()
        self._look()
        self._stream.send(SOON)
        self._telling_s = min(max(LEAST_TELLING_S, time.monotonic() - now), MOST_TELLING_S)
        coming.envelopes.state.seal(bytes(min(self._last_bytes, MOST_PRACTICE_BYTES)))  # what comes next

    def _call_back(self, relay: StreamRelay) -> None:
        """Have the GPU, if the two share it, turn to this process as soon as the draft's pass is over: while the trees travel."""
        until = min(self._until, self._sent_at + self._drafted_s * SHARE_OF_DRAFT)
        while time.monotonic() < until:
            give_way()
        relay.call()

    def _await_trees(self, coming: _Round) -> bytes | memoryview:
        """Return the trees for a state that was sent; empty if the draft has none, or if they do not come in time."""
        trees = self._await(coming, max(self._until, time.monotonic() + LOOK_S))
        if trees is None:
            self._missed = True
            return b""
        return trees

    def _await(self, coming: _Round, until: float) -> bytes | memoryview | None:
        """Return the trees of a round, or None if they do not come in time; late ones of earlier rounds are dropped."""
        while True:
            while self._arrived:
                reply = self._arrived.popleft()
                if reply.number == coming.number:
                    return reply.trees
            remaining = until - time.monotonic()
            if remaining <= 0 or self._closed:
                return None
            received = self._stream.receive_within(remaining)
            if received is None:
                if self._stream.ended:
                    return None
                continue
            trees = coming.envelopes.trees.open(received)
            if trees is not None:
                return trees
            if received != TAKEN:
                self._take_in(received)

    def _look(self) -> None:
        """Take in what has come, and that what was sent is on its way, so that nothing queues behind it."""
        for received in self._stream.poll():
            self._take_in(received)

    def _take_in(self, received: bytes) -> None:
        dispatch = self._dispatch()
        try:
            if dispatch is not None:
                dispatch(received)
        except ProtocolError as error:
            self._distrust(error)
            self._stream.cancel()

    def _distrust(self, error: ProtocolError) -> None:
        log.warning("the draft broke the protocol", error=error.message)
        self._missed = True


def _reliable(seconds: float) -> float:
    """Return how long something is counted on to take again; 0 if it is not."""
    return seconds if seconds <= MOST_TAKEN_S else 0.0
