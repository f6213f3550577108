"""The draft's prefix cache: KV rows of ended and running sessions, with which other sessions can begin.

The cache is a tree of full pages (`shared.kv.prefix_cache`). A page is found by two keys: the tokens that its
KV rows were computed from, and the session's salt. The salt includes the target.

If a target's own stored rows turn out to be wrong, the target removes them. The draft's rows for the same
tokens must then not be used either. A session therefore uses the draft's stored rows only for tokens that its
target has stored too. The draft removes stored rows beyond these tokens.

A row of a model with several MTP layers has the K/V of all these layers. A later layer reads a token that is
further ahead, so the row depends on more tokens. The newest rows still lack the K/V of the later layers, and
are not stored.

A session leases all pages that it reads. If pages are needed, the least recently used pages without a lease
are evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from outrider.services.draft.sessions.session import RowSource, Session
from outrider.shared.kv.pool import KVPool
from outrider.shared.kv.prefix_cache import PrefixCache, PrefixMatch


class StoredRows:
    """The stored KV rows of one drafting strategy, and the leases of its sessions. Engine thread only.

    Args:
        pool: The strategy's KV pool.
        rewind: The strategy's `StrategyInfo.rewind`. This number of a session's newest rows is incomplete.
    """

    def __init__(self, pool: KVPool, rewind: int = 0) -> None:
        self._pool = pool
        self._rewind = rewind
        self._cache = PrefixCache(pool.allocator, pool.page_size)
        self._sharing: dict[int, Session] = {}  # by id(), because sessions are not hashable

    def shares(self, session: Session) -> bool:
        """Return True if a session may use stored rows, and if its rows may be stored."""
        return session.cache_salt is not None and session.row_source in _AHEAD

    def begin(self, session: Session, stored_len: int) -> int:
        """Lease the stored KV rows with which a session can begin, and return their number.

        Args:
            session: A new session without a lease, which may use stored rows.
            stored_len: Number of leading rows that may be used. If more rows of these tokens are stored, the
                further rows are removed from the cache.
        """
        for other in self._sharing.values():
            self._share(other)
        tokens, salt = self._keys(session, session.num_rows), self._salt_of(session)
        self._cache.forget(tokens, stored_len, salt)
        # One row is left to compute, because growing a tree needs its state.
        match = self._cache.match(tokens, max(0, min(stored_len, len(tokens) - 1)), salt)
        if not match.nodes or not self._lease(session, match, len(match.nodes) + 1):
            return 0
        return len(match.nodes) * self._pool.page_size

    def lease(self, session: Session, num_pages: int) -> bool:
        """Lease new pages for a session that has none. Return False if too few are free."""
        if self.shares(session):
            return self._lease(session, PrefixMatch(self._salt_of(session)), num_pages)
        session.lease = self._pool.allocator.allocate(num_pages)
        return session.lease is not None

    def end(self, session: Session) -> None:
        """End the lease of a session, and store its full pages. Pages of a spoiled session are not stored."""
        lease, session.lease = session.lease, None
        if lease is None:
            return
        if self._sharing.pop(id(session), None) is not None and session.spoiled:
            self._cache.disown(lease)
        tokens = self._keys(session, session.cached_rows)
        self._cache.end(lease, tokens, len(tokens))

    def _lease(self, session: Session, match: PrefixMatch, num_pages: int) -> bool:
        session.lease = self._cache.lease(match, num_pages)
        if session.lease is None:
            return False
        self._sharing[id(session)] = session
        return True

    def _share(self, session: Session) -> None:
        """Let other sessions find the rows that a running session has computed."""
        tokens = self._keys(session, session.cached_rows)
        if session.lease is not None and len(tokens) // self._pool.page_size > session.lease.shared:
            self._cache.share(session.lease, tokens)

    def _keys(self, session: Session, num_rows: int) -> _Keys:
        """Return the keys of a session's complete rows, if the first MTP layer has `num_rows` rows."""
        return _Keys(session.tokens, self._ahead(session), max(0, num_rows - self._rewind))

    def _salt_of(self, session: Session) -> str:
        """Return the salt of a session's tree: its own salt, and the tokens that are in no key."""
        return f"{session.tokens[: self._ahead(session)]} {session.cache_salt}"

    def _ahead(self, session: Session) -> int:
        return _AHEAD[session.row_source] + self._rewind


_AHEAD = {RowSource.TOKENS: 0, RowSource.FEATURES: 1}
"""The position of the last token that a row of one layer depends on, relative to the position of the row."""


class _Keys(Sequence[int]):
    """For each of a session's first rows, the last token that the row depends on. A view, without a copy.

    Args:
        tokens: The session's tokens.
        ahead: Position of the last token that a row depends on, relative to the position of the row.
        rows: Number of rows.
    """

    def __init__(self, tokens: Sequence[int], ahead: int, rows: int) -> None:
        self._tokens = tokens
        self._ahead = ahead
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, int):
            return self._tokens[index + self._ahead]
        start, stop, _ = index.indices(self._rows)
        return self._tokens[start + self._ahead : stop + self._ahead]
