"""Random messages to a session table: its invariants hold after each one, whatever is lost or repeated."""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from support.drafts.session_table import PEER, VOCAB, Table, ask, commit_of, opening, rows_of

from outrider.services.draft.sessions.session import MessageVerdict
from outrider.shared.spec.drafter import Commit, SequenceOpen


class Sessions(RuleBasedStateMachine):
    """Random traffic of one target with lost, repeated and reordered messages; its view is the truth."""

    truths: Bundle[int] = Bundle("truths")

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.truth: dict[int, list[int]] = {}
        self.epoch: dict[int, int] = {}
        self.sent: list[tuple[str, object]] = []
        self.now = 0.0

    @initialize()
    def begin(self) -> None:
        self.table.touch(PEER, self.now)

    def deliver(self, kind: str, message: object) -> None:
        self.now += 0.01
        self.table.touch(PEER, self.now)
        if kind == "open":
            assert isinstance(message, SequenceOpen)
            self.table.open(PEER, message, self.now)
        elif kind == "commit":
            assert isinstance(message, Commit)
            answer = self.table.commit(PEER, message, ask(), self.now)
            if answer.verdict is MessageVerdict.RESYNC:
                assert self.table.get(PEER, message.fence.session_id) is None
        else:
            session_id, epoch, base, rows = message  # type: ignore[misc]
            self.table.add_features(PEER, session_id, epoch, base, rows, self.now)

    def send(self, kind: str, message: object, fate: str) -> None:
        self.sent.append((kind, message))
        if fate != "lost":
            self.deliver(kind, message)
        if fate == "twice":
            self.deliver(kind, message)

    fates = st.sampled_from(["once", "once", "once", "twice", "lost"])

    @rule(
        target=truths,
        session_id=st.integers(0, 4),
        tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
        fate=fates,
    )
    def open(self, session_id: int, tokens: list[int], fate: str) -> int:
        self.truth[session_id] = list(tokens)
        self.epoch[session_id] = self.epoch.get(session_id, 0) + 1
        self.send("open", opening(tokens, session_id, self.epoch[session_id]), fate)
        return session_id

    @rule(session_id=truths, parts=st.integers(1, 3), fate=fates)
    def send_features(self, session_id: int, parts: int, fate: str) -> None:
        tokens = self.truth[session_id]
        size = -(-len(tokens) // parts)
        for base in range(0, len(tokens), size):
            rows = rows_of(tokens, base, min(len(tokens), base + size))
            self.send("features", (session_id, self.epoch[session_id], base, rows), fate)

    @rule(
        session_id=truths,
        fresh=st.lists(st.integers(0, VOCAB - 1), min_size=0, max_size=4),
        overlap=st.integers(0, 3),
        fate=fates,
    )
    def commit(self, session_id: int, fresh: list[int], overlap: int, fate: str) -> None:
        tokens = self.truth[session_id]
        base_len = max(1, len(tokens) - overlap)
        tokens.extend(fresh)
        self.send("commit", commit_of(list(tokens), base_len, session_id, self.epoch[session_id]), fate)

    @rule(which=st.integers(0, 10**6))
    def replay_something_old(self, which: int) -> None:
        if self.sent:
            self.deliver(*self.sent[which % len(self.sent)])

    @rule(session_id=st.integers(0, 4))
    def close(self, session_id: int) -> None:
        self.table.close(PEER, session_id)

    @rule()
    def draft(self) -> None:
        ready = self.table.ready()
        self.table.extend_all()
        for session in ready:
            assert session.cached_rows == session.committed_len - 1
            session.ask = None

    @rule(silence_s=st.sampled_from([0.5, 2.0, 11.0]))
    def wait(self, silence_s: float) -> None:
        self.now += silence_s
        self.table.expire(self.now)

    @invariant()
    def sessions_hold_true_prefixes_and_pages_add_up(self) -> None:
        self.table.check()
        for session in self.table:
            if session.epoch == self.epoch[session.session_id]:
                assert session.tokens == self.truth[session.session_id][: session.committed_len]

    def teardown(self) -> None:
        self.table.drop_peer(PEER)
        self.table.check()
        assert self.table.pages.held_pages == 0


TestSessions = Sessions.TestCase
TestSessions.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
