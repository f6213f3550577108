"""One target of the pool: its connection and its work."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.services.gateway.target_client.client import TargetClient


@dataclass(eq=False, slots=True)
class Member:
    """A target in the gateway's pool of targets, with the gateway's own data about it.

    Attributes:
        client: The connection to the target.
        listed: Whether the target's address is still in the settings. If not, the target gets no new
            sequences.
        load: Work that the gateway's sequences still need on this target, in tokens.
        placed: Number of sequences that the gateway has placed on this target so far.
        running: Number of the gateway's sequences that run on this target.
    """

    client: TargetClient
    listed: bool = True
    load: int = 0
    placed: int = 0
    running: int = 0

    @property
    def address(self) -> str:
        """The target's address."""
        return self.client.address

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the target's metrics."""
        info = self.client.known_info
        return {"model": "" if info is None else info.model_id, "target": self.address}

    @property
    def model_key(self) -> tuple[str, str]:
        """Identifies the model and its data type. Targets with equal keys generate the same tokens."""
        info = self.client.known_info
        return ("", "") if info is None else (info.fingerprint or info.model_id, info.dtype)
