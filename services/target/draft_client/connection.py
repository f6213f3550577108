"""One life of the streams to a remote draft, whatever carries them: gRPC, or sockets of this host."""

from __future__ import annotations

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.transport.carrier import Carrier
from outrider.shared.spec.drafter import FeatureSpec


class Connection:
    """A carrier and what was agreed over it."""

    def __init__(self, carrier: Carrier) -> None:
        self.hello: draft_pb2.HelloAck | None = None
        self.spec: FeatureSpec | None = None
        self.ended = carrier.ended
        self.last_pong = 0
        self.last_sign_s = 0.0
        self.carrier = carrier
        self.send = carrier.send
        self.receive = carrier.receive
        self.close = carrier.close
