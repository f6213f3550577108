"""The interface of a compiled grammar and of its matchers, which any grammar library can implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.int32]
"""``[words] int32``; bit j of word w is set if token ``32 w + j`` is allowed."""


def token_mask_words(vocab_size: int) -> int:
    """Return the number of words of a mask."""
    return -(-vocab_size // 32)


class Matcher(Protocol):
    """Follows the tokens of one output through a grammar. Not thread-safe.

    For `rollback`, a token that ends the output counts like any other token.
    """

    def accept(self, token: int) -> bool:
        """Append a token if the grammar allows it there. Return False, and change nothing, otherwise."""
        ...

    def rollback(self, count: int) -> None:
        """Remove the last `count` tokens."""
        ...

    def allows(self, tokens: Sequence[int]) -> bool:
        """Return whether the grammar allows these tokens one after another. None of them ends the output."""
        ...

    def fill(self, mask: Mask) -> None:
        """Write the allowed next tokens. A matcher that cannot go on allows none."""
        ...

    def forced(self) -> list[int]:
        """Return the tokens of the text that the grammar forces next, split as by the tokenizer.

        The grammar may also allow other tokens that spell the same text.
        """
        ...

    def fork(self) -> Matcher:
        """Return an independent matcher in the same state, which another thread may use."""
        ...


class Grammar(Protocol):
    """A compiled grammar. Any number of sequences may share one, also on different threads."""

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        ...

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of the output."""
        ...

    def text_of(self, token: int) -> bytes:
        """Return the bytes of a token, including those of special tokens."""
        ...

    def ends(self) -> tuple[int, ...]:
        """Return the tokens that end an output."""
        ...

    def token_of(self, text: str) -> int | None:
        """Return the single token with exactly this text, or None."""
        ...

    def letters(self) -> tuple[int, ...]:
        """Return the tokens of unrelated letters. Where they may come next, so may probably any text."""
        ...
