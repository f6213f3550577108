"""Shortens a conversation that does not fit into the model's context, by leaving out its oldest messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from outrider.shared.base.errors import InvalidRequestError

Messages = Sequence[Mapping[str, Any]]


def shorter_conversations(messages: Messages) -> list[Messages]:
    """Return a conversation and its shorter versions, from long to short.

    Instructions at the beginning and the last message are always kept. Each version begins, after the
    instructions, with a message of the user. The versions thus leave out whole turns. If only one turn is
    left, further versions leave out the oldest tool calls of this turn, one by one, with their outputs.
    """
    first = next((at for at, one in enumerate(messages) if one["role"] != "system"), len(messages))
    instructions, rest = list(messages[:first]), list(messages[first:])
    turns = [at for at, one in enumerate(rest) if one["role"] == "user"]
    versions: list[Messages] = [messages, *([*instructions, *rest[at:]] for at in turns if at)]
    if turns:
        instructions.append(rest[turns[-1]])
        rest = rest[turns[-1] + 1 :]
    # A tool's output stays with the call before it.
    for at in (at for at, one in enumerate(rest) if one["role"] != "tool"):
        if at:
            versions.append([*instructions, *rest[at:]])
        versions += ([*instructions, *version] for version in _without_parallel_calls(rest[at:]))
    return versions


def _without_parallel_calls(messages: Messages) -> list[Messages]:
    """Return versions without the oldest calls of the first message, and without the outputs of these calls.

    The versions are sorted from long to short. At least one call is kept. If the last message is the output
    of one of the calls, this call is kept.
    """
    first, *rest = messages
    calls = list(first.get("tool_calls") or ())
    end = next((at for at, one in enumerate(rest) if one["role"] != "tool"), len(rest))
    outputs, later = rest[:end], rest[end:]
    ids = [call.get("id") for call in calls]
    for names in (ids, [one.get("tool_call_id") for one in outputs]):
        if None in names or len(set(names)) < len(names):
            return []  # nothing says which output belongs to which call
    last = messages[-1].get("tool_call_id")
    versions: list[Messages] = []
    for oldest in [one for one in ids if one != last or later][: len(ids) - 1]:
        calls = _without(calls, "id", oldest)
        outputs = _without(outputs, "tool_call_id", oldest)
        versions.append([{**first, "tool_calls": calls}, *outputs, *later])
    return versions


def _without(items: list[Any], field: str, value: Any) -> list[Any]:
    """Return a list without the first item whose field has this value."""
    at = next((at for at, one in enumerate(items) if one[field] == value), len(items))
    return items[:at] + items[at + 1 :]


async def longest_that_fits(
    messages: Messages,
    encode: Callable[[Messages], Awaitable[tuple[int, ...]]],
    fits: Callable[[tuple[int, ...]], bool],
) -> tuple[int, ...]:
    """Return the tokens of the longest version of a conversation that fits.

    If no version fits, return the tokens of the shortest version.

    Args:
        messages: The conversation.
        encode: Returns the tokens of a version.
        fits: Returns whether tokens fit into the model's context.

    Raises:
        InvalidRequestError: If `encode` raises it. With the reason ``context_length_exceeded``, only if it
            does so for the shortest version.
    """
    versions = shorter_conversations(messages)

    async def tokens_of(index: int) -> tuple[int, ...] | None:
        try:
            return await encode(versions[index])
        except InvalidRequestError as error:
            if error.reason != "context_length_exceeded" or index == len(versions) - 1:
                raise
            return None

    # Most conversations fit. Otherwise, search for the first version that does.
    low, high = 0, len(versions) - 1
    index, best = 0, None
    while True:
        ids = await tokens_of(index)
        if ids is not None and (fits(ids) or index == len(versions) - 1):
            best, high = ids, index
        else:
            low = index + 1
        if low >= high and best is not None:
            return best
        index = (low + high) // 2
