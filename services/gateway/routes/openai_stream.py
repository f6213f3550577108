"""Streams the chunks of chat and text completions. Each route provides the format of its choices."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from outrider.services.gateway.core import GatewayCore, Job
from outrider.services.gateway.render import finish_extras, trace_object, usage_object
from outrider.services.gateway.request import FINISH_NAMES, Chunk, Finished, Started, Usage, merge_usage
from outrider.services.gateway.routes.context import ReplyHead

ChoiceOf = Callable[[int, str, str | None], dict[str, Any]]
"""Returns the choice of a chunk for (index, text, finish_reason)."""


@dataclass(frozen=True, slots=True)
class StreamShape:
    """The format of a stream.

    Attributes:
        choice: Returns the choice of a chunk.
        opening: Returns the choice of the opening chunk of the sequence with this index. Returns None if the
            sequence has no opening chunk.
        include_usage: Whether to end with a usage chunk and to send ``usage: null`` in all other chunks.
        with_ids: Whether to include token ids.
        continuous_usage: Whether every chunk contains the usage so far. Requires `include_usage`.
    """

    choice: ChoiceOf
    opening: Callable[[int], dict[str, Any] | None]
    include_usage: bool
    with_ids: bool
    continuous_usage: bool = False


class UsageSoFar:
    """Counts tokens while a stream runs, for the `usage` field of its chunks."""

    def __init__(self, shape: StreamShape, choices_per_prompt: int) -> None:
        self._shape = shape
        self._choices_per_prompt = choices_per_prompt
        self._prompts: dict[int, int] = {}
        self._completion = 0

    def started(self, index: int, prompt_tokens: int) -> None:
        """Count the prompt of a sequence. A prompt shared by several choices counts once."""
        self._prompts[index // self._choices_per_prompt] = prompt_tokens

    def add(self, completion_tokens: int) -> None:
        """Count new tokens."""
        self._completion += completion_tokens

    def fields(self) -> dict[str, Any]:
        """Return the `usage` field of the next chunk, or no field if the client did not ask for usage."""
        if not self._shape.include_usage:
            return {}
        if not self._shape.continuous_usage:
            return {"usage": None}
        return {"usage": usage_object(Usage(sum(self._prompts.values()), self._completion))}


async def stream_chunks(
    core: GatewayCore, job: Job, head: ReplyHead, shape: StreamShape
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chunks of a reply: opening, text and finish of each choice, then usage if requested."""
    n = job.parameters.n or 1
    usage = UsageSoFar(shape, n)
    seeds: dict[int, int] = {}
    ends: dict[int, Finished] = {}
    async with aclosing(core.generate(job)) as events:
        async for one in events:
            match one.event:
                case Started(prompt_tokens=prompt_tokens, seed=seed):
                    seeds[one.index] = seed
                    usage.started(one.index, prompt_tokens)
                    if (opening := shape.opening(one.index)) is not None:
                        yield head.object_of(choices=[opening], **usage.fields())
                case Chunk(text=text, token_ids=token_ids, rounds=rounds):
                    usage.add(len(token_ids))
                    if not (text or rounds or (shape.with_ids and token_ids)):
                        continue
                    choice = shape.choice(one.index, text, None)
                    if shape.with_ids:
                        choice["token_ids"] = list(token_ids)
                    trace = (
                        {"speculation": {"trace": [trace_object(each) for each in rounds]}} if rounds else {}
                    )
                    yield head.object_of(choices=[choice], **usage.fields(), **trace)
                case Finished() as end:
                    ends[one.index] = end
                    choice = shape.choice(one.index, "", FINISH_NAMES[end.reason]) | {
                        "matched_stop": end.matched_stop
                    }
                    yield head.object_of(
                        choices=[choice],
                        **usage.fields(),
                        **finish_extras(end, core.client.info, seeds[one.index]),
                    )
    if shape.include_usage:
        total = merge_usage([ends[index] for index in sorted(ends)], n)
        yield head.object_of(choices=[], usage=usage_object(total))
