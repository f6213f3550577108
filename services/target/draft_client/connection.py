"""One connection to a draft over any transport: the carrier of messages and the results of the handshake."""

from __future__ import annotations

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.transport.carrier import Carrier
from outrider.shared.rpc.version import Agreed, Feature
from outrider.shared.spec.drafter import FeatureSpec


class Connection:
    """A connection to a draft service: its transport, and the results of its handshake.

    Attributes:
        hello: The draft's answer to the Hello message. None before the handshake.
        agreed: The protocol version and the protocol features of this connection. None before the handshake.
        spec: Describes the hidden states that the draft wants to receive. None before the handshake.
        ended: An event that is set once the connection has ended.
        last_pong: Nonce of the last answered ping.
        draft_began_s: Time at which the draft's process began to load, on this process's `time.monotonic()`.
            None before the handshake, and for a draft of a release that does not report it.
        last_sign_s: Time at which the last ping was answered, from `time.monotonic()`.
        carrier: The transport that carries the messages.
        send, receive, close: The methods of `carrier` with the same names.
    """

    def __init__(self, carrier: Carrier) -> None:
        self.hello: draft_pb2.HelloAck | None = None
        self.agreed: Agreed | None = None
        self.spec: FeatureSpec | None = None
        self.ended = carrier.ended
        self.last_pong = 0
        self.draft_began_s: float | None = None
        self.last_sign_s = 0.0
        self.carrier = carrier
        self.send = carrier.send
        self.receive = carrier.receive
        self.close = carrier.close

    def has(self, feature: Feature) -> bool:
        """Return True if both sides support a feature of the protocol."""
        return self.agreed is not None and feature in self.agreed.features
