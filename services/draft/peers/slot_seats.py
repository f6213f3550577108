"""The slots of one target: the session in each slot, and the tokens that rounds add to the sessions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.growth.slot_groups import SlotGroups
from outrider.services.draft.sessions.feature_queue import FeatureQueue
from outrider.services.draft.sessions.session import RowSource, Session

RAN_KEPT = 16
"""Number of rounds whose slots are kept. The target reports a round at most two rounds later."""


class SlotSeats:
    """Assigns sessions to the slots that one target has opened at the draft. Engine thread only.

    The assignment lasts for one *series* of rounds, which ends when a round fails.

    Args:
        num_slots: Number of slots.
        groups: Receives the tokens that the target's passes chose.
        follows: Function that returns True if the draft still follows the given session.

    Attributes:
        series: The number of the current series; 0 before the first series.
        ended: True if the current series has ended. Its further rounds are refused.
    """

    def __init__(self, num_slots: int, groups: SlotGroups, follows: Callable[[Session], bool]) -> None:
        self.num_slots = num_slots
        self.series = 0
        self.ended = True
        self._groups = groups
        self._follows = follows
        self._seats: dict[int, Session] = {}
        # Maps the number of each recent round to the sessions that drafted in it, by slot.
        self._ran: OrderedDict[int, Mapping[int, Session]] = OrderedDict()

    def begin(self, series: int) -> None:
        """Start a series with empty slots."""
        self.end()
        self.series, self.ended = series, False

    def end(self) -> None:
        """End the series and empty the slots. The sessions keep the rows that the target has reported."""
        for session in self._seats.values():
            self._release(session)
        self._seats.clear()
        self._ran.clear()
        self.ended = True

    @property
    def live(self) -> bool:
        """True if any slot has a session."""
        return any(self._follows(session) for session in self._seats.values())

    def session(self, slot: int) -> Session | None:
        """Return the session in a slot, unless it has ended."""
        session = self._seats.get(slot)
        return session if session is not None and self._follows(session) else None

    def join(self, slot: int, session: Session) -> None:
        """Put a session into a slot."""
        self._seats[slot] = session

    def leave(self, slots: Iterable[int]) -> None:
        """Empty slots. The sessions continue with commits."""
        for slot in slots:
            session = self._seats.pop(slot, None)
            if session is not None:
                self._release(session)

    def ran(self, number: int, sessions: Mapping[int, Session]) -> None:
        """Note the sessions that drafted in a round, by slot."""
        self._ran[number] = sessions
        while len(self._ran) > RAN_KEPT:
            self._ran.popitem(last=False)

    def add_tokens(
        self, told: Sequence[draft_pb2.SlotTokens], *, max_len: int, vocab_size: int
    ) -> list[Session]:
        """Append the tokens of passes. Return the sessions that the draft can no longer follow."""
        lost: list[Session] = []
        for tokens in told:
            session = self.session(tokens.slot)
            if session is None or session in lost:
                continue
            drafted = tokens.number > 0
            if (
                tokens.base_len != session.committed_len
                or session.committed_len + len(tokens.token_ids) > max_len
                or any(token >= vocab_size for token in tokens.token_ids)
                or (drafted and self._ran.get(tokens.number, {}).get(tokens.slot) is not session)
            ):
                lost.append(session)
                del self._seats[tokens.slot]
                continue
            self._groups.committed(session, list(tokens.token_ids), drafted=drafted)
        return lost

    def _release(self, session: Session) -> None:
        session.engaged = False
        session.last_state = None
        if session.row_source is RowSource.FEATURES and not session.features.available:
            session.features = FeatureQueue(session.cached_rows)
