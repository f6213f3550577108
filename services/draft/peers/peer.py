"""One session stream of a target in another process: its ids, and the outlet for replies."""

from __future__ import annotations

from typing import Protocol

from outrider.services.draft.peers.replies import Reply
from outrider.services.draft.sessions.session import PeerId


class Outlet(Protocol):
    """Sends replies to one target. Called on the engine thread; never blocks."""

    def send(self, reply: Reply) -> None:
        """Send a reply. If the target does not read its replies, end the stream."""
        ...

    def end(self) -> None:
        """End the stream."""
        ...


class Peer:
    """One session stream: ids of the stream and its target, and functions to reply and to end the stream."""

    def __init__(self, peer_id: PeerId, target_id: str, outlet: Outlet) -> None:
        self.id = peer_id
        self.target_id = target_id
        self.send = outlet.send
        self.end = outlet.end
