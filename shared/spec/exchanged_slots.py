"""Interface for rounds with a drafter in another process: the target's device sends states, receives trees.

`shared.spec.resident` defines the terms state, slot, group and tree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.shared.spec.resident import GroupSize, RoundState
from outrider.shared.spec.tree import DraftBatch, DraftShape


@dataclass(frozen=True, slots=True)
class ExchangedGroup:
    """A group of slots: the draft sessions that draft with the same tree shape in a round.

    Attributes:
        shape: Shape of every tree.
        batch_size: Number of rows. Rows after the sessions are idle.
        columns: Largest number of tokens that the last verify pass may have added to a session.
        session_ids: The session of each row.
        committed_upper: For each session, an upper bound of the number of its committed tokens at the start
            of the round.
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


class TreeExchange(Protocol):
    """One round whose draft trees come from another process.

    Attributes:
        number: The number of the round, at least 1.
        states: The state of each group. The caller fills the states in stream order before `exchange`.
        refused: Ids of sessions that cannot draft in this round. The rows of these sessions must be idle.
    """

    number: int
    states: Sequence[RoundState]
    refused: Collection[int]

    def exchange(self, limit_s: float | None, ahead: bool) -> None:
        """Send the round states and receive the draft trees, in stream order.

        This method is never captured in a CUDA graph. Some implementations block the host until the trees
        have arrived, and others only enqueue the wait. If the trees do not arrive within the limit, `trees`
        returns trees of one node.

        Args:
            limit_s: Longest time that the device may wait for the trees. With None, the device waits as long
                as rows in speculation mode `on` may wait.
            ahead: True if the device may wait for the host's work in `send_state` and `receive_trees`.
                Between `exchange` and these calls, the caller may then enqueue only work that has run before.
                The first run of a kernel could make the host wait for the device.
        """
        ...

    def trees(self, group: int) -> DraftBatch:
        """Enqueue the check of the received trees of a group, and return the checked trees, ``[G, N]``."""
        ...


class ExchangedSlots(Protocol):
    """The slots of a drafter in another process, and the rounds of the sessions in these slots.

    Use this object on the engine thread only. After every `TreeExchange.exchange`, call `send_state` and
    `receive_trees`, even if enqueuing other work in between raises an error.
    """

    @property
    def others_s(self) -> float:
        """Longest wait, in seconds, for the trees of a round that has rows in another mode than `on`."""
        ...

    def are_open(self) -> bool:
        """Return True if rounds can be exchanged now. Implementations must be cheap: every step calls this.

        The result is False without a connection, and during the pause that follows late rounds or a fault. It
        is also False while rounds may wait no longer in vain.
        """
        ...

    def fits(self, sizes: Sequence[GroupSize]) -> bool:
        """Return True if a round with groups of these sizes can be exchanged now."""
        ...

    def obstacle(self, session_id: int, shape: DraftShape, *, must_wait: bool) -> str:
        """Return the reason why a session cannot draft in the next round, or an empty string.

        The reason is `AWAITED` if the session's row must wait for its tree and the session can draft soon.
        """
        ...

    def begin(self, groups: Sequence[ExchangedGroup]) -> TreeExchange | None:
        """Announce the next round to the drafter. Each session without a slot gets a slot.

        Before this call, send the drafter all committed tokens and feature rows that the host has read, for
        each session without a slot.

        Returns:
            The round, or None if no session can draft.
        """
        ...

    def chosen(self, session_id: int, number: int, base_len: int, tokens: Sequence[int]) -> None:
        """Report to the drafter the tokens that a verify pass chose for a session in a slot.

        Args:
            session_id: The session. Sessions without a slot are ignored.
            number: The number of the round in which the session drafted; 0 if it did not draft.
            base_len: Number of committed tokens before `tokens`.
            tokens: The chosen tokens. Tokens after the end of the sequence are left out.
        """
        ...

    def left(self, session_ids: Iterable[int]) -> None:
        """Free the slots of sessions. Later tokens of these sessions are sent as commits."""
        ...

    def flush(self) -> None:
        """Send all queued messages to the drafter."""
        ...

    def await_reply(self, seconds: float) -> None:
        """Wait until the drafter sends a message, for at most `seconds`."""
        ...

    def measure(self, number: int, waited_s: float) -> None:
        """Judge the wait for the trees of a round.

        Call this method after the host has read the results of the verify pass.

        Args:
            number: The number of the round.
            waited_s: Seconds of drafting in this round, which include the wait.
        """
        ...

    def send_state(self) -> None:
        """Do the host's part, if any, of sending the states. Wait until the previous round has ended."""
        ...

    def receive_trees(self, wanted: bool) -> None:
        """Do the host's part, if any, of receiving the trees. Waits for the trees only if `wanted`."""
        ...

    def record(self, size: GroupSize, shape: DraftShape) -> None:
        """Announce a group size, so that the drafter records the graph for this size in advance."""
        ...
