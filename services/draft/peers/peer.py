"""One session stream of a target in another process, and where its replies go."""

from __future__ import annotations

from typing import Protocol

from outrider.services.draft.peers.replies import Reply
from outrider.services.draft.sessions.session import PeerId


class Outlet(Protocol):
    """Where the replies to one target go. Called on the engine thread; never waits."""

    def send(self, reply: Reply) -> None:
        """Send a reply; a target that does not read is hung up on."""
        ...

    def end(self) -> None:
        """End the stream."""
        ...


class Peer:
    """One session stream: who is on the other end, and where its replies go."""

    def __init__(self, peer_id: PeerId, target_id: str, outlet: Outlet) -> None:
        self.id = peer_id
        self.target_id = target_id
        self.send = outlet.send
        self.end = outlet.end
