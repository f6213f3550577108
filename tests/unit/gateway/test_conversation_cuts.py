"""Conversations that do not fit lose their oldest turns, never their instructions or their last message."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from outrider.services.gateway.conversation_cuts import longest_that_fits, shorter_conversations
from outrider.shared.base.errors import InvalidRequestError

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def conversation(roles: str) -> list[dict[str, Any]]:
    """Return messages with these roles. The content is the place of the message."""
    return [{"role": ROLES[role], "content": str(at)} for at, role in enumerate(roles)]


def places(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(str(one["content"]) for one in messages)


@pytest.mark.parametrize(
    ("roles", "versions"),
    [
        ("u", ["0"]),
        ("su", ["01"]),
        ("suauau", ["012345", "0345", "05"]),
        # Tool calls of earlier turns are left out with their turns.
        ("suatau", ["012345", "05"]),
        # Calls of the last turn are left out from the oldest one on, with their outputs.
        ("uauatattat", ["0123456789", "23456789", "256789", "289"]),
        ("sata", ["0123", "03"]),
        ("ssu", ["012"]),
    ],
)
def test_versions_leave_out_whole_turns_and_then_calls(roles: str, versions: list[str]) -> None:
    assert [places(one) for one in shorter_conversations(conversation(roles))] == versions


def calling(ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": ids, "tool_calls": [{"id": one} for one in ids]}


def outputs(ids: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "content": one, "tool_call_id": one} for one in ids]


def shown(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the calls of each message in parentheses, and the contents of the other messages."""
    texts = ("".join(call["id"] for call in one.get("tool_calls", ())) for one in messages)
    return "".join(f"({ids})" if ids else one["content"] for ids, one in zip(texts, messages, strict=True))


@pytest.mark.parametrize(
    ("turn", "versions"),
    [
        ([calling("abc"), *outputs("abc")], ["?(abc)abc", "?(bc)bc", "?(c)c"]),
        # The last output stays, and so does its call.
        ([calling("abc"), *outputs("cba")], ["?(abc)cba", "?(ac)ca", "?(a)a"]),
        ([calling("abc")], ["?(abc)", "?(bc)", "?(c)"]),
        # Ids may return in later calls.
        (
            [calling("ab"), *outputs("ba"), calling("ab"), *outputs("ab")],
            ["?(ab)ba(ab)ab", "?(b)b(ab)ab", "?(ab)ab", "?(b)b"],
        ),
        # The outputs of these calls cannot be told apart.
        ([calling("aa"), *outputs("aa")], ["?(aa)aa"]),
        ([calling("ab"), *outputs("aba")], ["?(ab)aba"]),
    ],
)
def test_parallel_calls_are_left_out_one_by_one(turn: list[dict[str, Any]], versions: list[str]) -> None:
    question = {"role": "user", "content": "?"}
    assert [shown(one) for one in shorter_conversations([question, *turn])] == versions


def kept(roles: str, limit: int, refuses_above: int = 10**6) -> tuple[str, int]:
    """Return the messages that are kept if each has one token, and how often they are encoded."""
    calls = 0

    async def encode(messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        nonlocal calls
        calls += 1
        if len(messages) > refuses_above:
            raise InvalidRequestError("too long", reason="context_length_exceeded")
        return tuple(int(one["content"]) for one in messages)

    ids = asyncio.run(longest_that_fits(conversation(roles), encode, lambda ids: len(ids) <= limit))
    return "".join(map(str, ids)), calls


@pytest.mark.parametrize("refuses_above", [4, 10**6])
def test_the_longest_version_that_fits_is_taken(refuses_above: int) -> None:
    assert kept("suauauau", 8) == ("01234567", 1)
    for limit, expected in ((7, "034567"), (6, "034567"), (5, "0567"), (4, "0567"), (3, "07"), (2, "07")):
        if limit <= refuses_above:
            assert kept("suauauau", limit, refuses_above)[0] == expected
    # Nothing fits: the caller refuses the shortest version.
    assert kept("suauauau", 1, refuses_above)[0] == "07"


def test_few_versions_are_encoded() -> None:
    assert kept("u" + "au" * 400, 7)[1] <= 11


def test_a_last_message_that_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="too long"):
        kept("suau", 1, refuses_above=1)


def test_other_errors_are_not_taken_for_a_lack_of_room() -> None:
    async def encode(messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        raise InvalidRequestError("the template refuses this")

    with pytest.raises(InvalidRequestError, match="the template refuses this"):
        asyncio.run(longest_that_fits(conversation("uau"), encode, lambda ids: True))
