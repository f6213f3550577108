"""Stored rows against a model: a session that begins with stored rows has the rows of its own tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outrider.services.draft.sessions.feature_queue import FeatureQueue
from outrider.services.draft.sessions.session import PeerId, RowSource, Session
from outrider.services.draft.sessions.stored_rows import StoredRows
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.fence import FNV_OFFSET, extend_prefix_hash

PAGE, PAGES = 4, 24
SALTS = ("", "a", None)
AHEAD = {RowSource.FEATURES: 1, RowSource.TOKENS: 0}

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=30)


def new_session(
    tokens: list[int], salt: str | None, source: RowSource = RowSource.FEATURES, number: int = 0
) -> Session:
    queue = FeatureQueue()
    return Session(PeerId(1), number, 1, tokens, 0, 0, 0.0, 0, queue, 0.0, row_source=source, cache_salt=salt)


class Machine(RuleBasedStateMachine):
    """Sessions of a draft whose KV contains, for each row, a number that identifies the row's tokens."""

    source = RowSource.FEATURES
    rewind = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(PAGES, PAGE, 1, 1, 1, torch.float64, "cpu")
        self.stored = StoredRows(self.pool, self.rewind)
        self.rows: dict[int, int] = {}  # slot -> content
        self.live: list[Session] = []

    def content(self, session: Session, row: int) -> int:
        start = FNV_OFFSET + hash(session.cache_salt) % 1000
        return extend_prefix_hash(start, session.tokens[: row + 1 + AHEAD[self.source] + self.rewind])

    def slots(self, session: Session) -> list[int]:
        lease = session.lease
        return [] if lease is None else self.pool.token_slots(lease, 0, self.complete(session))

    def complete(self, session: Session) -> int:
        """Return the number of rows that all layers have computed."""
        return max(session.inherited_rows, session.cached_rows - self.rewind)

    def compute(self, session: Session, count: int) -> None:
        """Add up to `count` rows, in new pages if needed. Do nothing if no page is free."""
        stop = min(session.num_rows, session.cached_rows + count)
        if session.lease is None and not self.stored.lease(session, 1):
            return
        assert session.lease is not None
        if self.pool.reserve(session.lease, stop):
            for row in range(self.complete(session), stop):
                assert row // PAGE >= session.lease.shared, "a shared page must not be written"
                (slot,) = self.pool.token_slots(session.lease, row, row + 1)
                self.rows[slot] = self.content(session, row)
            session.cached_rows = stop

    def pick(self, data: st.DataObject) -> Session | None:
        return data.draw(st.sampled_from(self.live)) if self.live else None

    @rule(tokens=tokens, salt=st.sampled_from(SALTS), stored_len=st.integers(0, 40), rows=st.integers(0, 30))
    def open(self, tokens: list[int], salt: str | None, stored_len: int, rows: int) -> None:
        session = new_session(tokens, salt, self.source)
        if self.stored.shares(session):
            session.cached_rows = session.inherited_rows = self.stored.begin(session, stored_len)
        assert session.cached_rows <= max(0, min(stored_len, session.num_rows - 1 - self.rewind))
        self.live.append(session)
        self.compute(session, rows)

    @rule(data=st.data(), tokens=tokens, rows=st.integers(1, 30))
    def go_on(self, data: st.DataObject, tokens: list[int], rows: int) -> None:
        if (session := self.pick(data)) is not None:
            session.tokens.extend(tokens)
            self.compute(session, rows)

    @rule(data=st.data(), spoiled=st.booleans())
    def close(self, data: st.DataObject, spoiled: bool) -> None:
        if (session := self.pick(data)) is None:
            return
        self.live = [one for one in self.live if one is not session]
        if spoiled:
            readers = [one for one in self.live if set(self.slots(one)) & set(self.slots(session))]
            if not readers:
                for slot in self.slots(session)[self._found(session) :]:
                    self.rows[slot] = -1
            session.spoiled = True
        self.stored.end(session)

    def _found(self, session: Session) -> int:
        """Return the number of rows that a session may share with others, and must not spoil."""
        return 0 if session.lease is None else session.lease.shared * PAGE

    @invariant()
    def every_session_has_its_own_rows(self) -> None:
        for session in self.live:
            found = [self.rows[slot] for slot in self.slots(session)]
            assert found == [self.content(session, row) for row in range(self.complete(session))]

    @invariant()
    def no_page_is_lost(self) -> None:
        self.pool.allocator.check()
        self.stored._cache.check()
        if not any(session.lease for session in self.live):
            assert self.pool.allocator.available_pages == PAGES


