"""Stop regexes: the same matches as Python's `re`, token by token, but in bounded time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.services.gateway.stop_regex import MAX_NODES, StopSearch, compile_stops, is_plain
from outrider.shared.base.errors import InvalidRequestError

PATTERNS = [
    *(r"and|or", r"\d{2,4}", r"^ab", r"(?m)^ab", r"ab$", r"(?m)ab$", r"\bab\b", r"a\Bb", r"(?i)AB+c"),
    *(r"[^abc\n ]", r"[a-c]{3}\d", r"(a|b)*a(a|b){3}c", r"\s\w+\s", r"a.c", r"(?s)a.c", r"\Aab", r"ab\Z"),
    *(r"(?:ab){2,}", r"a{0,2}b{3}", r"(a?){3}c1", r"a*?b{4}", r"(?i:A)b", r"\W{2}", r"[\w-]{5}", r"\S{6}"),
    *(r"(?a)\w{5}", r"é+", r"[^\W\d]{5}", r"(ab|a)(c|bcd)1", r"x?1$", r"(?P<year>1\d)", r"(?x) a b # note"),
    *(r"(?i)[a-c]\.", r"(?im)^B$", r"(a*)*c", r"()b{3}", r"(?i)ß", r"\D\d\D", r"(?a)a\b", r"(?a)a\B"),
    *(r"(?a)(?u:\w){5}", r"(?:a\b$|b$)\sa"),
]
PIECES = st.lists(st.text("abc12 \n.ABéß_-", min_size=1, max_size=5), max_size=12)
CASED = "".join(one for one in map(chr, range(0x110000)) if one.lower() != one or one.upper() != one)


def first_match(pattern: str, pieces: list[str]) -> int | None:
    """Return the index of the piece that completes a match."""
    search = StopSearch((pattern,))
    return next((index for index, piece in enumerate(pieces) if search.push(piece)), None)


@settings(max_examples=1500, deadline=None)
@given(st.sampled_from(PATTERNS), PIECES)
def test_each_piece_is_judged_as_re_judges_the_text_so_far(pattern: str, pieces: list[str]) -> None:
    ends = range(1, len(pieces) + 1)
    expected = next((end - 1 for end in ends if re.search(pattern, "".join(pieces[:end]))), None)
    assert first_match(pattern, pieces) == expected


@pytest.mark.parametrize("flags", ["(?i)", "(?ai)"])
@pytest.mark.parametrize("item", [*"isktIſKİı", "ß", "ẞ", "[k]", "[^s]", "[h-j]", "[İ-ı]", "[א-₿]", "µ", "ι"])
def test_cases_are_ignored_as_re_ignores_them(flags: str, item: str) -> None:
    found = [one for one in CASED if first_match(flags + item, [one]) == 0]
    assert found == re.findall(flags + item, CASED)


def test_an_empty_piece_completes_no_match() -> None:
    assert first_match("a*", ["", "", "b"]) == 2


def test_a_match_may_be_longer_than_any_window() -> None:
    assert first_match(r"<a>[^<]*</a>", ["<a>", *["word "] * 20_000, "</", "a>"]) == 20_002


def test_the_pattern_that_matches_is_named() -> None:
    search = StopSearch((r"\d+", r"[.!?]"))
    assert [search.push(piece) for piece in ("some ", "text", ". ")] == [None, None, "[.!?]"]


def test_after_a_match_the_search_goes_on_behind_it() -> None:
    search = StopSearch((r"ab|^c",))
    assert [search.push(piece) for piece in ("xab", "b", "c", "ab")] == ["ab|^c", None, None, "ab|^c"]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a", "missing )"),
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", "a backreference"),
        ("(?P<n>a)(?P=n)", "a backreference"),
        ("(a)?(?(1)b|c)", "a conditional group"),
        ("(?>a)b", "an atomic group"),
        ("a*+b", "a possessive quantifier"),
        ("a{99999999999}", "too large"),
        ("(((a{1000}){1000}){1000})", f"more than {MAX_NODES} parts"),
        ("(^){99999}", f"more than {MAX_NODES} parts"),
        ("[" + "".join(chr(9_000 + 2 * index) for index in range(MAX_NODES)) + "]", "parts"),
        ("(" * 1000 + ")" * 1000, "nested too deeply"),
    ],
)
def test_what_no_automaton_matches_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(reason)) as caught:
        StopSearch((pattern,))
    assert caught.value.field == "stop_regex"


def test_all_patterns_share_the_limit() -> None:
    half = f"a{{{MAX_NODES // 2}}}"
    StopSearch((half,))
    with pytest.raises(InvalidRequestError, match="the patterns together"):
        StopSearch((half, half.replace("a", "b")))


@pytest.mark.parametrize(
    "pattern",
    [
        "(x+x+)+y",
        "(a|b|ab)*c",
        r"(\w+\s?)*\.",
        "(a|b)*a(a|b){200}!",
        "(?:a?){300}a{300}!",
        "((){99999}){99999}z",
    ],
)
def test_hostile_patterns_take_bounded_time(pattern: str) -> None:
    """With backtracking, most of these patterns would take longer than the age of the universe."""
    began = time.process_time()
    search = StopSearch((pattern,))
    text = "abxaabbxxabab" * 40
    for at in range(0, len(text), 4):
        search.push(text[at : at + 4])
    assert time.process_time() - began < 5


def test_the_cache_of_states_stays_small() -> None:
    automaton = compile_stops((r"(a|b)*a(a|b){60}c",))
    search = StopSearch((r"(a|b)*a(a|b){60}c",))
    for number in range(3_000):
        search.push(f"{number:b}".replace("0", "a").replace("1", "b"))
    assert len(automaton._states) <= 130


@pytest.mark.parametrize(
    ("pattern", "plain"), [("END", True), ("a-b, c\n", True), ("a.", False), ("[", False)]
)
def test_only_patterns_without_special_characters_are_plain(pattern: str, plain: bool) -> None:
    assert is_plain(pattern) is plain
