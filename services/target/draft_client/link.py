"""Keeps the target connected to a remote draft service: connects, performs the handshake, pings, reconnects.

All this happens on a separate thread, so the engine thread never waits for a connection. Each engine step
uses the `Connection` that is current at that time.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.breaker import Breaker
from outrider.services.target.draft_client.connection import Connection
from outrider.services.target.draft_client.transport.carrier import Carrier, ConnectionLost
from outrider.shared.base.errors import ConfigurationError, OutriderError, ProtocolError
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.feature_projector import FeatureProjector
from outrider.shared.rpc.ipc.doorbells import Side
from outrider.shared.rpc.tensors import join_tensors, split_tensor, wire_dtype
from outrider.shared.rpc.version import MIN_VERSION, VersionOffer, agree_with_ack
from outrider.shared.spec.algorithm import FIELD, Algorithm
from outrider.shared.spec.drafter import FeatureSpec

RETRY_S = 0.1
REFUSED_RETRY_S = 1.0
PROBE_INTERVAL_S = 0.1
KEEP_ALIVE_S = 3.0
MAX_PROJECTOR_BYTES = 1 << 30
"""Limit for the total size of the projector tensors that a draft sends."""

_log = logging.getLogger("outrider.target.draft")

WeightReader = Callable[[str], torch.Tensor]
"""A function that returns a tensor of the target by name, for drafts that borrow weights."""


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """Describes a target in the Hello message that it sends to a draft service.

    Attributes:
        target_id: Identifier of the target, unique per process.
        fingerprint: Fingerprint of the target's weights.
        vocab_size, hidden_size, num_layers: Sizes of the target's model.
        feature_dtype: Data type of the feature rows (hidden states) that the target sends.
        model_type: Family of the target's model.
        tokenizer: Fingerprint of the target's tokenizer.
        algorithm: The drafting algorithm that the draft must use. AUTO accepts any algorithm.
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
    def of(
        cls, decoder: Decoder, tokenizer: str = "", algorithm: Algorithm = Algorithm.AUTO
    ) -> TargetIdentity:
        """Describe a loaded model. `tokenizer` is the `tokenizer_fingerprint` of the model's folder."""
        config = decoder.config
        sizes = (config.vocab_size, config.hidden_size, config.num_layers)
        return cls(
            uuid.uuid4().hex,
            decoder.fingerprint,
            *sizes,
            decoder.dtype,
            config.model_type,
            tokenizer,
            algorithm,
        )


def _check_algorithm(asked: Algorithm, found: str) -> None:
    """Check that the draft's algorithm is the one that this target expects.

    Raises:
        ConfigurationError: The algorithms differ. The message names the two algorithms.
    """
    wanted = {
        Algorithm.NEXTN: (Algorithm.MTP.value,),
        # Without a draft head, the algorithm EAGLE means that the target's own MTP layers draft.
        Algorithm.EAGLE: (Algorithm.EAGLE.value, Algorithm.MTP.value),
    }.get(asked, (asked.value,))
    if asked is not Algorithm.AUTO and found not in wanted:
        raise ConfigurationError(
            f"This target expects speculative_algorithm {asked.value}, but the draft reports "
            f"{found or 'an unknown kind'}. Start the draft with --speculative-algorithm {asked.value}, "
            "or remove the option from the target.",
            field=FIELD,
        )


