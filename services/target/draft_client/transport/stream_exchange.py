"""Rounds on the device over a gRPC stream: sends each round's state to the draft and receives its trees.

To save time, as much work as possible happens early:

- While the device computes the round's state, the host sends the message RoundsNext. The host also encodes
  the header of the message that carries the state.
- If the draft accepts compact states (`StateLayout.compact`), a state omits the feature rows of rejected
  nodes.
- On a GPU, the host enqueues the next verify pass before the trees for this pass have arrived. The GPU waits
  for a word in host memory. The host writes this word when the trees have arrived (`shared.rpc.relay`).
- The host busy-polls (`shared.rpc.polling`), because waking a sleeping thread would delay states and trees.

The docstring of `LEAD` explains how the target and the draft time-slice a shared GPU.
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
from outrider.services.target.draft_client.transport.exchange import Exchange
from outrider.shared.base.errors import ProtocolError
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.blob_staging import BlobStaging
from outrider.shared.rpc.direct import ClientStream
from outrider.shared.rpc.envelopes import BlobEnvelopes
from outrider.shared.rpc.ipc.cuda import CudaError
from outrider.shared.rpc.polling import PollWindow, give_way
from outrider.shared.rpc.relay import STATE_BYTES, StreamRelay
from outrider.shared.spec.resident import StateBlob, StateLayout

LOOK_S = 0.001
"""Shortest time in seconds for which the host looks for trees. Trees may have arrived in time without having
been read yet."""

LEAD = 2.5
"""Lead time of the early notice (RoundSoon), as a multiple of the measured time to send it.

The target sends the notice shortly before its pass is expected to end. If target and draft share a GPU
without MPS, the GPU should switch to the draft when the pass ends:

- If the notice is sent later, the switch is delayed.
- If the notice is sent 100 µs too early, the GPU switches in the middle of the pass in one of three rounds.
  That pass then takes 350 µs longer (measured on an H200).

The lead time is a multiple of the time to send the notice, because that time reflects the host's speed.

The notice also helps without a shared GPU: it brings code and buffers of both processes into the CPU caches,
which saves 20 to 60 µs per message. The target therefore sends it in all rounds that are enqueued ahead.

The target must busy-poll to find the right moment. It therefore sends notices only on hosts with eight or
more cores (`PollWindow.enabled`).
"""
LEAST_TELLING_S, MOST_TELLING_S = 0.00005, 0.0003
"""Bounds for the measured time to send the notice, in seconds."""
MOST_PRACTICE_BYTES = 64 * 1024
"""Limit in bytes for the message that `_announce` encodes as practice. The practice must end before the state
is complete."""
SHARE_OF_DRAFT = 0.5
"""Time at which the target requests that a shared GPU switch back to it, as a share of the draft's expected
time.

At that time, the draft is still computing. The switch takes effect when the draft's pass ends. Trees that
arrive earlier have to wait, but a draft at its usual speed never sends its trees that early.
"""
MOST_TAKEN_S = 0.01
"""Longest measured time, in seconds, that is used as an expected time."""
TAKEN = draft_pb2.SessionReply(round_taken=draft_pb2.RoundTaken()).SerializeToString()
"""The draft's answer to the early notice, which only warms the code that receives trees."""
SOON = draft_pb2.SessionRequest(round_soon=draft_pb2.RoundSoon()).SerializeToString()
"""The early notice, as an encoded message."""
log = get_logger("outrider.target.draft")


@dataclass(frozen=True, slots=True)
class _PendingExchange:
    """The data of one exchange that is known before the state is complete.

    Attributes:
        number: The round's number.
        state: The packed state on the device.
        layout: Layout of the packed state.
        envelopes: Encoders of the round's messages.
        limit_s: Longest wait for the trees, in seconds.
    """

    number: int
    state: torch.Tensor
    layout: StateLayout
    envelopes: BlobEnvelopes
    limit_s: float


