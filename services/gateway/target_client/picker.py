"""Chooses the target of a request: a target that has cached the prompt's prefix, or the least loaded one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

# Prefixes are compared in blocks of this many tokens, up to the maximum number of blocks.
BLOCK_TOKENS = 64
MAX_BLOCKS = 128
MAX_PREFIXES = 1 << 16
# A target that has cached a prefix is passed over if its work exceeds a limit. The limit is this multiple of
# the mean work of all targets, plus the number of tokens that the cache saves.
MAX_LOAD = 1.25


class TargetCandidate(Protocol):
    """A target that could serve a request."""

    load: int
    """Work of the target's sequences, in tokens."""
    placed: int
    """Number of sequences that the target has got so far."""

    @property
    def address(self) -> str:
        """Identifies the target."""
        ...


Choice = TypeVar("Choice", bound=TargetCandidate)


class Picker:
    """Remembers which target received which prefix. Each gateway process has its own memory."""

    def __init__(self) -> None:
        # Hash of a prefix → address of the target that last received the prefix. The oldest entries are
        # first.
        self._last: OrderedDict[int, str] = OrderedDict()

    def pick(self, candidates: Sequence[Choice], prompt_ids: Sequence[int], group: str = "") -> Choice:
        """Choose the target for a prompt, and remember which target received the prompt.

        Args:
            candidates: The targets to choose from, at least one.
            prompt_ids: The tokens that the target will prefill.
            group: Name of the prompt's group. Prompts of different groups share no cached prefixes.
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
        """Return the target that last received the longest prefix of the prompt, among targets not too busy.

        Return None if no such target has received a prefix of the prompt.
        """
        by_address = {one.address: one for one in candidates}
        mean = sum(one.load for one in candidates) / len(candidates)
        for blocks in range(len(hashes), 0, -1):
            found = by_address.get(self._last.get(hashes[blocks - 1], ""))
            if found is not None and found.load <= MAX_LOAD * mean + blocks * BLOCK_TOKENS:
                return found
        return None


def _prefix_hashes(tokens: tuple[int, ...], group: str) -> list[int]:
    """Return one hash for each prefix that consists of whole blocks, the shortest prefix first."""
    hashes, value = [], hash(group)
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        value = hash((value, tokens[end - BLOCK_TOKENS : end]))
        hashes.append(value)
    return hashes