class DraftLink:
    """Maintains the connection to one draft service on a separate thread.

    Args:
        address: The draft service's address, for logs.
        identity: Describes this target in the handshake.
        weight: Function that returns a weight tensor of the target, for drafts that borrow the target's
            weights.
        breaker: Circuit breaker whose `sign_of_life` is called for each answered ping.
        make_carrier: Function that makes the transport of the next connection.

    Attributes:
        connection: The current connection, ready for use. None if there is none.
        ever_connected: True once a connection has been made.
        connections_lost: How often a connection has been lost.
        refusal: The reason why the draft and this target do not match. None if they match, or if no draft has
            answered.
    """

    def __init__(
        self,
        address: str,
        identity: TargetIdentity,
        weight: WeightReader,
        breaker: Breaker,
        make_carrier: Callable[[], Carrier],
    ) -> None:
        # Only the link and the engine refer to a connection. The memory of an ended connection is therefore
        # freed even while the engine is idle.
        self.connection: Connection | None = None
        self.ever_connected = False
        self.connections_lost = 0
        self.refusal: OutriderError | None = None
        self._address = address
        self._identity = identity
        self._weight = weight
        self._breaker = breaker
        self._make_carrier = make_carrier
        self._specs: dict[str, FeatureSpec] = {}
        self._closed = threading.Event()
        self._current: Connection | None = None
        self._thread = threading.Thread(target=self._keep_connected, name="draft-link", daemon=True)

    def start(self) -> None:
        """Start the thread that connects."""
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
            connection = self._current = Connection(self._make_carrier())
            try:
                self._converse(connection)
            except ConnectionLost:
                self._closed.wait(RETRY_S)
            except OutriderError as error:
                self.refusal = error
                _log.error("the draft at %s cannot be used: %s", self._address, error.message)
                self._closed.wait(REFUSED_RETRY_S)
            except Exception:  # Nothing that a peer sends may end the thread that reconnects.
                _log.exception("the connection to the draft at %s failed", self._address)
                self._closed.wait(REFUSED_RETRY_S)
            finally:
                connection.close()
                connection.carrier.release()

    def _converse(self, connection: Connection) -> None:
        """Run one connection from the handshake to its end, and then return or raise an exception."""
        if self._closed.is_set():
            return
        self._shake_hands(connection)
        probe = threading.Thread(target=self._probe, args=(connection,), name="draft-probe", daemon=True)
        probe.start()
        self._breaker.reset()
        self.refusal = None
        self.ever_connected = True
        self.connection = connection
        _log.info("connected to the draft at %s with protocol %s", self._address, connection.agreed)

        def on_pong(pong: draft_pb2.Pong) -> None:
            connection.last_pong = pong.nonce
            connection.last_sign_s = time.monotonic()
            self._breaker.sign_of_life(connection.last_sign_s)

        reason = "it ended the connection"
        try:
            connection.carrier.follow(on_pong)
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise
        finally:
            self.connection = None
            connection.close()
            probe.join(5.0)
            if not self._closed.is_set():
                self.connections_lost += 1
                _log.warning(
                    "lost the draft at %s (%s); decoding without drafts until it is back",
                    self._address,
                    reason,
                )

    def _shake_hands(self, connection: Connection) -> None:
        identity, carrier = self._identity, connection.carrier
        hello = draft_pb2.Hello(
            target_id=identity.target_id,
            target_fingerprint=identity.fingerprint,
            tokenizer_fingerprint=identity.tokenizer,
            model_type=identity.model_type,
            vocab_size=identity.vocab_size,
            hidden_size=identity.hidden_size,
            num_layers=identity.num_layers,
            feature_dtype=wire_dtype(identity.feature_dtype),
        )
        VersionOffer.ours(Side.TARGET).write(hello, MIN_VERSION)
        ack = carrier.hello(hello)
        agreed = connection.agreed = agree_with_ack(ack)
        _check_algorithm(identity.algorithm, ack.algorithm)
        connection.spec = self._feature_spec(carrier, ack)
        if ack.missing_tensors:
            self._send_weights(carrier, ack.missing_tensors)
        carrier.open_bulk(identity.target_id, agreed.features)
        if ack.HasField("uptime_s"):
            connection.draft_began_s = time.monotonic() - ack.uptime_s
        connection.hello = ack

    def _feature_spec(self, carrier: Carrier, ack: draft_pb2.HelloAck) -> FeatureSpec:
        """Return the features that the draft wants.

        The weights of the projector are fetched only if their fingerprint is new.
        """
        key = f"{ack.projector_fingerprint}/{list(ack.aux_layer_ids)}/{ack.feature_size}"
        known = self._specs.get(key)
        if known is not None:
            return known
        tensors: dict[str, torch.Tensor] = {}
        for name in ack.projector_tensors:
            tensors |= dict(join_tensors(carrier.get_tensor(name), max_bytes=MAX_PROJECTOR_BYTES))
        missing = set(ack.projector_tensors) - set(tensors)
        if missing:
            raise ProtocolError(
                f"the draft did not send the projector tensor {sorted(missing)[0]}", field="projector_tensors"
            )
        spec = FeatureSpec(
            aux_layer_ids=tuple(ack.aux_layer_ids),
            final_hidden=ack.feature_size > 0 and not ack.aux_layer_ids,
            feature_size=ack.feature_size,
            projector=tensors,
            norm_eps=ack.projector_norm_eps or FeatureSpec().norm_eps,
            fingerprint=key,
        )
        if spec.feature_size:  # Find a misfit here, on the link's thread, rather than on the engine's thread.
            FeatureProjector(
                spec,
                "cpu",
                torch.float32,
                hidden_size=self._identity.hidden_size,
                num_layers=self._identity.num_layers,
            )
        self._specs[key] = spec
        return spec

    def _send_weights(self, carrier: Carrier, names: Iterable[str]) -> None:
        reply = carrier.put_tensors(
            chunk for name in names for chunk in split_tensor(name, self._weight(name))
        )
        if reply.still_missing:
            raise ProtocolError(
                f"the draft still reports {reply.still_missing[0]} as missing", field="missing_tensors"
            )

    def _probe(self, connection: Connection) -> None:
        """Ping the draft: often while the breaker is open, otherwise just often enough to renew the lease.

        At most one ping is outstanding, so pings do not pile up while a draft is paused.
        """
        nonce = 0
        last_ping = time.monotonic()
        # The interval is short enough for a live draft to answer a ping before the draft counts as faulty.
        interval_s = min(KEEP_ALIVE_S, self._breaker.fault_deadline_s / 2)
        while not connection.ended.wait(PROBE_INTERVAL_S):
            now = time.monotonic()
            due = self._breaker.wants_probe(now) or now - last_ping >= interval_s
            if due and connection.last_pong == nonce:
                last_ping = now
                nonce += 1
                connection.carrier.ping(draft_pb2.SessionRequest(ping=draft_pb2.Ping(nonce=nonce)))
