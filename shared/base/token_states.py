"""The data of single tokens that clients may request: hidden states and routed experts.

The *states* of a token are results of the forward pass that reads this token and predicts the next one. No
pass reads the last token of an answer, so this token has no states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateParams:
    """A client's choice of token states: hidden states, routed experts, or both.

    Attributes:
        hidden_states: Whether to return the hidden states after the final norm.
        routed_experts: Whether to return the experts that each sparse layer chose.
        start: Index of the first token whose states are wanted. Token 0 is the first token of the prompt.
    """

    hidden_states: bool = False
    routed_experts: bool = False
    start: int = 0

    @property
    def wanted(self) -> bool:
        """True if any states are wanted."""
        return self.hidden_states or self.routed_experts


NO_STATES = StateParams()


@dataclass(frozen=True, slots=True)
class TokenStates:
    """The hidden states and routed experts of consecutive tokens, as bytes. Numbers are little-endian.

    Attributes:
        first: Index of the first token. Token 0 is the first token of the prompt.
        count: Number of tokens.
        hidden_states: ``[count, hidden_size] float32``, or empty if they are not wanted.
        routed_experts: ``[count, layers, top_k] int32``, or empty if they are not wanted. The entries of a
            layer without experts are -1.
    """

    first: int
    count: int
    hidden_states: bytes = b""
    routed_experts: bytes = b""

    @property
    def stop(self) -> int:
        """Index after the last token."""
        return self.first + self.count

    @property
    def nbytes(self) -> int:
        """Number of bytes of all states."""
        return len(self.hidden_states) + len(self.routed_experts)

    def between(self, first: int, stop: int) -> TokenStates | None:
        """Return the states of the tokens whose indices are in ``[first, stop)``. None if there are none."""
        first, stop = max(first, self.first), min(stop, self.stop)
        if first >= stop:
            return None
        if (first, stop) == (self.first, self.stop):
            return self

        def cut(data: bytes) -> bytes:
            size = len(data) // self.count
            return data[(first - self.first) * size : (stop - self.first) * size]

        return TokenStates(first, stop - first, cut(self.hidden_states), cut(self.routed_experts))


NO_TOKEN_STATES = TokenStates(0, 0)


def join_states(parts: Sequence[TokenStates]) -> TokenStates:
    """Return the states of all parts, each of which begins where the previous part ends."""
    if not parts:
        return NO_TOKEN_STATES
    return TokenStates(
        parts[0].first,
        sum(one.count for one in parts),
        b"".join(one.hidden_states for one in parts),
        b"".join(one.routed_experts for one in parts),
    )
