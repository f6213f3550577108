"""The draft's prefix cache: KV rows of ended and running sessions, with which other sessions can begin.

The cache is a tree of full pages (`shared.kv.prefix_cache`). A page is found by two keys: the tokens that its
KV rows were computed from, and the session's salt. The salt includes the target.

If a target's own stored rows turn out to be wrong, the target removes them. The draft's rows for the same
tokens must then not be used either. A session therefore uses the draft's stored rows only for tokens that its
target has stored too. The draft removes stored rows beyond these tokens.

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
        enabled: If False, nothing is stored and nothing is found.
    """

    def __init__(self, pool: KVPool, *, enabled: bool) -> None:
        self._pool = pool
        self._cache = PrefixCache(pool.allocator, pool.page_size, enabled=enabled)
        self._sharing: dict[int, Session] = {}  # by id(), because sessions are not hashable

    def shares(self, session: Session) -> bool:
        """Return True if a session may use stored rows, and if its rows may be stored."""
        return self._cache.enabled and session.cache_salt is not None and session.row_source in _AHEAD

    def begin(self, session: Session, stored_len: int) -> int:
        """Lease the stored KV rows with which a session can begin, and return their number.

        Args:
            session: A new session without a lease, which may use stored rows.
            stored_len: Number of leading rows that may be used. If more rows of these tokens are stored, the
                further rows are removed from the cache.
        """
        for other in self._sharing.values():
            self._share(other)
        tokens, salt = _Keys(session), _salt_of(session)
        self._cache.forget(tokens, stored_len, salt)
        match = self._cache.match(tokens, max(0, min(stored_len, session.num_rows - 1)), salt)
        if not match.nodes or not self._lease(session, match, len(match.nodes) + 1):
            return 0
        return len(match.nodes) * self._pool.page_size

    def lease(self, session: Session, num_pages: int) -> bool:
        """Lease new pages for a session that has none. Return False if too few are free."""
        if self.shares(session):
            return self._lease(session, PrefixMatch(_salt_of(session)), num_pages)
        session.lease = self._pool.allocator.allocate(num_pages)
        return session.lease is not None

    def end(self, session: Session) -> None:
        """End the lease of a session, and store its full pages. Pages of a spoiled session are not stored."""
        lease, session.lease = session.lease, None
        if lease is None:
            return
        if self._sharing.pop(id(session), None) is not None and session.spoiled:
            self._cache.disown(lease)
        self._cache.end(lease, _Keys(session, session.cached_rows), session.cached_rows)

    def _lease(self, session: Session, match: PrefixMatch, num_pages: int) -> bool:
        session.lease = self._cache.lease(match, num_pages)
        if session.lease is None:
            return False
        self._sharing[id(session)] = session
        return True

    def _share(self, session: Session) -> None:
        """Let other sessions find the rows that a running session has computed."""
        if session.lease is not None and session.cached_rows // self._pool.page_size > session.lease.shared:
            self._cache.share(session.lease, _Keys(session, session.cached_rows))


_AHEAD = {RowSource.TOKENS: 0, RowSource.FEATURES: 1}
"""The position of the last token that a row depends on, relative to the position of the row."""


class _Keys(Sequence[int]):
    """For each row of a session, the last token that the row depends on. A view, without a copy.

    Args:
        session: The session.
        rows: Number of rows. By default, all rows of the session's tokens.
    """

    def __init__(self, session: Session, rows: int | None = None) -> None:
        self._tokens = session.tokens
        self._ahead = _AHEAD[session.row_source]
        self._rows = session.num_rows if rows is None else rows

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


def _salt_of(session: Session) -> str:
    """Return the salt of a session's tree: its own salt, and the tokens that are in no key."""
    return f"{session.tokens[: _AHEAD[session.row_source]]} {session.cache_salt}"
