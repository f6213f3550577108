"""Accept lengths of small shapes, predicted from trees of a large shape."""

from __future__ import annotations

import pytest

from outrider.services.tune.replay import RecordedTree, accept_length
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

#            0 root
#        1 (5)      2 (6)
#      3 (7)  4 (8)    5 (9)
TREE = RecordedTree(
    tokens=[1, 5, 6, 7, 8, 9],
    parents=[-1, 0, 0, 1, 1, 2],
    scores=[0.0, -0.1, -1.0, -0.2, -2.0, -1.1],
    following=[6, 9, 3],
)


@pytest.mark.parametrize(
    ("shape", "accepted"),
    [
        (DraftShape(2, 2, 6), 2),
        (DraftShape(1, 2, 3), 1),
        (DraftShape(2, 1, 3), 0),  # the chain drafts 5, the answer has 6
        (DraftShape(2, 2, 3), 0),  # the best two nodes are those of the chain
        (DraftShape(2, 2, 4), 1),
    ],
)
def test_smaller_trees_accept_what_their_nodes_share_with_the_answer(
    shape: DraftShape, accepted: int
) -> None:
    assert TREE.accepted(shape) == accepted


def test_a_chain_follows_the_best_children() -> None:
    chain = DraftShape(2, 1, 3)
    following = RecordedTree(TREE.tokens, TREE.parents, TREE.scores, [5, 7, 2])
    assert following.accepted(chain) == 2
    assert accept_length([following], chain, [10]) == pytest.approx(3.0)


def test_half_of_the_rounds_accept_two_tokens_and_half_none() -> None:
    chain = DraftShape(2, 1, 3)
    following = RecordedTree(TREE.tokens, TREE.parents, TREE.scores, [5, 7, 2])
    assert accept_length([TREE, following], chain, [10_000]) == pytest.approx(2.0, rel=1e-3)
    # Two tokens follow the first one. Half of the rounds have both, the other half needs two rounds.
    assert accept_length([TREE, following], chain, [3]) == pytest.approx(2 / 1.5)


def test_plain_rounds_have_one_token() -> None:
    assert accept_length([TREE], NO_DRAFT, [10]) == 1.0
    assert accept_length([], DraftShape(2, 1, 3), [10]) == 1.0
    assert accept_length([TREE], DraftShape(2, 1, 3), [1, 0]) == 1.0


def test_the_end_of_an_answer_says_nothing_about_deeper_levels() -> None:
    chain = DraftShape(2, 1, 3)
    short = RecordedTree(TREE.tokens, TREE.parents, TREE.scores, [5])
    long = RecordedTree(TREE.tokens, TREE.parents, TREE.scores, [5, 7, 2])
    assert accept_length([short, long], chain, [31]) == pytest.approx(3.0)
    wrong = RecordedTree(TREE.tokens, TREE.parents, TREE.scores, [9])
    # The first level is right in two of three rounds, and the second one wherever it was reached.
    assert accept_length([short, long, wrong], chain, [10_000]) == pytest.approx(1 + 2 * 2 / 3, rel=1e-3)


def test_a_short_answer_leaves_a_deep_chain_no_room() -> None:
    deep = RecordedTree(range(17), range(-1, 16), [-0.1 * node for node in range(17)], range(1, 30))
    chains = [DraftShape(depth, 1, depth + 1) for depth in (8, 16)]
    assert [accept_length([deep], chain, [10]) for chain in chains] == [9.0, 9.0]
    assert [accept_length([deep], chain, [154]) for chain in chains] == [9.0, 17.0]


def test_an_entry_of_a_trace_is_aligned_with_the_answer() -> None:
    nodes = [
        {"token": 20, "parent": -1, "depth": 0, "logprob": 0.0},
        {"token": 21, "parent": 0, "depth": 1, "logprob": -0.5},
        {"token": 22, "parent": 1, "depth": 2, "logprob": -0.25},
    ]
    tree = RecordedTree.of({"base_len": 6, "nodes": nodes}, prompt_len=4, answer=[19, 20, 21, 22])
    assert list(tree.following) == [21, 22]
    assert tree.scores == [0.0, -0.5, -0.75]
    assert tree.accepted(DraftShape(2, 1, 3)) == 2
