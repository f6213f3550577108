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
from outrider.services.gateway.routes.context import ERROR_RESPONSES, ReplyHead, core_of, timeout_of
from outrider.services.gateway.routes.logprobs import chat_reply_logprobs, chunk_logprobs
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
    codec = core.need_codec("messages")
    messages, options = body.template_messages(core.settings.max_messages), body.template_options()
    sequences = core.builder.check(parameters, CHAT, 1)

    async def prompts() -> Sequence[tuple[int, ...]]:
        return [await codec.encode_chat_aside(messages, options)]

    job = Job(prompts, sequences, parameters, CHAT, timeout_of(request))
    if body.stream:
        head = ReplyHead.new("chatcmpl", "chat.completion.chunk", model, body.rid)
        shape = StreamShape(
            _chunk_choice,
            _opening,
            body.include_usage,
            bool(body.return_token_ids),
            chunk_logprobs(core, job),
        )
        return EventStream(stream_chunks(core, job, head, shape), core.settings.keep_alive_s)
    completions = await run_until_disconnect(request.receive, collect(core.generate(job), sequences))
    head = ReplyHead.new("chatcmpl", "chat.completion", model, body.rid)
    return JsonResponse(_reply(core, job, head, completions, bool(body.return_token_ids)))


def _opening(index: int) -> dict[str, Any]:
    return {
        "index": index,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }


def _chunk_choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    delta = {} if finish_reason else {"content": text}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _reply(
    core: GatewayCore, job: Job, head: ReplyHead, completions: list[Completion], with_ids: bool
) -> dict[str, Any]:
    trace = job.parameters.speculation.trace
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": one.text, "refusal": None},
            "logprobs": chat_reply_logprobs(core, job, one),
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
