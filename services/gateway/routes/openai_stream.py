"""Streams the chunks of chat and text completions. Each route defines how a choice is written."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from outrider.services.gateway.core import GatewayCore, Job
from outrider.services.gateway.parsers.answer import AnswerReader, plain_reader
from outrider.services.gateway.parsers.pieces import Piece, Text
from outrider.services.gateway.render import finish_extras, finish_name, trace_object, usage_object
from outrider.services.gateway.request import Chunk, Finished, Started, Usage, merge_usage
from outrider.services.gateway.routes.context import ReplyHead

ChoiceOf = Callable[[int, Piece, str | None], dict[str, Any]]
"""Returns the choice of a chunk for (index, piece, finish_reason)."""
EMPTY = Text("")


LogprobsOf = Callable[[int, Chunk], dict[str, Any] | None]
"""Returns the `logprobs` object for the arguments (index, chunk), or None if the chunk has no logprobs."""


@dataclass(frozen=True, slots=True)
class StreamShape:
    """The format of a streamed reply in one of OpenAI's APIs.

    Attributes:
        choice: Function that returns the choice object for a chunk.
        opening: Function that takes the index of a sequence, and returns the choice object of the sequence's
            opening chunk. It returns None if the sequence has no opening chunk.
        include_usage: Whether the stream ends with a usage chunk. All other chunks then contain
            ``usage: null``.
        with_ids: Whether chunks include token ids.
        with_prompt_ids: Whether the first chunk of each choice includes the token ids of the prompt.
        one_prompt: Whether all choices have the same prompt. The token ids of the prompt then also stand
            beside the choices, as in vLLM's chats.
        continuous_usage: Whether every chunk contains the usage so far. Requires `include_usage`.
        reader: Function that returns a new reader for one answer. It is called once per sequence, when the
            sequence has started.
        logprobs: Function that takes the index of a sequence and a chunk, and returns the chunk's `logprobs`
            object. The attribute is None if the client wants no logprobs.
    """

    choice: ChoiceOf
    opening: Callable[[int], dict[str, Any] | None]
    include_usage: bool
    with_ids: bool
    with_prompt_ids: bool = False
    one_prompt: bool = False
    continuous_usage: bool = False
    reader: Callable[[], AnswerReader] = plain_reader
    logprobs: LogprobsOf | None = None


class UsageSoFar:
    """Counts tokens while a stream runs, for the `usage` field of its chunks."""

    def __init__(self, shape: StreamShape, choices_per_prompt: int) -> None:
        self._shape = shape
        self._choices_per_prompt = choices_per_prompt
        self._prompts: dict[int, int] = {}
        self._completion = 0

    def started(self, index: int, prompt_tokens: int) -> None:
        """Count the prompt of a sequence. A prompt that several choices share counts once."""
        self._prompts[index // self._choices_per_prompt] = prompt_tokens

    def add(self, completion_tokens: int) -> None:
        """Count new tokens."""
        self._completion += completion_tokens

    def fields(self) -> dict[str, Any]:
        """Return the `usage` field of the next chunk. Empty if the client did not ask for usage."""
        if not self._shape.include_usage:
            return {}
        if not self._shape.continuous_usage:
            return {"usage": None}
        return {"usage": usage_object(Usage(sum(self._prompts.values()), self._completion))}


async def stream_chunks(
    core: GatewayCore, job: Job, head: ReplyHead, shape: StreamShape
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chunks of a reply: opening, text and finish of each choice, and the usage if requested."""
    n = job.parameters.n or 1
    usage = UsageSoFar(shape, n)
    seeds: dict[int, int] = {}
    ends: dict[int, Finished] = {}
    readers: dict[int, AnswerReader] = {}
    prompts: dict[int, dict[str, Any]] = {}
    async with aclosing(core.generate(job)) as events:
        async for one in events:
            match one.event:
                case Started(prompt_tokens=prompt_tokens, seed=seed, prompt_ids=prompt_ids):
                    seeds[one.index] = seed
                    if shape.with_prompt_ids:
                        prompts[one.index] = {"prompt_token_ids": list(prompt_ids)}
                    readers[one.index] = shape.reader()
                    usage.started(one.index, prompt_tokens)
                    if (opening := shape.opening(one.index)) is not None:
                        first = prompts.pop(one.index, {})
                        top = first if shape.one_prompt else {}
                        yield head.object_of(choices=[opening | first], **usage.fields(), **top)
                case Chunk() as chunk:
                    usage.add(len(chunk.token_ids))
                    pieces = readers[one.index].push(chunk.text, len(chunk.token_ids))
                    extras = _chunk_extras(one.index, chunk, shape)
                    if not pieces and not any(extras):
                        continue
                    # If a chunk of tokens becomes several pieces, the first contains ids, logprobs and trace.
                    for piece in pieces or [EMPTY]:
                        choice = shape.choice(one.index, piece, None) | extras[0] | prompts.pop(one.index, {})
                        yield head.object_of(choices=[choice], **usage.fields(), **extras[1])
                        extras = ({}, {})
                case Finished() as end:
                    ends[one.index] = end
                    reader = readers[one.index]
                    for piece in reader.finish():
                        yield head.object_of(choices=[shape.choice(one.index, piece, None)], **usage.fields())
                    choice = shape.choice(one.index, EMPTY, finish_name(end, reader.answer)) | {
                        "matched_stop": end.matched_stop,
                        **prompts.pop(one.index, {}),
                    }
                    yield head.object_of(
                        choices=[choice],
                        **usage.fields(),
                        **finish_extras(end, core.client.info, seeds[one.index]),
                    )
    if shape.include_usage:
        total = merge_usage([ends[index] for index in sorted(ends)], n)
        reasoning_tokens = sum(reader.answer.reasoning_tokens for reader in readers.values())
        yield head.object_of(choices=[], usage=usage_object(total, reasoning_tokens))


def _chunk_extras(index: int, chunk: Chunk, shape: StreamShape) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two groups of additional fields: those of a chunk's choice, and those of the chunk itself."""
    fields: dict[str, Any] = {}
    if shape.with_ids and chunk.token_ids:
        fields["token_ids"] = list(chunk.token_ids)
    if shape.logprobs is not None and (logprobs := shape.logprobs(index, chunk)):
        fields["logprobs"] = logprobs
    if not chunk.rounds:
        return fields, {}
    return fields, {"speculation": {"trace": [trace_object(one) for one in chunk.rounds]}}
