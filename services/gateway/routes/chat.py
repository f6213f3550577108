"""``POST /v1/chat/completions``: answers a chat with one reply or with a stream of chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.services.gateway.chat_turn import ChatTurn
from outrider.services.gateway.core import Job, rids_of
from outrider.services.gateway.errors import JsonResponse
from outrider.services.gateway.generation import collect
from outrider.services.gateway.guards.parsed_body import ParsedBodyRoute
from outrider.services.gateway.parameters import CHAT
from outrider.services.gateway.parsers.answer import AnswerReader, ParsedAnswer
from outrider.services.gateway.parsers.pieces import Piece, Reasoning, Text, ToolCallArguments, ToolCallStart
from outrider.services.gateway.render import (
    choice_extras,
    finish_name,
    metadata_object,
    reply_speculation,
    usage_object,
)
from outrider.services.gateway.request import Completion, merge_usage
from outrider.services.gateway.routes.context import (
    ERROR_RESPONSES,
    ReplyHead,
    core_of,
    ignored_header,
    timeout_of,
)
from outrider.services.gateway.routes.logprobs import (
    chat_reply_logprobs,
    chunk_logprobs,
    prompt_logprobs_field,
)
from outrider.services.gateway.routes.openai_stream import StreamShape, stream_chunks
from outrider.services.gateway.routes.states import choice_states
from outrider.services.gateway.schemas.chat import ChatRequest
from outrider.services.gateway.sse import EventStream, run_until_disconnect

router = APIRouter(route_class=ParsedBodyRoute)


@router.post("/v1/chat/completions", responses=ERROR_RESPONSES)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a chat with one reply or with a stream of chunks."""
    core = core_of(request).of_model(body.model)
    model = core.builder.check_model(body.model, core.client.info)
    parameters = body.parameters()
    headers = ignored_header(body)
    core.need_codec("messages")
    messages = body.template_messages(core.settings.max_messages)
    turn = ChatTurn.create(
        core,
        parameters,
        messages,
        tools=body.template_tools(),
        forced=body.forced_tools(),
        parallel=body.parallel_tool_calls is not False,
        options=body.template_options(),
        ending=body.ending(),
        truncate=body.truncate_prompt_tokens,
        split_reasoning=body.separate_reasoning is not False,
    )
    sequences = core.builder.check(turn.parameters, CHAT, 1)
    rids = rids_of(body.reply_id, sequences)
    job = Job(
        turn.prompts, sequences, turn.parameters, CHAT, timeout_of(request), rids, streams=bool(body.stream)
    )
    echo = messages[-1]["content"] if body.echo and messages[-1]["role"] == "assistant" else ""
    form = _Form(
        turn,
        job,
        echo,
        bool(body.return_token_ids),
        bool(body.return_token_ids or body.return_prompt_token_ids),
        body.include_reasoning is not False,
    )
    if body.stream:
        head = ReplyHead.new("chatcmpl", "chat.completion.chunk", model, body.reply_id, core.client.info)
        shape = StreamShape(
            form.chunk_choice,
            form.opening,
            body.include_usage,
            form.with_ids,
            form.with_prompt_ids,
            one_prompt=True,
            continuous_usage=body.continuous_usage,
            reader=turn.reader,
            logprobs=chunk_logprobs(core, job),
        )
        return EventStream(stream_chunks(core, job, head, shape), core.settings.keep_alive_s, headers)
    completions = await run_until_disconnect(request.receive, collect(core.generate(job), sequences))
    head = ReplyHead.new("chatcmpl", "chat.completion", model, body.reply_id, core.client.info)
    return JsonResponse(form.reply(head, completions), headers=headers)


def read_answer(reader: AnswerReader, completion: Completion) -> ParsedAnswer:
    """Return the parts of a finished sequence: its text, reasoning and tool calls."""
    for chunk in completion.chunks:
        reader.push(chunk.text, len(chunk.token_ids))
    reader.finish()
    return reader.answer


def tool_call_objects(answer: ParsedAnswer) -> list[dict[str, Any]]:
    """Return OpenAI's `tool_calls` of a message."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.tool_calls
    ]


@dataclass(frozen=True, slots=True)
class _Form:
    """Builds the reply, or the choices of a stream's chunks."""

    turn: ChatTurn
    job: Job
    echo: str
    with_ids: bool
    with_prompt_ids: bool
    with_reasoning: bool

    def opening(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": self.echo},
            "logprobs": None,
            "finish_reason": None,
        }

    def chunk_choice(self, index: int, piece: Piece, finish_reason: str | None) -> dict[str, Any]:
        delta = {} if finish_reason else self._delta(piece)
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        match piece:
            case Text(text=text):
                return {"content": text}
            case Reasoning(text=text):
                return {"reasoning_content": text} if self.with_reasoning else {"content": ""}
            case ToolCallStart(index=index, id=call_id, name=name):
                function = {"name": name, "arguments": ""}
                return {
                    "tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]
                }
            case ToolCallArguments(index=index, text=text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def reply(self, head: ReplyHead, completions: list[Completion]) -> dict[str, Any]:
        trace = self.job.parameters.speculation.trace
        answers = [read_answer(self.turn.reader(), one) for one in completions]
        choices = [
            {
                "index": index,
                "message": self._message(answer),
                "logprobs": chat_reply_logprobs(self.turn.core, self.job, one),
                "finish_reason": finish_name(one.finished, answer),
                **choice_extras(one, len(completions) == 1, trace, self.with_ids, self.with_prompt_ids),
                **choice_states(one, self.job.parameters.states),
            }
            for index, (one, answer) in enumerate(zip(completions, answers, strict=True))
        ]
        usage = merge_usage([one.finished for one in completions], self.job.parameters.n or 1)
        return head.object_of(
            choices=choices,
            usage=usage_object(usage, sum(answer.reasoning_tokens for answer in answers)),
            **prompt_logprobs_field(self.turn.core, self.job, completions[0]),
            **({"prompt_token_ids": list(completions[0].prompt_ids)} if self.with_prompt_ids else {}),
            **reply_speculation(completions, trace, self.turn.core.client.info),
            metadata=metadata_object(self.turn.core.client.info, completions[0].seed),
        )

    def _message(self, answer: ParsedAnswer) -> dict[str, Any]:
        text = self.echo + answer.text
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if answer.tool_calls and not text else text,
            "refusal": None,
        }
        if answer.reasonings and self.with_reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = tool_call_objects(answer)
        return message
