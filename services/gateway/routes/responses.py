"""``POST /v1/responses``: OpenAI's Responses API without storage, as one reply or as a stream of events."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.services.gateway.chat_turn import ChatTurn, TurnEnd
from outrider.services.gateway.core import GatewayCore, Job, naming_field, rids_of
from outrider.services.gateway.errors import JsonResponse, error_body
from outrider.services.gateway.guards.parsed_body import ParsedBodyRoute
from outrider.services.gateway.logprobs import chat_logprobs
from outrider.services.gateway.parameters import RESPONSES, Parameters
from outrider.services.gateway.render import speculation_object
from outrider.services.gateway.request import Started
from outrider.services.gateway.routes.context import (
    ERROR_RESPONSES,
    ReplyHead,
    core_of,
    ignored_header,
    timeout_of,
)
from outrider.services.gateway.routes.response_items import ItemWriter
from outrider.services.gateway.schemas.responses import ResponsesRequest
from outrider.services.gateway.schemas.tools import NamedTool
from outrider.services.gateway.sse import NamedEventStream, run_until_disconnect
from outrider.shared.base.errors import OutriderError
from outrider.shared.base.generation import FinishReason
from outrider.shared.base.logit_rules import TokenLogprob

router = APIRouter(route_class=ParsedBodyRoute)


@router.post("/v1/responses", responses=ERROR_RESPONSES)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer with one response or with a stream of events. The server does not store the response."""
    core = core_of(request).of_model(body.model)
    model = core.builder.check_model(body.model, core.client.info)
    parameters = body.parameters()
    headers = ignored_header(body)
    turn = _turn(core, body, parameters)
    core.builder.check(turn.parameters, RESPONSES, 1)
    job = Job(
        turn.prompts,
        1,
        turn.parameters,
        RESPONSES,
        timeout_of(request),
        rids_of(body.reply_id, 1),
        streams=bool(body.stream),
    )
    made = _Response(body, turn, job, ReplyHead.new("resp", "response", model, body.reply_id))
    if body.stream:
        return _ResponseStream(made.events(), core.settings.keep_alive_s, headers)
    return JsonResponse(await run_until_disconnect(request.receive, made.whole()), headers=headers)


@router.post("/v1/responses/input_tokens", responses=ERROR_RESPONSES)
async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
    """Return the number of input tokens that a response to the same request would have."""
    core = core_of(request).of_model(body.model)
    core.builder.check_model(body.model, core.client.info)
    parameters = body.parameters()
    headers = ignored_header(body)
    (ids,) = await naming_field(_turn(core, body, parameters).prompts(), RESPONSES.prompt)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": len(ids)}, headers=headers)


def _turn(core: GatewayCore, body: ResponsesRequest, parameters: Parameters) -> ChatTurn:
    core.need_codec("input")
    return ChatTurn.create(
        core,
        parameters,
        body.template_messages(core.settings.max_messages),
        tools=body.template_tools(),
        forced=body.forced_tools(),
        parallel=body.parallel_tool_calls is not False,
        options=body.template_options(),
        truncate=body.truncate_prompt_tokens,
        drop_oldest=body.truncation == "auto",
    )


class _ResponseStream(NamedEventStream):
    """Named events. An error is an event of type ``error``."""

    def failure(self, error: OutriderError) -> dict[str, Any]:
        body = error_body(error)["error"]
        return {
            "type": "error",
            "code": body["code"],
            "message": body["message"],
            "param": body["param"],
            "status": error.code.value,
        }


@dataclass(frozen=True, slots=True)
class _Response:
    """Runs one request and builds the response object."""

    body: ResponsesRequest
    turn: ChatTurn
    job: Job
    head: ReplyHead

    async def whole(self) -> dict[str, Any]:
        """Return the finished response."""
        response: dict[str, Any] = {}
        async with aclosing(self.events()) as events:
            async for event in events:
                response = event.get("response", response)
        return response

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of the response. The last event contains the finished response."""
        numbers = itertools.count()
        writer = ItemWriter(self._logprobs)
        seed = 0
        async with aclosing(self.turn.run(self.job)) as pieces:
            async for one in pieces:
                match one:
                    case Started():
                        seed = one.seed
                        for kind in ("response.created", "response.in_progress"):
                            yield {
                                "type": kind,
                                "sequence_number": next(numbers),
                                "response": self._object("in_progress", []),
                            }
                    case TurnEnd():
                        status = "incomplete" if one.finished.reason is FinishReason.LENGTH else "completed"
                        for event in writer.finish(status):
                            yield {**event, "sequence_number": next(numbers)}
                        yield {
                            "type": f"response.{status}",
                            "sequence_number": next(numbers),
                            "response": self._object(status, writer.items, one, seed),
                        }
                    case _:
                        for event in writer.push(one):
                            yield {**event, "sequence_number": next(numbers)}

    def _logprobs(self, tokens: Sequence[tuple[int, TokenLogprob]]) -> list[dict[str, Any]]:
        """Return the logprobs of some tokens of the text."""
        ids, logprobs = [token for token, _ in tokens], [one for _, one in tokens]
        as_ids = self.job.parameters.logprobs.ids_as_text
        content = chat_logprobs(ids, logprobs, self.turn.core.token_bytes, as_ids)["content"]
        return list(content)

    def _object(
        self, status: str, output: list[dict[str, Any]], end: TurnEnd | None = None, seed: int = 0
    ) -> dict[str, Any]:
        body = self.body
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "model": self.head.model,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.token_limit(),
            "metadata": body.metadata if isinstance(body.metadata, dict) else {},
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": _text_object(body),
            "tool_choice": _choice_object(body),
            "tools": [{"strict": False, **tool.model_dump(exclude_unset=True)} for tool in body.tools or []],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
        }
        if end is not None:
            usage = end.finished.usage
            response["usage"] = {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": end.answer.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
            response["speculation"] = speculation_object(end.finished.speculation)
            response["seed"] = seed
        return response


def _text_object(body: ResponsesRequest) -> dict[str, Any]:
    """Return the `text` of the response: the form that the client asked for."""
    given = {} if body.text is None else body.text.model_dump(exclude_none=True, by_alias=True)
    return {"format": {"type": "text"}, **given}


def _choice_object(body: ResponsesRequest) -> Any:
    """Return the `tool_choice` of the response."""
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        return {"type": "function", "name": choice.name or (choice.function and choice.function.name)}
    return choice or "auto"
