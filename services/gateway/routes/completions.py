"""``POST /v1/completions``: continues one prompt or a batch, as one reply or as a stream of chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.services.gateway.core import GatewayCore, Job
from outrider.services.gateway.errors import JsonResponse
from outrider.services.gateway.generation import collect
from outrider.services.gateway.parameters import COMPLETIONS, check_prompt_text
from outrider.services.gateway.render import choice_extras, metadata_object, reply_speculation, usage_object
from outrider.services.gateway.request import FINISH_NAMES, Completion, Usage, merge_usage
from outrider.services.gateway.routes.context import ERROR_RESPONSES, ReplyHead, core_of, timeout_of
from outrider.services.gateway.routes.logprobs import completion_chunk_logprobs, completion_reply_logprobs
from outrider.services.gateway.routes.openai_stream import StreamShape, stream_chunks
from outrider.services.gateway.schemas.completions import CompletionRequest
from outrider.services.gateway.sse import EventStream, run_until_disconnect

router = APIRouter()


@router.post("/v1/completions", responses=ERROR_RESPONSES)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Complete one prompt or a batch, with one reply or a stream of chunks. Choices are ordered by prompt."""
    core = core_of(request)
    model = core.builder.check_model(body.model, core.client.info)
    parameters = body.parameters()
    batch = body.prompts()
    sequences = core.builder.check(parameters, COMPLETIONS, len(batch))
    check_texts(core, batch, "prompt")
    n = parameters.n or 1
    echoes = [_echo(core, prompt) for prompt in batch] if body.echo else []

    async def prompts() -> Sequence[tuple[int, ...]]:
        return await encode_batch(core, batch, "prompt")

    def opening(index: int) -> dict[str, Any] | None:
        return _choice(index, echoes[index // n], None) if echoes else None

    job = Job(prompts, sequences, parameters, COMPLETIONS, timeout_of(request))
    head = ReplyHead.new("cmpl", "text_completion", model, body.rid)
    with_ids = bool(body.return_token_ids) or core.codec is None
    if body.stream:
        return EventStream(
            stream_chunks(
                core,
                job,
                head,
                StreamShape(
                    _choice, opening, body.include_usage, with_ids, completion_chunk_logprobs(core, job)
                ),
            ),
            core.settings.keep_alive_s,
        )
    completions = await run_until_disconnect(request.receive, collect(core.generate(job), sequences))
    usage = merge_usage([one.finished for one in completions], n)
    kept = best_choices(completions, n, body.n or 1)
    echoes = [echoes[index // n] for index in kept if echoes]
    completions = [completions[index] for index in kept]
    texts = [(echoes[index] if echoes else "") + one.text for index, one in enumerate(completions)]
    scored = body.logprobs is not None
    return JsonResponse(_reply(core, job, head, completions, texts, usage, with_ids, scored))


def best_choices(completions: Sequence[Completion], generated: int, wanted: int) -> list[int]:
    """Return the indices of the best answers to each prompt, best first.

    The best answers have the highest mean logprob per token. If all are wanted, they keep their order.

    Args:
        completions: The answers, grouped by prompt.
        generated: Number of answers per prompt.
        wanted: Number of answers per prompt to return.
    """
    if generated == wanted:
        return list(range(len(completions)))
    kept: list[int] = []
    for first in range(0, len(completions), generated):
        group = range(first, first + generated)
        kept += sorted(group, key=lambda index: -_mean_logprob(completions[index]))[:wanted]
    return kept


def _mean_logprob(one: Completion) -> float:
    found = [each.logprob for each in one.logprobs]
    return sum(found) / len(found) if found else -math.inf


def check_texts(core: GatewayCore, batch: Sequence[str | list[int]], field: str) -> None:
    """Reject text that cannot be encoded in UTF-8. Without a tokenizer, reject all text."""
    for prompt in batch:
        if isinstance(prompt, str):
            core.need_codec(field)
            check_prompt_text(prompt, field)


async def encode_batch(
    core: GatewayCore, batch: Sequence[str | list[int]], field: str
) -> list[tuple[int, ...]]:
    """Return the token ids of every prompt. Long texts are encoded on a worker thread."""
    encoded = []
    for prompt in batch:
        ids = await core.need_codec(field).encode_aside(prompt) if isinstance(prompt, str) else tuple(prompt)
        encoded.append(ids)
    return encoded


def _echo(core: GatewayCore, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    # Ids are checked against the vocabulary later. The tokenizer accepts unsigned 32-bit integers only.
    return core.codec.decode([token for token in prompt if 0 <= token < 1 << 32]) if core.codec else ""


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _reply(
    core: GatewayCore,
    job: Job,
    head: ReplyHead,
    completions: list[Completion],
    texts: list[str],
    usage: Usage,
    with_ids: bool,
    scored: bool,
) -> dict[str, Any]:
    trace = job.parameters.speculation.trace
    choices = [
        _choice(index, texts[index], FINISH_NAMES[one.finished.reason])
        | {"logprobs": completion_reply_logprobs(core, job, one) if scored else None}
        | choice_extras(one, len(completions) == 1, trace, with_ids)
        for index, one in enumerate(completions)
    ]
    return head.object_of(
        choices=choices,
        usage=usage_object(usage),
        speculation=reply_speculation(completions, trace),
        metadata=metadata_object(core.client.info, completions[0].seed),
    )
