"""One API key: its name, its digest, its limits and its permissions, as frozen data."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from outrider.shared.base.generation import SpeculationMode

ALL_MODES = (SpeculationMode.AUTO, SpeculationMode.ON, SpeculationMode.OFF)
ANY_PRIORITY = (-(1 << 31), (1 << 31) - 1)


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """An API key's limits and permissions, with a digest instead of the key itself.

    Attributes:
        name: Name of the key in logs, metrics and messages.
        digest: SHA-256 of the key.
        requests_per_minute: Maximum number of requests per minute. None sets no limit.
        tokens_per_minute: Maximum number of prompt and generated tokens per minute. None sets no limit.
        max_concurrent: Maximum number of sequences that wait or run at the same time. None sets no limit.
        priority: Lowest and highest priority that requests may set.
        modes: Speculation modes that requests may use. If AUTO is not among them, the first mode replaces
            AUTO.
        models: Names of the models that requests may use. None allows all models.
        admin: Whether the key may call the admin routes.
        cache_salt: Salt of the prefix cache. Requests share cached prompts only with requests that have the
            same salt.
    """

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    priority: tuple[int, int] = (0, 0)
    modes: tuple[SpeculationMode, ...] = ALL_MODES
    models: frozenset[str] | None = None
    admin: bool = False
    cache_salt: str = ""

    @classmethod
    def unlimited(cls, name: str, key: str, *, admin: bool) -> KeyEntry:
        """Return the entry of an API key without limits.

        Keys that come from a flag, or from a file with one key per line, have no limits.
        """
        return cls(name, digest_of(key), priority=ANY_PRIORITY, admin=admin)


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key, 32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
