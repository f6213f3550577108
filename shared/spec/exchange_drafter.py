"""The interface of a drafter in another process, with which the target's device exchanges states and trees.

`shared.spec.resident` explains the terms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from outrider.shared.spec.drafter import Drafter
from outrider.shared.spec.resident import GroupSize, RoundState
from outrider.shared.spec.tree import DraftBatch, DraftShape


@dataclass(frozen=True, slots=True)
class ExchangedGroup:
    """The sessions that draft with one shape in a round.

    Attributes:
        shape: Shape of every tree.
        batch_size: Number of rows. Rows after the sessions are idle.
        columns: Largest number of tokens that a session may have chosen in the last pass.
        session_ids: The session of each row.
        committed_upper: For each session, an upper bound of its committed tokens at the start of the round.
    """

    shape: DraftShape
    batch_size: int
    columns: int
    session_ids: Sequence[int]
    committed_upper: Sequence[int]

    @property
    def size(self) -> GroupSize:
        """The sizes of this group."""
        return GroupSize(self.batch_size, self.columns, self.shape.max_nodes)


class ExchangedRound(Protocol):
    """One round whose trees come from another process.

    Attributes:
        number: The number of the round, at least 1.
        states: The state of each group, to be filled in stream order before `exchange`.
        refused: Sessions that cannot draft in this round. Their rows must be idle.
    """

    number: int
    states: Sequence[RoundState]
    refused: Collection[int]

    def exchange(self, limit_s: float | None, ahead: bool) -> None:
        """Send the states and receive the trees, in stream order. Never captured.

        This either blocks the host until the trees have arrived, or only enqueues the wait for them. In both
        cases the wait is bounded. If the trees do not arrive in time, `trees` returns trees of one node.

        Args:
            limit_s: Longest time that the device may wait for the trees. None means to wait as long as rows
                in mode `on` do.
            ahead: True if the device may wait for work that the host does in `hand_over` and `carry`. All
                work that the caller enqueues in between must then have run before. The first run of other
                work could make the host wait for the device while the device waits for the host.
        """
        ...

    def trees(self, group: int) -> DraftBatch:
        """Enqueue the check of the received trees of a group, and return the checked trees, ``[G, N]``."""
        ...


class ExchangedSlots(Protocol):
    """The slots of a drafter in another process, and the rounds of the sessions in them.

    Engine thread only. After `ExchangedRound.exchange`, call `hand_over` and `carry` even if an error occurs
    in between.
    """

    @property
    def others_s(self) -> float:
        """Longest time in seconds for which a round with other rows waits for trees of rows in mode `on`."""
        ...

    def fits(self, sizes: Sequence[GroupSize]) -> bool:
        """Return True if a round with groups of these sizes can be exchanged now."""
        ...

    def obstacle(self, session_id: int, shape: DraftShape, *, must_wait: bool) -> str:
        """Return the reason why a session cannot draft in the next round, or an empty string.

        The reason is `AWAITED` if a session that must wait can draft soon.
        """
        ...

    def begin(self, groups: Sequence[ExchangedGroup]) -> ExchangedRound | None:
        """Announce the next round to the drafter. Sessions without a slot join one.

        A session that joins must have received all committed tokens and feature rows that the host knows.

        Returns:
            The round; None if no session can draft.
        """
        ...

    def chosen(self, session_id: int, number: int, base_len: int, tokens: Sequence[int]) -> None:
        """Pass on the tokens that a pass chose for a session in a slot.

        Args:
            session_id: The session. Sessions without a slot are ignored.
            number: The number of the round in which the session drafted; 0 if it did not draft.
            base_len: Number of committed tokens before these.
            tokens: The tokens, without tokens after a stop.
        """
        ...

    def left(self, session_ids: Iterable[int]) -> None:
        """Free the slots of sessions. Their later tokens come in commits."""
        ...

    def flush(self) -> None:
        """Send the drafter what it has not been told yet."""
        ...

    def await_reply(self, seconds: float) -> None:
        """Wait until the drafter sends a message, for at most `seconds`."""
        ...

    def measure(self, *, exchanged: bool) -> None:
        """Called when a pass was read, with True for a round of these slots."""
        ...

    def hand_over(self) -> None:
        """Do the host's remaining part of sending the state. Wait until the previous round has ended."""
        ...

    def carry(self, wanted: bool) -> None:
        """Do the host's remaining part of receiving the trees. Waits for the trees only if `wanted`."""
        ...

    def record(self, size: GroupSize, shape: DraftShape) -> None:
        """Announce a size of groups, whose graph the drafter records in advance."""
        ...


@runtime_checkable
class ExchangeDrafter(Drafter, Protocol):
    """A drafter in another process that exchanges rounds with this device while `device_resident` is True.

    Attributes:
        slots: The slots of the drafter.
    """

    slots: ExchangedSlots
