"""Chooses the target of a request: the one that has cached its prefix, or the one with the least work."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

# Prefixes are compared in steps of this many tokens, up to the maximum.
BLOCK_TOKENS = 64
MAX_BLOCKS = 128
MAX_PREFIXES = 1 << 16
# A target that has a prefix is passed over if its work exceeds this multiple of the mean, plus the tokens
# that its cache saves.
MAX_LOAD = 1.25


class Candidate(Protocol):
    """A target that could serve a request."""

    load: int
    """Work of the target's sequences, in tokens."""
    placed: int
    """Number of sequences that the target has got so far."""

    @property
    def address(self) -> str:
        """Identifies the target."""
        ...


Choice = TypeVar("Choice", bound=Candidate)


class Picker:
    """Remembers which target got which prefix. Each gateway has its own memory."""

    def __init__(self) -> None:
        # Hash of a prefix → address of the target that got it last. The oldest entries come first.
        self._last: OrderedDict[int, str] = OrderedDict()

    def pick(self, candidates: Sequence[Choice], prompt_ids: Sequence[int], group: str = "") -> Choice:
        """Return the target for a prompt, and remember it.

        Args:
            candidates: At least one target.
            prompt_ids: The tokens that the target will read.
            group: Prompts of different groups share no cache.
        """
        if len(candidates) == 1:
            return candidates[0]
        hashes = _prefix_hashes(tuple(prompt_ids[: BLOCK_TOKENS * MAX_BLOCKS]), group)
        chosen = self._affine(candidates, hashes) or min(candidates, key=lambda one: (one.load, one.placed))
        for one in hashes:
            self._last[one] = chosen.address
            self._last.move_to_end(one)
        while len(self._last) > MAX_PREFIXES:
            self._last.popitem(last=False)
        return chosen

    def _affine(self, candidates: Sequence[Choice], hashes: Sequence[int]) -> Choice | None:
        """Return the target that got the longest prefix of the prompt and is not too busy, if any."""
        by_address = {one.address: one for one in candidates}
        mean = sum(one.load for one in candidates) / len(candidates)
        for blocks in range(len(hashes), 0, -1):
            found = by_address.get(self._last.get(hashes[blocks - 1], ""))
            if found is not None and found.load <= MAX_LOAD * mean + blocks * BLOCK_TOKENS:
                return found
        return None


def _prefix_hashes(tokens: tuple[int, ...], group: str) -> list[int]:
    """Return one hash for each prefix of whole blocks, the shortest first."""
    hashes, value = [], hash(group)
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        value = hash((value, tokens[end - BLOCK_TOKENS : end]))
        hashes.append(value)
    return hashes
