"""The gateway's connection to one target: one channel, one health watch and one stream for all requests.

The stream is the gRPC call `Session`. If the connection is lost, the client reconnects automatically.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.services.gateway.request import GenerationRequest, TargetDelta, TargetFinish
from outrider.services.gateway.served_target import ServedTarget, TargetStats
from outrider.services.gateway.target_client.probe import PROBE_TIMEOUT_S, probe_target
from outrider.services.gateway.target_client.stream import ReaderLimits, TargetStream
from outrider.services.gateway.target_messages import (
    delta_from_proto,
    finish_from_proto,
    info_from_proto,
    request_to_proto,
    target_stats_from_proto,
)
from outrider.shared.base.errors import OutriderError, ProtocolError, UnavailableError
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.client import connect_aio
from outrider.shared.rpc.common_messages import error_from_proto
from outrider.shared.rpc.interceptors import error_from_rpc
from outrider.shared.rpc.peer_security import NO_SECURITY, of_this_process, refusal_of
from outrider.target.v1 import target_pb2, target_pb2_grpc

TARGET_SERVICE = "outrider.target.v1.Target"
# Back-off between connection attempts, in seconds. The last value repeats.
RECONNECT_S = (0.1, 0.2, 0.4, 0.8, 1.0)
RPC_TIMEOUT_S = 5.0
STATS_TIMEOUT_S = 1.0
# Memory that the Python objects of an unread event take, in addition to the bytes of the event's message.
CHUNK_OVERHEAD_BYTES = 256
_log = get_logger("outrider.gateway.target")


class Readiness:
    """A flag on which tasks can wait until the flag is set or until it is cleared."""

    def __init__(self) -> None:
        self._changed = {True: asyncio.Event(), False: asyncio.Event()}
        self._changed[False].set()

    def __bool__(self) -> bool:
        return self._changed[True].is_set()

    def set(self, ready: bool) -> None:
        """Set or clear the flag, and wake the tasks that wait for the new value."""
        self._changed[not ready].clear()
        self._changed[ready].set()

    async def wait_for(self, ready: bool) -> None:
        """Wait until the flag has this value."""
        await self._changed[ready].wait()


class TargetClient:
    """The gateway's client of one target. It keeps a session open, and reconnects if the session is lost.

    Use the object on one event loop only.

    Args:
        address: The target's address.
        limits: Limits on the unread events of a sequence.
        probe_timeout_s: Seconds after which the reply to a health check is overdue.
        on_change: Called after every change of `ready` or `known_info`.
        abandons: Called when the reply to a health check is overdue. Returns True to end the session, so that
            another target can continue the sequences.

    Attributes:
        address: The target's address.
        connections: Number of sessions so far, including the current session.
        connections_lost: Number of sessions that ended because the target ended or the connection broke.
    """

    def __init__(
        self,
        address: str,
        limits: ReaderLimits,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
        on_change: Callable[[], None] = lambda: None,
        abandons: Callable[[], bool] = lambda: False,
    ) -> None:
        self.address = address
        self.connections = self.connections_lost = 0
        self._on_change = on_change
        self._abandons = abandons
        self._closed = False
        # The reason, as last logged, why the target cannot be used.
        self._refusal = ""
        self._probe_timeout_s = probe_timeout_s
        self._limits = limits
        self._channel: grpc.aio.Channel | None = None
        self._security = NO_SECURITY
        self._task: asyncio.Task[None] | None = None
        self._streams: dict[str, TargetStream] = {}
        self._outgoing: asyncio.Queue[target_pb2.SessionRequest] | None = None
        self._serving = asyncio.Event()
        # False while the reply to a health check is overdue.
        self._answers = True
        self._info: ServedTarget | None = None
        self.readiness = Readiness()

    async def start(self) -> None:
        """Start connecting in the background."""
        await self._open_channel()
        self._task = asyncio.create_task(self._run(), name="target-session")

    async def close(self) -> None:
        """Close the session. Running sequences receive no further events."""
        self._closed = True
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._channel:
            await self._channel.close()

    @property
    def ready(self) -> bool:
        """Whether the target is connected and serving. Only then can sequences be submitted."""
        return bool(self.readiness)

    @property
    def info(self) -> ServedTarget:
        """The target's information, as of the last connection or the last refresh.

        Raises:
            UnavailableError: If the target has never been connected.
        """
        if self._info is None:
            raise self._unavailable()
        return self._info

    @property
    def known_info(self) -> ServedTarget | None:
        """The target's information, or None if the target has never been connected."""
        return self._info

    def submit(self, request: GenerationRequest) -> TargetStream:
        """Start a sequence.

        Raises:
            UnavailableError: If the target is not connected or not serving.
        """
        if not self.ready:
            raise self._unavailable()
        stream = TargetStream(request.request_id, self, self._limits)
        self._streams[request.request_id] = stream
        timeout_s = request.deadline - asyncio.get_running_loop().time()
        self.send(target_pb2.SessionRequest(generate=request_to_proto(request, timeout_s)))
        return stream

    def cancel(self, request_id: str) -> None:
        """Stop a sequence, whose stream then ends with the reason CANCELLED. An unknown id has no effect."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.cancel()

    def send(self, message: target_pb2.SessionRequest) -> None:
        """Queue a message for the session. If there is no session, drop the message."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    def forget(self, request_id: str) -> None:
        """Stop delivering events of a sequence."""
        self._streams.pop(request_id, None)

    async def refresh_info(self) -> ServedTarget:
        """Request the target's information again, because a draft may have connected to the target meanwhile.

        Raises:
            OutriderError: If the target does not reply within a second.
        """
        if self._channel is None or not self.ready:
            raise self._unavailable()
        try:
            reply = await target_pb2_grpc.TargetStub(self._channel).GetInfo(
                target_pb2.GetInfoRequest(), timeout=STATS_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        self._info = info_from_proto(reply)
        self._on_change()
        return self._info

    async def stats(self) -> TargetStats:
        """Request the target's statistics.

        Raises:
            OutriderError: If the target does not reply within a second.
        """
        if self._channel is None or not self.ready:
            raise self._unavailable()
        try:
            reply = await target_pb2_grpc.TargetStub(self._channel).GetStats(
                target_pb2.GetStatsRequest(), timeout=STATS_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        return target_stats_from_proto(reply)

    async def flush_prefixes(self) -> int:
        """Empty the target's prefix cache, and return the number of pages removed.

        Raises:
            OutriderError: If the target does not reply within five seconds.
        """
        if self._channel is None or not self.ready:
            raise self._unavailable()
        try:
            reply = await target_pb2_grpc.TargetStub(self._channel).FlushPrefixCache(
                target_pb2.FlushPrefixCacheRequest(), timeout=RPC_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            failure = error_from_rpc(error)
            raise OutriderError(
                f"The target service at {self.address} has not emptied its prefix cache: {failure.message}",
                code=failure.code,
                reason=failure.reason,
            ) from None
        return reply.pages

    def _unavailable(self) -> UnavailableError:
        return UnavailableError(
            f"The target service at {self.address} is not ready. Retry shortly.",
            reason="target_unavailable",
            retry_after_s=1.0,
        )

    async def _run(self) -> None:
        attempt = 0
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._watch_health())
                    group.create_task(self._hold_session())
                    group.create_task(self._probe())
            except* Exception as failure:
                # If a session was established, restart the back-off with the shortest wait.
                attempt = 0 if self._outgoing is not None else attempt
                self._disconnected(failure.exceptions[0])
            # The flag is needed, because a task group that fails during its cancellation reports the failure
            # and not the cancellation.
            if self._closed:
                return
            await asyncio.sleep(RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)])
            await self._open_channel()
            attempt += 1

    async def _open_channel(self) -> None:
        """Open the channel. Replace an open one only if the files of the certificates have changed.

        A channel reconnects by itself, but with the certificates with which it was opened.
        """
        security = of_this_process().renewed()
        if self._channel is not None:
            if security == self._security:
                return
            await self._channel.close()
        self._channel, self._security = connect_aio(self.address, security=security), security

    async def _watch_health(self) -> None:
        assert self._channel is not None
        stub = health_pb2_grpc.HealthStub(self._channel)
        async for reply in stub.Watch(health_pb2.HealthCheckRequest(service=TARGET_SERVICE)):
            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                self._serving.set()
            else:
                self._serving.clear()
            self._announce()
        raise ConnectionError("the target ended its health stream")

    async def _probe(self) -> None:
        assert self._channel is not None
        await self._serving.wait()
        await probe_target(self._channel, TARGET_SERVICE, self._set_answers, self._probe_timeout_s)

    def _set_answers(self, answers: bool) -> None:
        self._answers = answers
        self._announce()
        if not answers and self._outgoing is not None and self._abandons():
            raise ConnectionError("the target does not answer health checks")

    async def _hold_session(self) -> None:
        assert self._channel is not None
        await self._serving.wait()
        stub = target_pb2_grpc.TargetStub(self._channel)
        self._info = info_from_proto(await stub.GetInfo(target_pb2.GetInfoRequest(), timeout=RPC_TIMEOUT_S))
        outgoing: asyncio.Queue[target_pb2.SessionRequest] = asyncio.Queue()
        session = stub.Session()
        async with asyncio.TaskGroup() as group:
            sender = group.create_task(self._send_all(session, outgoing))
            self._outgoing = outgoing
            self.connections += 1
            self._announce()
            _log.info(
                "target connected",
                address=self.address,
                model=self._info.model_id,
                speculation=self._info.speculation_state,
            )
            async for reply in session:
                self._dispatch(reply)
            sender.cancel()
        raise ConnectionError("the target ended the session")

    @staticmethod
    async def _send_all(
        session: grpc.aio.StreamStreamCall[target_pb2.SessionRequest, target_pb2.SessionReply],
        outgoing: asyncio.Queue[target_pb2.SessionRequest],
    ) -> None:
        while True:
            await session.write(await outgoing.get())

    def _announce(self) -> None:
        self.readiness.set(self._outgoing is not None and self._serving.is_set() and self._answers)
        self._on_change()

    def _dispatch(self, message: target_pb2.SessionReply) -> None:
        for reply in message.replies:
            stream = self._streams.get(reply.request_id)
            if stream is None:
                continue
            event: TargetDelta | TargetFinish | OutriderError
            if reply.HasField("delta"):
                event = delta_from_proto(reply.delta)
            elif reply.HasField("finish"):
                event = finish_from_proto(reply.finish)
            else:
                event = error_from_proto(reply.error)
            cost = reply.ByteSize() + CHUNK_OVERHEAD_BYTES
            if isinstance(event, TargetDelta) and event.states is not None:
                cost -= event.states.nbytes  # these bytes have a limit of their own, `max_state_bytes`
            stream.deliver(event, cost)

    def _disconnected(self, failure: BaseException) -> None:
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        if self._outgoing is not None:
            self.connections_lost += 1
            _log.warning(
                "target connection lost",
                address=self.address,
                error=str(failure),
                running=len(self._streams),
            )
        elif (refusal := _refusal(failure)) and refusal != self._refusal:
            self._refusal = refusal
            _log.error("target cannot be used", address=self.address, error=refusal)
        self._outgoing = None
        self._answers = True
        self._serving.clear()
        self._announce()
        error = UnavailableError(
            "The connection to the target was lost during generation. Retry shortly.",
            reason="target_lost",
            retry_after_s=1.0,
        )
        for stream in list(self._streams.values()):
            stream.deliver(error, 0)
        self._streams.clear()


def _refusal(failure: BaseException) -> str:
    """Return why the target cannot serve this gateway until a setting changes, or an empty text."""
    if isinstance(failure, ProtocolError):
        return failure.message
    if isinstance(failure, grpc.aio.AioRpcError):
        return refusal_of(failure.code().name, failure.details() or "")
    return ""
