"""Stop strings: found once complete and never shown in part, however the text is split."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.services.gateway.stop import StopMatcher

TEXT = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def feed(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """Return the text released after each piece, and the matched stop string."""
    matcher = StopMatcher(stops, include)
    held, released = "", []
    for piece in pieces:
        held += piece
        scan = matcher.scan(held)
        released.append(held[: scan.release])
        held = held[scan.release :]
        if scan.matched is not None:
            return released, scan.matched
    return [*released, held], None


def test_a_possible_beginning_is_held_back_until_it_is_decided() -> None:
    assert feed(["ab", "E", "N", "x"], ["END"]) == (["ab", "", "", "ENx", ""], None)
    assert feed(["ab", "E", "N", "Dx"], ["END"]) == (["ab", "", "", ""], "END")


def test_of_two_matches_the_first_in_the_text_counts() -> None:
    assert feed(["xxBBAA"], ["AA", "BB"]) == (["xx"], "BB")
    assert feed(["xxABC"], ["ABC", "AB"]) == (["xx"], "AB")


def test_the_match_is_included_on_request_and_the_rest_is_not() -> None:
    assert feed(["xxENDyy"], ["END"], include=True) == (["xxEND"], "END")


@settings(max_examples=300, deadline=None)
@given(TEXT, STOPS)
def test_character_by_character_equals_the_plain_definition(text: str, stops: list[str]) -> None:
    released, matched = feed(list(text), stops)
    # The plain definition: read until some stop string is complete.
    end = next(
        (end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)), None
    )
    if end is None:
        assert ("".join(released), matched) == (text, None)
    else:
        longest = max((stop for stop in stops if text[:end].endswith(stop)), key=len)
        assert ("".join(released), matched) == (text[: end - len(longest)], longest)


@settings(max_examples=300, deadline=None)
@given(TEXT, STOPS, st.integers(1, 7))
def test_no_stop_string_is_ever_released(text: str, stops: list[str], size: int) -> None:
    released, matched = feed([text[at : at + size] for at in range(0, len(text), size)], stops)
    shown = "".join(released)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert (matched is None) == (not any(stop in text for stop in stops))


def test_a_start_of_a_match_stays_behind_even_after_a_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.releasable("END and EN") == len("END and ")
    assert matcher.releasable("END") == 3
