"""The line about the tokens, rounds and drafts of one answer."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.services.clients.rest import StreamedReply
from outrider.services.clients.summary import drafting_rounds, speculation_summary


def reply(tokens: int, rounds: int, drafting: int, accepted: int) -> StreamedReply:
    """Return an answer with the numbers that a server reports for it."""
    speculation: dict[str, Any] = {
        "rounds": rounds,
        "draft_tokens": 10 * drafting,
        "accepted_tokens": accepted,
        "accept_length": round(1 + accepted / drafting, 6) if drafting else 1.0,
    }
    return StreamedReply(completion_tokens=tokens, speculation=speculation)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (reply(18, 4, 2, 13), "18 tokens in 4 rounds, 2 of them with drafts; accept length 7.50"),
        (
            reply(10, 1, 1, 10),
            "10 tokens in 1 round with drafts; accept length 11.00, which counts 2 tokens after the end",
        ),
        (
            reply(13, 3, 3, 10),
            "13 tokens in 3 rounds, all with drafts; accept length 4.33, which counts 1 token after the end",
        ),
        (reply(5, 4, 0, 0), "5 tokens in 4 rounds without drafts"),
        (reply(5, 4, 2, 0), "5 tokens in 4 rounds; no drafted token was accepted"),
        (reply(1, 0, 0, 0), "1 token"),
        (StreamedReply(completion_tokens=7), "7 tokens"),
    ],
)
def test_the_numbers_of_the_line_agree(given: StreamedReply, line: str) -> None:
    assert speculation_summary(given) == line


@pytest.mark.parametrize(("drafting", "accepted"), [(3, 1), (7, 30), (999, 1000), (1, 16)])
def test_the_rounds_with_drafts_follow_from_rounded_numbers(drafting: int, accepted: int) -> None:
    assert drafting_rounds(reply(5, 2000, drafting, accepted)) == drafting


@pytest.mark.parametrize(
    ("first_s", "last_s", "speed"),
    [(2.0, 4.0, 5.0), (2.0, 2.0, None), (2.0, 2.01, None)],
)
def test_the_speed_counts_the_tokens_after_the_first_one(
    first_s: float, last_s: float, speed: float | None
) -> None:
    """The prompt's time does not count, as in the playground (`speed` in `record.js`)."""
    given = StreamedReply(
        completion_tokens=11, first_token_s=first_s, last_token_s=last_s, total_s=last_s + 1.0
    )
    assert given.stream_speed == speed
