"""The connection to a remote draft: connects, shakes hands, reads on a thread of its own, and reconnects for ever.

The engine thread never waits for anything here: it sends into queues, and receives from one queue what the threads of this module put
there. A connection that ends is replaced by a new `Connection`; messages of an old one are recognised by their connection and dropped.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import grpc
import torch

from outrider.draft.v1 import draft_pb2, draft_pb2_grpc
from outrider.services.target.breaker import Breaker
from outrider.shared.base.errors import ConfigurationError, OutriderError, ProtocolError
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.features import FeatureProjector
from outrider.shared.rpc.client import connect
from outrider.shared.rpc.interceptors import error_from_rpc
from outrider.shared.rpc.tensors import join_tensors, split_tensor, wire_dtype
from outrider.shared.spec.algorithm import FIELD, Algorithm
from outrider.shared.spec.drafter import FeatureSpec

PROTOCOL_VERSION = 1
CONNECT_TIMEOUT_S = 0.25
RETRY_S = 0.1
REFUSED_RETRY_S = 1.0
HANDSHAKE_TIMEOUT_S = 60.0
PROBE_INTERVAL_S = 0.1
KEEP_ALIVE_S = 3.0
MAX_PROJECTOR_BYTES = 1 << 30

_log = logging.getLogger("outrider.target.draft")

Weight = Callable[[str], torch.Tensor]
"""Returns a weight of the target by its name, for drafts that borrow it."""


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """What a target says of itself in Hello. `target_id` is unique per process.

    `algorithm` is what it was told that the draft is, and compared with what the draft says; AUTO takes any.
    """

    target_id: str
    fingerprint: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    feature_dtype: torch.dtype
    model_type: str = ""
    tokenizer: str = ""
    algorithm: Algorithm = Algorithm.AUTO

    @classmethod
    def of(cls, decoder: Decoder, tokenizer: str = "", algorithm: Algorithm = Algorithm.AUTO) -> TargetIdentity:
        """Describe a loaded model; `tokenizer` is the `tokenizer_fingerprint` of its folder."""
        config = decoder.config
        sizes = (config.vocab_size, config.hidden_size, config.num_layers)
        return cls(uuid.uuid4().hex, decoder.fingerprint, *sizes, decoder.dtype, config.model_type, tokenizer, algorithm)


class Connection:
    """One life of the pair of streams. `send` and `send_bulk` may be called from any thread and never wait."""

    def __init__(self) -> None:
        self.hello: draft_pb2.HelloAck | None = None
        self.spec: FeatureSpec | None = None
        self.ended = threading.Event()
        self.last_pong = 0
        self._outbox: queue.SimpleQueue[draft_pb2.SessionRequest | None] = queue.SimpleQueue()
        self._bulk: queue.SimpleQueue[draft_pb2.BulkRequest | None] = queue.SimpleQueue()
        self._calls: list[grpc.Call] = []

    def send(self, message: draft_pb2.SessionRequest) -> None:
        """Send on the session stream."""
        self._outbox.put(message)

    def send_bulk(self, message: draft_pb2.BulkRequest) -> None:
        """Send on the bulk stream."""
        self._bulk.put(message)

    def requests(self) -> Iterator[draft_pb2.SessionRequest]:
        """Yield what `send` was given, until `close`."""
        return iter(self._outbox.get, None)

    def bulk_requests(self) -> Iterator[draft_pb2.BulkRequest]:
        """Yield what `send_bulk` was given, until `close`."""
        return iter(self._bulk.get, None)

    def own(self, call: grpc.Call) -> None:
        """Cancel `call` when the connection closes."""
        self._calls.append(call)
        if self.ended.is_set():
            call.cancel()

    def close(self) -> None:
        """End both streams; safe to call more than once."""
        self.ended.set()
        self._outbox.put(None)
        self._bulk.put(None)
        for call in self._calls:
            call.cancel()


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """What the engine thread is told: a reply, or (`reply` None) that the connection is ready or has ended."""

    connection: Connection
    reply: draft_pb2.SessionReply | None = None


def _check_algorithm(asked: Algorithm, found: str) -> None:
    """Refuse a draft that drafts otherwise than this target was told.

    Raises:
        ConfigurationError: names both.
    """
    wanted = Algorithm.MTP if asked is Algorithm.NEXTN else asked
    if wanted is not Algorithm.AUTO and wanted.value != found:
        raise ConfigurationError(
            f"speculative_algorithm is {asked.value} here, and the draft is {found or 'of an unknown kind'}: start the draft with "
            f"--speculative-algorithm {asked.value}, or leave the option of the target out.",
            field=FIELD,
        )


class DraftLink:
    """Keeps one connection alive. `connection` is the present one, ready for use, or None."""

    def __init__(self, address: str, identity: TargetIdentity, weight: Weight, breaker: Breaker) -> None:
        self.inbox: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self.connection: Connection | None = None
        self.ever_connected = False
        self.refusal: OutriderError | None = None
        self._address = address
        self._identity = identity
        self._weight = weight
        self._breaker = breaker
        self._specs: dict[str, FeatureSpec] = {}
        self._closed = threading.Event()
        self._current: Connection | None = None
        self._thread = threading.Thread(target=self._keep_connected, name="draft-link", daemon=True)

    def start(self) -> None:
        """Start connecting."""
        self._thread.start()

    def close(self) -> None:
        """End the connection and join the thread."""
        self._closed.set()
        if self._current is not None:
            self._current.close()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _keep_connected(self) -> None:
        while not self._closed.is_set():
            connection = self._current = Connection()
            try:
                with connect(self._address) as channel, connect(self._address) as bulk_channel:
                    self._converse(connection, channel, bulk_channel)
            except OutriderError as error:
                self.refusal = error
                _log.error("the draft at %s cannot be used: %s", self._address, error.message)
                self._closed.wait(REFUSED_RETRY_S)
            except (grpc.RpcError, grpc.FutureTimeoutError):
                self._closed.wait(RETRY_S)
            except Exception:  # whatever a peer's bytes provoke here must not end the thread that reconnects
                _log.exception("the connection to the draft at %s failed", self._address)
                self._closed.wait(REFUSED_RETRY_S)
            finally:
                connection.close()

    def _converse(self, connection: Connection, channel: grpc.Channel, bulk_channel: grpc.Channel) -> None:
        """One life of the connection; returns or raises when it is over."""
        grpc.channel_ready_future(channel).result(CONNECT_TIMEOUT_S)
        stub = draft_pb2_grpc.DraftStub(channel)
        call = stub.Session(connection.requests())
        connection.own(call)
        watchdog = threading.Timer(HANDSHAKE_TIMEOUT_S, connection.close)
        watchdog.daemon = True
        watchdog.start()
        try:
            self._shake_hands(connection, stub, call)
        finally:
            watchdog.cancel()
        bulk_call = draft_pb2_grpc.DraftStub(bulk_channel).Bulk(connection.bulk_requests())
        connection.own(bulk_call)
        helpers = [
            threading.Thread(target=self._read_bulk, args=(connection, bulk_call), name="draft-bulk", daemon=True),
            threading.Thread(target=self._probe, args=(connection,), name="draft-probe", daemon=True),
        ]
        for helper in helpers:
            helper.start()
        self._breaker.reset()
        self.refusal = None
        self.ever_connected = True
        self.connection = connection
        self.inbox.put(LinkEvent(connection))
        _log.info("connected to the draft at %s", self._address)
        try:
            for reply in call:
                if reply.HasField("pong"):
                    connection.last_pong = reply.pong.nonce
                    self._breaker.sign_of_life(time.monotonic())
                self.inbox.put(LinkEvent(connection, reply))
        finally:
            self.connection = None
            connection.close()
            self.inbox.put(LinkEvent(connection))
            for helper in helpers:
                helper.join(5.0)
            if not self._closed.is_set():
                _log.warning("lost the draft at %s; decoding plainly until it is back", self._address)

    def _shake_hands(self, connection: Connection, stub: draft_pb2_grpc.DraftStub, call: Iterator[draft_pb2.SessionReply]) -> None:
        identity = self._identity
        hello = draft_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            target_id=identity.target_id,
            target_fingerprint=identity.fingerprint,
            tokenizer_fingerprint=identity.tokenizer,
            model_type=identity.model_type,
            vocab_size=identity.vocab_size,
            hidden_size=identity.hidden_size,
            num_layers=identity.num_layers,
            feature_dtype=wire_dtype(identity.feature_dtype),
        )
        connection.send(draft_pb2.SessionRequest(hello=hello))
        try:
            reply = next(call)
            if not reply.HasField("hello"):
                raise ProtocolError("the draft answered Hello with something else", field="hello")
            ack = reply.hello
            if ack.protocol_version != PROTOCOL_VERSION:
                raise ProtocolError(
                    f"the draft speaks protocol version {ack.protocol_version}, this target {PROTOCOL_VERSION}; run the same release.",
                    field="protocol_version",
                )
            _check_algorithm(identity.algorithm, ack.algorithm)
            connection.spec = self._feature_spec(stub, ack)
            if ack.missing_tensors:
                self._send_weights(stub, ack.missing_tensors)
            connection.hello = ack
        except grpc.RpcError as error:
            status = cast(grpc.Call, error).code()
            if status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                raise error_from_rpc(error) from None
            raise

    def _feature_spec(self, stub: draft_pb2_grpc.DraftStub, ack: draft_pb2.HelloAck) -> FeatureSpec:
        """Return what the head wants captured; the projector's weights are fetched once per fingerprint."""
        key = f"{ack.projector_fingerprint}/{list(ack.aux_layer_ids)}/{ack.feature_size}"
        known = self._specs.get(key)
        if known is not None:
            return known
        tensors: dict[str, torch.Tensor] = {}
        for name in ack.projector_tensors:
            replies = stub.GetTensor(draft_pb2.GetTensorRequest(name=name), timeout=HANDSHAKE_TIMEOUT_S)
            tensors |= dict(join_tensors((reply.chunk for reply in replies), max_bytes=MAX_PROJECTOR_BYTES))
        missing = set(ack.projector_tensors) - set(tensors)
        if missing:
            raise ProtocolError(f"the draft did not send {sorted(missing)[0]}", field="projector_tensors")
        spec = FeatureSpec(
            aux_layer_ids=tuple(ack.aux_layer_ids),
            final_hidden=ack.feature_size > 0 and not ack.aux_layer_ids,
            feature_size=ack.feature_size,
            projector=tensors,
            norm_eps=ack.projector_norm_eps or FeatureSpec().norm_eps,
            fingerprint=key,
        )
        if spec.feature_size:  # fails here, on this thread, if the head does not fit
            FeatureProjector(spec, "cpu", torch.float32, hidden_size=self._identity.hidden_size, num_layers=self._identity.num_layers)
        self._specs[key] = spec
        return spec

    def _send_weights(self, stub: draft_pb2_grpc.DraftStub, names: Iterable[str]) -> None:
        chunks = (draft_pb2.PutTensorRequest(chunk=chunk) for name in names for chunk in split_tensor(name, self._weight(name)))
        reply = stub.PutTensor(chunks, timeout=HANDSHAKE_TIMEOUT_S)
        if reply.still_missing:
            raise ProtocolError(f"the draft still misses {reply.still_missing[0]}", field="missing_tensors")

    def _read_bulk(self, connection: Connection, call: Iterator[draft_pb2.BulkReply]) -> None:
        """Drain the acknowledgements; a bulk stream that ends takes the connection with it."""
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        connection.close()

    def _probe(self, connection: Connection) -> None:
        """Ask for a sign of life while the breaker is open, and now and then to keep the sessions' lease.

        One ping at a time, or a stopped draft would find a heap of them.
        """
        nonce = 0
        last_ping = time.monotonic()
        while not connection.ended.wait(PROBE_INTERVAL_S):
            now = time.monotonic()
            due = self._breaker.wants_probe(now) or now - last_ping >= KEEP_ALIVE_S
            if due and connection.last_pong == nonce:
                last_ping = now
                nonce += 1
                connection.send(draft_pb2.SessionRequest(ping=draft_pb2.Ping(nonce=nonce)))
