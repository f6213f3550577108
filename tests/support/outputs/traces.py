"""Checks that the traces of a request explain every token of its output."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.services.target.request import FinishedEvent
from outrider.shared.base.generation import RoundTrace


def check_round(one: RoundTrace, answer: Sequence[int]) -> None:
    """Assert that a round's tree and its accepted path explain the tokens that the round emitted.

    Args:
        one: The round.
        answer: All tokens of the sequence, prompt included.
    """
    assert (one.nodes[0].parent, one.nodes[0].depth) == (-1, 0)
    assert one.nodes[0].token == answer[one.base_len - 1]
    assert one.emitted, "every round emits a token"
    assert list(one.emitted) == list(answer[one.base_len : one.base_len + len(one.emitted)])
    assert len(one.emitted) <= len(one.accepted) + 1
    parent = 0
    for index, token in zip(one.accepted, one.emitted, strict=False):
        assert (one.nodes[index].token, one.nodes[index].parent) == (token, parent)
        parent = index
    for index, node in enumerate(one.nodes[1:], 1):
        assert 0 <= node.parent < index
        assert node.depth == one.nodes[node.parent].depth + 1
    if len(one.emitted) == len(one.accepted) + 1:
        # The walk ends where no child has the next token.
        children = [node.token for node in one.nodes[1:] if node.parent == parent]
        assert one.emitted[-1] not in children, "a node with the right token was not accepted"
    assert one.verify_ms > 0


def check_traces(rounds: Sequence[RoundTrace], answer: Sequence[int], prompt_len: int) -> int:
    """Assert that rounds and prefills together explain a request's output.

    Args:
        rounds: The traces of all rounds of the request.
        answer: All tokens of the sequence, prompt included.
        prompt_len: Number of tokens of the prompt.

    Returns:
        The number of tokens that prefills emitted: the first token, and one after each retraction.
    """
    length = prompt_len
    prefills = 0
    for one in rounds:
        check_round(one, answer)
        assert one.base_len >= length, "rounds must be in order"
        prefills += one.base_len - length
        length = one.base_len + len(one.emitted)
    assert [one.round for one in rounds] == sorted({one.round for one in rounds})
    return prefills + len(answer) - length


def check_report(finished: FinishedEvent, rounds: Sequence[RoundTrace]) -> None:
    """Assert that a request's report has the numbers of its traces."""
    report = finished.speculation
    histogram = report.accepted_histogram
    assert report.rounds == len(rounds) == sum(histogram)
    assert report.draft_tokens == sum(len(one.nodes) - 1 for one in rounds)
    assert report.accepted_tokens == sum(len(one.accepted) for one in rounds)
    assert report.accepted_tokens == sum(k * count for k, count in enumerate(histogram))
    drafted = [one for one in rounds if len(one.nodes) > 1]
    accepted = sum(len(one.accepted) for one in drafted)
    assert report.accept_length == (1 + accepted / len(drafted) if drafted else 1.0)
