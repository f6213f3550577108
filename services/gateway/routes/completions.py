"""``POST /v1/completions``: continues one prompt or a batch, with one reply or with a stream of chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.services.gateway.core import GatewayCore, Job, rids_of
from outrider.services.gateway.errors import JsonResponse
from outrider.services.gateway.generation import collect
from outrider.services.gateway.guards.parsed_body import ParsedBodyRoute
from outrider.services.gateway.parameters import COMPLETIONS, check_prompt_text
from outrider.services.gateway.parsers.answer import ParsedAnswer
from outrider.services.gateway.parsers.pieces import Piece, Text
from outrider.services.gateway.render import (
    choice_extras,
    finish_name,
    metadata_object,
    reply_speculation,
    usage_object,
)
from outrider.services.gateway.request import Completion, Usage, merge_usage
from outrider.services.gateway.routes.context import (
    ERROR_RESPONSES,
    ReplyHead,
    core_of,
    ignored_header,
    timeout_of,
)
from outrider.services.gateway.routes.logprobs import (
    completion_chunk_logprobs,
    completion_reply_logprobs,
    prompt_logprobs_field,
)
from outrider.services.gateway.routes.openai_stream import StreamShape, stream_chunks
from outrider.services.gateway.routes.states import choice_states
from outrider.services.gateway.schemas.completions import CompletionRequest
from outrider.services.gateway.sse import EventStream, run_until_disconnect

router = APIRouter(route_class=ParsedBodyRoute)


@router.post("/v1/completions", responses=ERROR_RESPONSES)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or a batch, with one reply or with a stream of chunks.

    Choices are ordered by prompt.
    """
    # 1. Check what needs no tokenizer, so that a bad request costs little.
    core = core_of(request).of_model(body.model)
    model = core.builder.check_model(body.model, core.client.info)
    parameters = body.parameters()
    headers = ignored_header(body)
    batch = body.prompts()
    sequences = core.builder.check(parameters, COMPLETIONS, len(batch))
    check_texts(core, batch, "prompt")
    n = parameters.n or 1
    echoes = [_echo(core, prompt) for prompt in batch] if body.echo else []

    async def prompts() -> Sequence[tuple[int, ...]]:
        encoded = await encode_batch(core, batch, "prompt", body.add_special_tokens is not False)
        return [
            core.builder.truncate(ids, body.truncate_prompt_tokens, parameters, core.client.info)
            for ids in encoded
        ]

    def opening(index: int) -> dict[str, Any] | None:
        return _choice(index, Text(echoes[index // n]), None) if echoes else None

    # 2. Describe the job. The core tokenizes the prompts when it has admitted the request.
    rids = rids_of(body.reply_id, sequences)
    job = Job(
        prompts,
        sequences,
        parameters,
        COMPLETIONS,
        timeout_of(request),
        rids,
        body.per_prompt(parameters, len(batch)),
        streams=bool(body.stream),
    )
    head = ReplyHead.new("cmpl", "text_completion", model, body.reply_id, core.client.info)
    with_ids = bool(body.return_token_ids) or core.codec is None
    with_prompt_ids = bool(body.return_token_ids or body.return_prompt_token_ids)
    # 3. Answer with a stream or with one reply. With `best_of`, the reply has only the best choices.
    if body.stream:
        shape = StreamShape(
            _choice,
            opening,
            body.include_usage,
            with_ids,
            with_prompt_ids,
            continuous_usage=body.continuous_usage,
            logprobs=completion_chunk_logprobs(core, job),
        )
        return EventStream(stream_chunks(core, job, head, shape), core.settings.keep_alive_s, headers)
    completions = await run_until_disconnect(request.receive, collect(core.generate(job), sequences))
    usage = merge_usage([one.finished for one in completions], n)
    kept = best_choices(completions, n, body.n or 1)
    echoes = [echoes[index // n] for index in kept if echoes]
    completions = [completions[index] for index in kept]
    texts = [(echoes[index] if echoes else "") + one.text for index, one in enumerate(completions)]
    scored = body.logprobs is not None
    ids = (with_ids, with_prompt_ids)
    return JsonResponse(_reply(core, job, head, completions, texts, usage, ids, scored), headers=headers)


def best_choices(completions: Sequence[Completion], generated: int, wanted: int) -> list[int]:
    """Return the indices of the best answers to each prompt, best first.

    The best answers have the highest mean logprob per token. If the client wants all answers, they keep their
    order.

    Args:
        completions: The answers, grouped by prompt.
        generated: Number of generated answers per prompt.
        wanted: Number of answers per prompt that the client wants.
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
    core: GatewayCore, batch: Sequence[str | list[int]], field: str, add_special_tokens: bool = True
) -> list[tuple[int, ...]]:
    """Return the token ids of every prompt. Long texts are encoded on a worker thread."""
    encoded = []
    for prompt in batch:
        if isinstance(prompt, str):
            codec = core.need_codec(field)
            encoded.append(await codec.encode_aside(prompt, add_special_tokens=add_special_tokens))
        else:
            encoded.append(tuple(prompt))
    return encoded


def _echo(core: GatewayCore, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    # The vocabulary is checked later. Check the range here, as the tokenizer accepts unsigned 32-bit ids
    # only.
    return core.codec.decode([token for token in prompt if 0 <= token < 1 << 32]) if core.codec else ""


def _choice(index: int, piece: Piece, finish_reason: str | None) -> dict[str, Any]:
    text = piece.text if isinstance(piece, Text) else ""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _reply(
    core: GatewayCore,
    job: Job,
    head: ReplyHead,
    completions: list[Completion],
    texts: list[str],
    usage: Usage,
    ids: tuple[bool, bool],
    scored: bool,
) -> dict[str, Any]:
    trace = job.parameters.speculation.trace
    choices = [
        _choice(index, Text(texts[index]), finish_name(one.finished, ParsedAnswer()))
        | {"logprobs": completion_reply_logprobs(core, job, one) if scored else None}
        | prompt_logprobs_field(core, job, one)
        | choice_extras(one, len(completions) == 1, trace, *ids)
        | choice_states(one, job.parameters.states)
        for index, one in enumerate(completions)
    ]
    return head.object_of(
        choices=choices,
        usage=usage_object(usage),
        **reply_speculation(completions, trace, core.client.info),
        metadata=metadata_object(core.client.info, completions[0].seed),
    )