class TokenMachine(Machine):
    """Sessions whose rows are computed from tokens alone."""

    source = RowSource.TOKENS


class LayersMachine(Machine):
    """Sessions of a draft with three MTP layers. The second layer has one row fewer, the third layer two."""

    rewind = 2


Machine.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=25, deadline=None)
TokenMachine.TestCase.settings = Machine.TestCase.settings
LayersMachine.TestCase.settings = Machine.TestCase.settings
TestRowsOfFeatures = Machine.TestCase
TestRowsOfTokens = TokenMachine.TestCase


def ended(stored: StoredRows, pool: KVPool, tokens: list[int], *, spoiled: bool = False) -> None:
    """Let a session compute all of its rows and end."""
    session = new_session(tokens, "")
    session.cached_rows = stored.begin(session, len(tokens))
    assert session.lease is not None or stored.lease(session, 1)
    assert session.lease is not None
    assert pool.reserve(session.lease, session.num_rows)
    session.cached_rows, session.spoiled = session.num_rows, spoiled
    stored.end(session)


@pytest.mark.parametrize(("stored_len", "expected"), [(0, 0), (3, 0), (4, 4), (11, 8), (12, 12), (100, 12)])
def test_a_session_begins_with_the_pages_that_its_target_has_too(stored_len: int, expected: int) -> None:
    pool = KVPool(PAGES, PAGE, 1, 1, 1, torch.float32, "cpu")
    stored = StoredRows(pool)
    text = list(range(17))  # 16 rows; the last one is always computed
    ended(stored, pool, text)
    assert stored.begin(new_session(text, ""), stored_len) == expected


@pytest.mark.parametrize("differs", [0, 4, 5, 6])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_row_depends_on_one_further_token_for_each_layer(differs: int, layers: int) -> None:
    pool = KVPool(PAGES, PAGE, 1, 1, 1, torch.float32, "cpu")
    stored = StoredRows(pool, rewind=layers - 1)
    text = list(range(17))
    ended(stored, pool, text)
    text[differs] = 99
    assert stored.begin(new_session(text, ""), 16) == (4 if differs >= 4 + layers else 0)


def test_rows_that_later_layers_have_not_computed_are_neither_stored_nor_used() -> None:
    pool = KVPool(PAGES, PAGE, 1, 1, 1, torch.float32, "cpu")
    stored = StoredRows(pool, rewind=2)
    text = list(range(17))  # 16 rows, of which the third layer has 14
    ended(stored, pool, text)
    assert stored.begin(new_session([*text, 17, 18, 19, 20], ""), 16) == 12
    assert stored.begin(new_session(text[:15], ""), 16) == 8, "the last of 12 complete rows must be computed"


def test_a_target_without_a_prefix_lets_its_rows_be_forgotten_unless_they_are_read() -> None:
    pool = KVPool(PAGES, PAGE, 1, 1, 1, torch.float32, "cpu")
    stored = StoredRows(pool)
    text = list(range(17))
    ended(stored, pool, text)
    reader = new_session(text, "")
    reader.cached_rows = stored.begin(reader, 16)
    assert stored.begin(new_session(text, ""), 0) == 0
    assert stored.begin(new_session(text, ""), 16) == 12, "a session still reads these pages"


def test_spoiled_rows_are_not_stored() -> None:
    pool = KVPool(PAGES, PAGE, 1, 1, 1, torch.float32, "cpu")
    stored = StoredRows(pool)
    ended(stored, pool, list(range(17)), spoiled=True)
    assert pool.allocator.free_pages == PAGES
    assert stored.begin(new_session(list(range(17)), ""), 16) == 0


def test_running_sessions_lend_the_rows_that_they_have_computed() -> None:
    pool = KVPool(PAGES, PAGE, 1, 1, 1, torch.float32, "cpu")
    stored = StoredRows(pool)
    text = list(range(17))
    leader = new_session(text, "")
    stored.begin(leader, 0)
    assert stored.lease(leader, 5)
    leader.cached_rows = 9
    follower = new_session(text, "")
    assert stored.begin(follower, 16) == 8
    leader.spoiled = True
    stored.end(leader)
    assert follower.lease is not None
    assert pool.reserve(follower.lease, 16), "the follower goes on with its pages"
    follower.cached_rows = 16
    assert stored.begin(new_session(text, ""), 16) == 0, "nobody else finds spoiled rows"
    stored._cache.check()
    stored.end(follower)
    pool.allocator.check()
    assert pool.allocator.available_pages == PAGES
