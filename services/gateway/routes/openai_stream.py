"""Streams the chunks of chat and text completions. Each route provides the format of its choices."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from outrider.services.gateway.core import GatewayCore, Job
from outrider.services.gateway.render import finish_extras, trace_object, usage_object
from outrider.services.gateway.request import FINISH_NAMES, Chunk, Finished, Started, merge_usage
from outrider.services.gateway.routes.context import ReplyHead

ChoiceOf = Callable[[int, str, str | None], dict[str, Any]]
"""Returns the choice of a chunk for (index, text, finish_reason)."""


LogprobsOf = Callable[[int, Chunk], dict[str, Any] | None]
"""Returns the `logprobs` object for (index, chunk), or None if the chunk has none."""


@dataclass(frozen=True, slots=True)
class StreamShape:
    """The format of a stream.

    Attributes:
        choice: Returns the choice of a chunk.
        opening: Returns the choice of the opening chunk of the sequence with this index. Returns None if the
            sequence has no opening chunk.
        include_usage: Whether to end with a usage chunk and to send ``usage: null`` in all other chunks.
        with_ids: Whether to include token ids.
        logprobs: Returns the `logprobs` object of a chunk of the sequence with this index. None if the client
            wants no logprobs.
    """

    choice: ChoiceOf
    opening: Callable[[int], dict[str, Any] | None]
    include_usage: bool
    with_ids: bool
    logprobs: LogprobsOf | None = None


async def stream_chunks(
    core: GatewayCore, job: Job, head: ReplyHead, shape: StreamShape
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chunks of a reply: opening, text and finish of each choice, then usage if requested."""
    usage: dict[str, Any] = {"usage": None} if shape.include_usage else {}
    seeds: dict[int, int] = {}
    ends: dict[int, Finished] = {}
    async with aclosing(core.generate(job)) as events:
        async for one in events:
            match one.event:
                case Started(seed=seed):
                    seeds[one.index] = seed
                    if (opening := shape.opening(one.index)) is not None:
                        yield head.object_of(choices=[opening], **usage)
                case Chunk(text=text, token_ids=token_ids, rounds=rounds) as chunk:
                    logprobs = shape.logprobs(one.index, chunk) if shape.logprobs else None
                    if not (text or rounds or logprobs or (shape.with_ids and token_ids)):
                        continue
                    choice = shape.choice(one.index, text, None)
                    if logprobs:
                        choice["logprobs"] = logprobs
                    if shape.with_ids:
                        choice["token_ids"] = list(token_ids)
                    trace = (
                        {"speculation": {"trace": [trace_object(each) for each in rounds]}} if rounds else {}
                    )
                    yield head.object_of(choices=[choice], **usage, **trace)
                case Finished() as end:
                    ends[one.index] = end
                    choice = shape.choice(one.index, "", FINISH_NAMES[end.reason]) | {
                        "matched_stop": end.matched_stop
                    }
                    yield head.object_of(
                        choices=[choice], **usage, **finish_extras(end, core.client.info, seeds[one.index])
                    )
    if shape.include_usage:
        total = merge_usage([ends[index] for index in sorted(ends)], job.parameters.n or 1)
        yield head.object_of(choices=[], usage=usage_object(total))
