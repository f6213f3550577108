"""Follows one output through its form, which is free text up to a marker and then a grammar."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from outrider.services.target.grammar.matcher import Grammar, Mask, Matcher, token_mask_words
from outrider.shared.base.constraint import Constraint

PROMPT_END_TOKENS = 8
"""Number of tokens at the end of a prompt that are searched for the opening of the free part."""


class OutputForm:
    """The form of one output, i.e. a constraint on the tokens that may come next. Engine thread only.

    An output has up to three parts, in this order: an opening text, a free part that ends with a marker, and
    a part that follows the grammar. The first two parts are optional.

    `settle` processes each token of the output once, in order. `accept` and `rollback` visit the nodes of a
    tree. Each `accept` must be rolled back before the next call of `settle`.

    Args:
        grammar: The compiled grammar of the constraint.
        constraint: The constraint, which names the marker and the opening text. With None, the output has
            neither, and follows the grammar from its first token.
        prompt: The tokens of the prompt. If they end with the opening text, the output begins with the free
            part.

    Attributes:
        ends: The tokens that end the output.
        vocab_size: Number of logits of the model.
        dead: True if the output contains a token that the form does not allow. No token is allowed then.
    """

    def __init__(
        self, grammar: Grammar, constraint: Constraint | None = None, prompt: Sequence[int] = ()
    ) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._letters = grammar.letters()
        self.ends = grammar.ends()
        self.vocab_size = grammar.vocab_size
        marker, opening = (
            (constraint.begins_after, constraint.opening) if constraint is not None else ("", "")
        )
        self._marker = marker.encode()
        self._opening = grammar.token_of(opening) if opening else None
        # The last bytes of the free part, or None in the part that the grammar determines.
        self._tail: bytes | None = None
        self._may_open = False
        if marker:
            end = b"".join(grammar.text_of(token) for token in prompt[-PROMPT_END_TOKENS:]).rstrip()
            if not opening or end.endswith(opening.encode()):
                self._tail = b""
            else:
                self._may_open = self._opening is not None
        # The state before each token on the path.
        self._path: list[tuple[bytes | None, bool]] = []
        self._settled = 0
        self.dead = False

    def settle(self, output: list[int]) -> None:
        """Follow the tokens of the output that are new since the last call.

        Args:
            output: All tokens of the output, without the prompt.
        """
        assert not self._path, "a path must be rolled back"
        for token in output[self._settled :]:
            self.dead = self.dead or not self.accept(token)
        self._settled = len(output)
        self._path.clear()

    def accept(self, token: int) -> bool:
        """Append a token to the path if the form allows it there. Return False otherwise."""
        before = self._tail, self._may_open
        if self._tail is not None:
            if token in self.ends:
                return False
            self._tail = self._after(self._tail, token)
        elif self._may_open and token == self._opening:
            self._tail = b""
        elif not self._matcher.accept(token):
            return False
        self._may_open = False
        self._path.append(before)
        return True

    def rollback(self) -> None:
        """Remove the last token of the path."""
        tail, may_open = self._path.pop()
        if tail is None and not (may_open and self._tail is not None):
            self._matcher.rollback(1)
        self._tail, self._may_open = tail, may_open

    def fill(self, mask: Mask) -> None:
        """Write the allowed next tokens, ``[words] int32``."""
        if self.dead:
            mask.fill(0)
        elif self._tail is not None:
            mask.fill(-1)
            for token in self.ends:
                _clear(mask, token)
            if self.vocab_size % 32:
                mask[token_mask_words(self.vocab_size) - 1] &= (1 << self.vocab_size % 32) - 1
        else:
            self._matcher.fill(mask)
            if self._may_open and self._opening is not None:
                mask.view("uint32")[self._opening // 32] |= 1 << self._opening % 32

    @property
    def matcher(self) -> Matcher | None:
        """The matcher that alone decides which tokens may come next, or None if there is no such matcher."""
        return None if self.dead or self._tail is not None or self._may_open else self._matcher

    def next_mask(self) -> Mask:
        """Return the allowed next tokens as a new array, ``[words] int32``."""
        mask = np.zeros(token_mask_words(self.vocab_size), dtype=np.int32)
        self.fill(mask)
        return mask

    def fork(self) -> OutputForm:
        """Return an independent form in the same state, which another thread may use."""
        forked = copy.copy(self)
        forked._matcher, forked._path = self._matcher.fork(), list(self._path)
        return forked

    def takes_text(self) -> bool:
        """Return whether any text may probably come next, for example within a string.

        A few letters are tried, which takes a microsecond. The mask of such a place can take a millisecond.
        """
        if self.dead or self._tail is not None or self._may_open:
            return not self.dead
        return bool(self._letters) and self._matcher.allows(self._letters)

    def forced(self) -> list[int]:
        """Return tokens that the grammar probably forces next; see `Matcher.forced`."""
        if self.dead or self._tail is not None or self._may_open:
            return []
        return self._matcher.forced()

    def _after(self, tail: bytes, token: int) -> bytes | None:
        """Return the last bytes of the free part after a token. None if the token completes the marker."""
        tail += self._grammar.text_of(token)
        if self._marker in tail:
            return None
        return tail[-(len(self._marker) - 1) :] if len(self._marker) > 1 else b""


def _clear(mask: Mask, token: int) -> None:
    mask.view("uint32")[token // 32] &= 0xFFFFFFFF ^ (1 << token % 32)
