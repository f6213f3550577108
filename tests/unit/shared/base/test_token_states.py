"""States of consecutive tokens: cutting and joining them."""

from __future__ import annotations

from outrider.shared.base.token_states import NO_TOKEN_STATES, StateParams, TokenStates, join_states


def test_parts_are_cut_by_the_indices_of_tokens() -> None:
    whole = TokenStates(3, 4, b"aabbccdd", b"0123")
    assert whole.between(4, 6) == TokenStates(4, 2, b"bbcc", b"12")
    assert whole.between(0, 5) == TokenStates(3, 2, b"aabb", b"01")
    assert whole.between(0, 9) is whole
    assert whole.between(7, 9) is None
    assert (whole.stop, whole.nbytes) == (7, 12)
    assert TokenStates(3, 2, b"", b"0123").between(4, 5) == TokenStates(4, 1, b"", b"23")


def test_parts_are_joined_in_order() -> None:
    assert join_states([]) is NO_TOKEN_STATES
    parts = [TokenStates(2, 1, b"aa"), TokenStates(3, 2, b"bbcc")]
    assert join_states(parts) == TokenStates(2, 3, b"aabbcc")


def test_a_request_wants_states_if_it_names_a_kind() -> None:
    assert not StateParams(start=3).wanted
    assert StateParams(hidden_states=True).wanted
    assert StateParams(routed_experts=True).wanted
