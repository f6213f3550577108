"""``POST /v1/chat/completions``: answers a chat, as one reply or as a stream of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.services.gateway.core import GatewayCore, Job
from outrider.services.gateway.errors import JsonResponse
from outrider.services.gateway.generation import collect
from outrider.services.gateway.parameters import CHAT
from outrider.services.gateway.render import choice_extras, metadata_object, reply_speculation, usage_object
from outrider.services.gateway.request import FINISH_NAMES, Completion, merge_usage
from outrider.services.gateway.routes.context import (
    ERROR_RESPONSES,
    ReplyHead,
    core_of,
    ignored_header,
    timeout_of,
)
from outrider.services.gateway.routes.openai_stream import StreamShape, stream_chunks
from outrider.services.gateway.schemas.chat import ChatRequest
from outrider.services.gateway.sse import EventStream, run_until_disconnect

router = APIRouter()


@router.post("/v1/chat/completions", responses=ERROR_RESPONSES)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a chat with one reply or a stream of chunks."""
    core = core_of(request)
    model = core.builder.check_model(body.model, core.client.info)
    parameters = body.parameters()
    headers = ignored_header(body)
    codec = core.need_codec("messages")
    messages, options = body.template_messages(core.settings.max_messages), body.template_options()
    ending = body.ending()
    echo = messages[-1]["content"] if body.echo and messages[-1]["role"] == "assistant" else ""
    sequences = core.builder.check(parameters, CHAT, 1)

    async def prompts() -> Sequence[tuple[int, ...]]:
        ids = await codec.encode_chat_aside(messages, options, ending)
        return [core.builder.truncate(ids, body.truncate_prompt_tokens, parameters, core.client.info)]

    job = Job(prompts, sequences, parameters, CHAT, timeout_of(request))
    if body.stream:
        head = ReplyHead.new("chatcmpl", "chat.completion.chunk", model, body.reply_id)
        shape = StreamShape(
            _chunk_choice,
            lambda index: _opening(index, echo),
            body.include_usage,
            bool(body.return_token_ids),
            body.continuous_usage,
        )
        return EventStream(stream_chunks(core, job, head, shape), core.settings.keep_alive_s, headers)
    completions = await run_until_disconnect(request.receive, collect(core.generate(job), sequences))
    head = ReplyHead.new("chatcmpl", "chat.completion", model, body.reply_id)
    return JsonResponse(
        _reply(core, job, head, completions, echo, bool(body.return_token_ids)), headers=headers
    )


def _opening(index: int, echo: str) -> dict[str, Any]:
    return {
        "index": index,
        "delta": {"role": "assistant", "content": echo},
        "logprobs": None,
        "finish_reason": None,
    }


def _chunk_choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    delta = {} if finish_reason else {"content": text}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _reply(
    core: GatewayCore, job: Job, head: ReplyHead, completions: list[Completion], echo: str, with_ids: bool
) -> dict[str, Any]:
    trace = job.parameters.speculation.trace
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": echo + one.text, "refusal": None},
            "logprobs": None,
            "finish_reason": FINISH_NAMES[one.finished.reason],
            **choice_extras(one, len(completions) == 1, trace, with_ids),
        }
        for index, one in enumerate(completions)
    ]
    return head.object_of(
        choices=choices,
        usage=usage_object(merge_usage([one.finished for one in completions], job.parameters.n or 1)),
        speculation=reply_speculation(completions, trace),
        metadata=metadata_object(core.client.info, completions[0].seed),
    )
