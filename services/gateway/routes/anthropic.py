"""Anthropic's ``POST /v1/messages``, as one reply or as a stream of events, and ``count_tokens``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.services.gateway.chat_turn import ChatTurn, TurnEnd
from outrider.services.gateway.core import GatewayCore, Job, naming_field
from outrider.services.gateway.errors import JsonResponse, anthropic_error_body, anthropic_error_response
from outrider.services.gateway.guards.parsed_body import ParsedBodyRoute
from outrider.services.gateway.parameters import ANTHROPIC, Parameters
from outrider.services.gateway.parsers.pieces import Piece, Reasoning, Text, ToolCallArguments, ToolCallStart
from outrider.services.gateway.render import ends_with_calls, speculation_object
from outrider.services.gateway.request import Started, Usage
from outrider.services.gateway.routes.context import (
    ERROR_RESPONSES,
    ReplyHead,
    core_of,
    ignored_header,
    timeout_of,
)
from outrider.services.gateway.schemas.anthropic import CountTokensRequest, MessagesRequest, tool_input
from outrider.services.gateway.sse import NamedEventStream, run_until_disconnect
from outrider.shared.base.errors import OutriderError
from outrider.shared.base.generation import FinishReason

router = APIRouter(route_class=ParsedBodyRoute)


@router.post("/v1/messages", responses=ERROR_RESPONSES)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer with one message or a stream of events."""
    core = core_of(request).of_model(body.model)
    model = core.builder.check_model(body.model, core.client.info)
    parameters = body.parameters()
    headers = ignored_header(body)
    turn = _turn(core, body, parameters)
    core.builder.check(turn.parameters, ANTHROPIC, 1)
    job = Job(turn.prompts, 1, turn.parameters, ANTHROPIC, timeout_of(request), streams=bool(body.stream))
    made = _Message(turn, job, ReplyHead.new("msg", "message", model, None), body.shows_thinking)
    if body.stream:
        return _MessageStream(made.events(), core.settings.keep_alive_s, headers)
    return JsonResponse(await run_until_disconnect(request.receive, made.whole()), headers=headers)


@router.post("/v1/messages/count_tokens", responses=ERROR_RESPONSES)
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """Return the number of tokens of a prompt."""
    core = core_of(request).of_model(body.model)
    core.builder.check_model(body.model, core.client.info)
    headers = ignored_header(body)
    (ids,) = await naming_field(_turn(core, body, Parameters()).prompts(), ANTHROPIC.prompt)
    return JsonResponse({"input_tokens": len(ids)}, headers=headers)


def _turn(core: GatewayCore, body: CountTokensRequest, parameters: Parameters) -> ChatTurn:
    core.need_codec("messages")
    return ChatTurn.create(
        core,
        parameters,
        body.template_messages(core.settings.max_messages),
        tools=body.template_tools(),
        forced=body.forced_tools(),
        parallel=body.parallel,
        options=body.template_options(),
        ending=body.ending(),
    )


class _MessageStream(NamedEventStream):
    """Named events, with errors in Anthropic's form."""

    def failure(self, error: OutriderError) -> dict[str, Any]:
        return anthropic_error_body(error)

    def refuse(self, error: OutriderError) -> Response:
        return anthropic_error_response(error)


@dataclass(frozen=True, slots=True)
class _Message:
    """Runs one request and builds the message."""

    turn: ChatTurn
    job: Job
    head: ReplyHead
    shows_thinking: bool

    async def whole(self) -> dict[str, Any]:
        """Return the finished message, with the same content blocks as a stream."""
        message: dict[str, Any] = {}
        content: list[dict[str, Any]] = []
        arguments: dict[int, str] = {}
        async with aclosing(self.events()) as events:
            async for event in events:
                match event:
                    case {"type": "message_start"}:
                        message = event["message"]
                    case {"type": "content_block_start"}:
                        content.append(event["content_block"])
                    case {"type": "content_block_delta", "index": index, "delta": delta}:
                        if delta["type"] == "input_json_delta":
                            arguments[index] = arguments.get(index, "") + delta["partial_json"]
                        else:
                            name = delta["type"].removesuffix("_delta")
                            content[index][name] += delta[name]
                    case {"type": "message_delta"}:
                        end = {name: event[name] for name in ("usage", "speculation")}
                        message |= {**event["delta"], **end, "content": content}
        for index, text in arguments.items():
            content[index]["input"] = tool_input(text)
        return message

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of the message."""
        index, kind = -1, ""
        async with aclosing(self.turn.run(self.job)) as pieces:
            async for one in pieces:
                if isinstance(one, Started):
                    yield {"type": "message_start", "message": self._beginning(one.prompt_tokens)}
                    continue
                if isinstance(one, Reasoning) and not self.shows_thinking:
                    continue
                wanted, block = ("", {}) if isinstance(one, TurnEnd) else _block_of(one)
                if kind and (wanted != kind or isinstance(one, ToolCallStart)):
                    yield {"type": "content_block_stop", "index": index}
                    kind = ""
                if wanted and not kind:
                    index, kind = index + 1, wanted
                    yield {"type": "content_block_start", "index": index, "content_block": block}
                if isinstance(one, TurnEnd):
                    yield {
                        "type": "message_delta",
                        "delta": self._stop(one),
                        "usage": _usage(one.finished.usage),
                        "speculation": speculation_object(one.finished.speculation),
                    }
                    yield {"type": "message_stop"}
                elif (delta := _delta_of(one)) is not None:
                    yield {"type": "content_block_delta", "index": index, "delta": delta}

    def _beginning(self, prompt_tokens: int) -> dict[str, Any]:
        """Return the message before its first content block."""
        return {
            "id": self.head.id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(prompt_tokens, 0)),
        }

    @staticmethod
    def _stop(end: TurnEnd) -> dict[str, Any]:
        matched = end.finished.matched_stop
        if end.finished.reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if ends_with_calls(end.finished, end.answer):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _block_of(piece: Piece) -> tuple[str, dict[str, Any]]:
    """Return the type of the content block for a piece, and the block's content before its first piece."""
    match piece:
        case Text():
            return "text", {"type": "text", "text": "", "citations": None}
        case Reasoning():
            return "thinking", {"type": "thinking", "thinking": "", "signature": ""}
        case ToolCallStart(id=call_id, name=name):
            return "tool_use", {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        case ToolCallArguments():
            return "tool_use", {}


def _delta_of(piece: Piece) -> dict[str, Any] | None:
    match piece:
        case Text(text=text):
            return {"type": "text_delta", "text": text}
        case Reasoning(text=text):
            return {"type": "thinking_delta", "thinking": text}
        case ToolCallStart():
            return None
        case ToolCallArguments(text=text):
            return {"type": "input_json_delta", "partial_json": text}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's `usage`. Cached prompt tokens are counted apart from other prompt tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