class StreamExchange(Exchange):
    """Carries the round states and trees of one connection over its gRPC session stream.

    Args:
        stream: The session stream.
        poll_window: Makes the stream's waits busy-poll.
        dispatch: The method of `GrpcCarrier` that processes messages other than the trees of a round. It is
            called on the engine thread. This object keeps only a weak reference to the method.
        relay: Lets the device wait for a word that the host writes. With None, no pass is enqueued before its
            trees have arrived.
        compact: True if the draft accepts states without the feature rows of rejected nodes. Otherwise, only
            the unused end of each state is left out.
    """

    def __init__(
        self,
        stream: ClientStream,
        poll_window: PollWindow,
        dispatch: Callable[[bytes], None],
        relay: StreamRelay | None = None,
        *,
        compact: bool = False,
    ) -> None:
        self._stream = stream
        self._compact = compact
        self._poll_window = poll_window
        # The carrier owns this channel. A strong reference would create a cycle, which would keep the relay
        # alive until the garbage collector runs.
        self._dispatch = weakref.WeakMethod(dispatch)
        self._relay = relay
        self._staging = BlobStaging()
        self._arrived: deque[draft_pb2.RoundTrees] = deque()
        # The round whose exchange `send_state` and `receive_trees` complete, and the time until which to wait
        # for the trees. None if no round is enqueued ahead, or if enqueuing failed.
        self._enqueued: _PendingExchange | None = None
        self._until = 0.0
        # The times when the last state was sent and when the last trees were written, and the measured
        # durations of the draft's part and of the target's part of a round.
        self._sent_at = self._put_at = 0.0
        self._drafted_s = self._verified_s = 0.0
        # The time that the last early notice took to send, and the size of the last state in bytes.
        self._telling_s = LEAST_TELLING_S
        self._last_bytes = 0
        self._missed = False
        self._closed = False

    @property
    def broken(self) -> bool:
        return self._missed or self._closed or (self._relay is not None and self._relay.broken)

    def arrived(self, trees: draft_pb2.RoundTrees) -> None:
        """Accept the trees of a round. May be called from any thread."""
        self._arrived.append(trees)

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        return state.nbytes <= STATE_BYTES

    def exchange(
        self,
        message: draft_pb2.RoundsNext,
        state: StateBlob,
        trees: torch.Tensor,
        expected: torch.Tensor,
        limit_s: float,
        ahead: bool,
    ) -> None:
        self._look()
        self._stream.send(draft_pb2.SessionRequest(rounds_next=message).SerializeToString())
        coming = _PendingExchange(
            message.number, state.packed, state.layout, BlobEnvelopes.of(message), limit_s
        )
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

    def send_state(self) -> None:
        """Send the state of a round that was enqueued ahead, once the device has written the state."""
        enqueued = self._enqueued
        if enqueued is None or self._relay is None:
            return
        # 1. Send the early notice.
        if self._put_at and self._poll_window.enabled:
            self._announce(self._relay, enqueued)
        # 2. Wait for the state.
        self._look()
        late = self._relay.given(enqueued.number)
        state = self._relay.settle(enqueued.number, enqueued.state.nbytes)
        verified_s = _reliable(time.monotonic() - self._put_at)
        # 3. Send the state.
        self._post(enqueued, state)
        # If the host was late, it has measured only an upper bound for the time of the pass.
        self._verified_s = min(verified_s, self._verified_s or verified_s) if late else verified_s

    def receive_trees(self, wanted: bool) -> None:
        """Receive the trees of a round that was enqueued ahead, and let the device continue."""
        enqueued, self._enqueued = self._enqueued, None
        if enqueued is None or self._relay is None:
            return
        came = False
        try:
            # 1. Switch a shared GPU back to this process.
            if wanted and self._poll_window.enabled:
                self._call_back(self._relay)
            # 2. Wait for the trees.
            data = self._await_trees(enqueued) if wanted else b""
            self._put_at = 0.0
            # 3. Write the trees to the memory that the device polls.
            if data:
                self._relay.put(enqueued.number, data)
                came = True
                self._put_at = time.monotonic()
                self._drafted_s = _reliable(self._put_at - self._sent_at)
        except ProtocolError as error:
            self._distrust(error)
        finally:
            # If there are no trees, end the device's wait.
            if not came:
                self._relay.release(enqueued.number)
            self._poll_window.rest()

    def mend(self) -> bool:
        if self._closed or (self._relay is not None and not self._relay.mend()):
            return False
        self._missed = False
        self._arrived.clear()
        return not self.broken

    def close(self) -> None:
        """End the device's current wait for trees, and all its later waits.

        A wait of the host for a message continues until the gRPC stream is cancelled.
        """
        self._closed = True
        if self._relay is not None:
            self._relay.close()

    def _enqueue(
        self,
        relay: StreamRelay,
        coming: _PendingExchange,
        trees: torch.Tensor,
        expected: torch.Tensor,
    ) -> None:
        """Enqueue the device's part of the exchange. `send_state` and `receive_trees` do the host's part."""
        try:
            relay.give(coming.number, coming.state)
            self._enqueued = coming
            relay.take(coming.number, trees, expected, coming.limit_s)
        except CudaError as error:
            log.warning(
                "cannot enqueue rounds ahead; launching them when their messages arrive", reason=error.message
            )
            relay.close()
            self._relay, self._enqueued = None, None
            self._missed = True

    def _post(self, coming: _PendingExchange, state: NDArray[np.uint8]) -> None:
        """Send a state, and start to measure the wait for its trees."""
        whole = state.data
        parts = coming.layout.compact(whole) if self._compact else [whole[: coming.layout.used_bytes(whole)]]
        self._last_bytes = sum(map(len, parts))
        self._stream.send(coming.envelopes.state.seal(*parts))
        self._poll_window.expect(coming.limit_s)
        self._sent_at = time.monotonic()
        self._until = self._sent_at + coming.limit_s

    def _announce(self, relay: StreamRelay, coming: _PendingExchange) -> None:
        """Send the early notice shortly before the state is complete. See `LEAD`."""
        if not self._verified_s:
            return
        until = self._put_at + self._verified_s - LEAD * self._telling_s
        while (now := time.monotonic()) < until and not relay.given(coming.number):
            give_way()
        self._look()
        self._stream.send(SOON)
        self._telling_s = min(max(LEAST_TELLING_S, time.monotonic() - now), MOST_TELLING_S)
        # Encode a message as practice, so that code and buffers are in the caches for the next message.
        coming.envelopes.state.seal(bytes(min(self._last_bytes, MOST_PRACTICE_BYTES)))

    def _call_back(self, relay: StreamRelay) -> None:
        """Make a shared GPU switch back to this process as soon as the draft's pass ends."""
        until = min(self._until, self._sent_at + self._drafted_s * SHARE_OF_DRAFT)
        while time.monotonic() < until:
            give_way()
        relay.call()

    def _await_trees(self, coming: _PendingExchange) -> bytes | memoryview:
        """Return the trees for a state that was sent. Return empty bytes if there are no trees in time."""
        trees = self._await(coming, max(self._until, time.monotonic() + LOOK_S))
        if trees is None:
            self._missed = True
            return b""
        return trees

    def _await(self, coming: _PendingExchange, until: float) -> bytes | memoryview | None:
        """Return the trees of a round, or None if they are late. Drop late trees of earlier rounds."""
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
        """Process received messages and flush messages to be sent, so that no message waits in a queue."""
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
        log.warning("the draft violated the protocol", error=error.message)
        self._missed = True


def _reliable(seconds: float) -> float:
    """Return a measured time if it is short enough to be used as an expected time, else 0."""
    return seconds if seconds <= MOST_TAKEN_S else 0.0
