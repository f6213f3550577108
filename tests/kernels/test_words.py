"""Interpreted peer_words: messages between ranks that are all in the test process."""

import pytest
from guards import Guards
from words_cases import check_lost_words, check_words


@pytest.mark.parametrize("ranks", [2, 4])
def test_messages_arrive_one_after_the_other(ranks: int) -> None:
    check_words("cpu", ranks, [3, 700, 3, 512, 1, 1025, 0, 2], Guards())


def test_what_does_not_come_is_waited_for_once() -> None:
    check_lost_words("cpu", Guards())
