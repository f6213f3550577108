"""The public gRPC API: Chat, Complete, ListModels, Tokenize, Detokenize and Abort.

The gRPC API shares the request checks and the core with REST.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

import grpc

from outrider.common.v1 import common_pb2
from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from outrider.services.gateway.chat_turn import ChatTurn
from outrider.services.gateway.core import GatewayCore, Job, rids_of
from outrider.services.gateway.grpc_chat import (
    callable_tools,
    chat_ending,
    encode_chat,
    forced_calls,
    template_messages,
    template_variables,
)
from outrider.services.gateway.keys.caller import current_caller
from outrider.services.gateway.keys.key_ring import KeyRing
from outrider.services.gateway.middleware import REQUEST_ID_HEADER, request_id_of
from outrider.services.gateway.parameters import GRPC_CHAT, GRPC_COMPLETE, Parameters
from outrider.services.gateway.parsers.answer import AnswerReader, plain_reader
from outrider.services.gateway.parsers.pieces import Piece, Reasoning, Text, ToolCallArguments, ToolCallStart
from outrider.services.gateway.request import ChoiceEvent, Chunk, Finished, RequestedSpeculation, Started
from outrider.services.gateway.request_note import RequestNote, current_note
from outrider.services.gateway.requested_rules import RequestedLogprobs
from outrider.services.gateway.requested_states import RequestedStates
from outrider.services.gateway.target_messages import MODE_FROM_PROTO, REASON_TO_PROTO, options_from_proto
from outrider.shared.base.constraint import Constraint
from outrider.shared.base.errors import InvalidRequestError, OutriderError
from outrider.shared.obs.logging import get_logger
from outrider.shared.obs.tracing import traceparent_of
from outrider.shared.rpc.common_messages import report_to_proto, round_to_proto
from outrider.shared.rpc.constraint_messages import constraint_from_proto
from outrider.shared.rpc.interceptors import OnError
from outrider.shared.rpc.logprob_messages import logprobs_from_proto, write_logprob
from outrider.shared.rpc.state_messages import state_params_from_proto, states_to_proto

SERVICE_NAME = "outrider.gateway.v1.Inference"
HEALTH_PREFIX = "/grpc.health.v1.Health/"
REQUEST_ID_KEY = REQUEST_ID_HEADER.lower()
_log = get_logger("outrider.gateway.rpc")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Reply = TypeVar("Reply", gateway_pb2.ChatReply, gateway_pb2.CompleteReply)


# Id of the running gRPC call. Empty until the call's method has begun.
_request_id: ContextVar[str] = ContextVar("rpc_request_id", default="")


def error_recorder(core: GatewayCore) -> OnError:
    """Return a function that adds the error of a gRPC call to the recent errors and to the metrics.

    It also logs the call, if the call has not come as far as its generation, which has a line of its own.
    """

    def record(details: grpc.HandlerCallDetails, error: OutriderError) -> None:
        core.errors.record(error, str(details.method), _request_id.get())
        if current_note.get() is None:
            caller = current_caller.get()
            note = RequestNote(error=error, key=None if caller is None else caller.name)
            _log_call(str(details.method), note)

    return record


def register_gateway(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """Register `servicer` with `server`."""
    gateway_pb2_grpc.add_InferenceServicer_to_server(servicer, server)


class InferenceServicer(gateway_pb2_grpc.InferenceServicer):
    """The gRPC servicer of the gateway: implements the calls of the public gRPC API.

    If a client cancels a call, the call's request is cancelled too. The deadline of a call is also the
    deadline of its request.
    """

    def __init__(self, core: GatewayCore) -> None:
        self._core = core

    async def Chat(
        self, request: gateway_pb2.ChatRequest, context: Context
    ) -> AsyncGenerator[gateway_pb2.ChatReply, None]:
        """Answer a chat with a stream of chunks."""
        await _tell_request_id(context)
        core = self._core.of_model(request.model or None)
        core.builder.check_model(request.model or None, core.client.info)
        core.need_codec("messages")
        if not 1 <= len(request.messages) <= core.settings.max_messages:
            raise InvalidRequestError(
                f"messages must contain 1 to {core.settings.max_messages} messages.", field="messages"
            )
        turn = ChatTurn.create(
            core,
            _parameters(request.options),
            template_messages(request.messages),
            tools=callable_tools(request.tools, request.tool_choice),
            forced=forced_calls(request.tools, request.tool_choice),
            parallel=request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True,
            options=template_variables(request.prompt),
            ending=chat_ending(request.prompt),
            truncate=_truncate(request.options),
            split_reasoning=not request.join_reasoning,
        )
        sequences = core.builder.check(turn.parameters, GRPC_CHAT, 1)
        rids = rids_of(request.options.rid or None, sequences)
        job = Job(turn.prompts, sequences, turn.parameters, GRPC_CHAT, context.time_remaining(), rids)
        parent = traceparent_of(context.invocation_metadata())
        hidden = request.omit_reasoning
        replies_of = self._replies(core, job, gateway_pb2.ChatReply, turn.reader, parent, hidden)
        async with aclosing(replies_of) as replies:
            async for reply in replies:
                yield reply

    async def Complete(
        self, request: gateway_pb2.CompleteRequest, context: Context
    ) -> AsyncGenerator[gateway_pb2.CompleteReply, None]:
        """Continue text or token ids with a stream of chunks."""
        await _tell_request_id(context)
        core = self._core.of_model(request.model or None)
        core.builder.check_model(request.model or None, core.client.info)
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidRequestError("Set either text or token_ids.", field="prompt")
        parameters = _parameters(request.options)
        sequences = core.builder.check(parameters, GRPC_COMPLETE, 1)
        if kind == "text":
            core.need_codec("text")

        special = request.add_special_tokens if request.HasField("add_special_tokens") else True

        async def prompts() -> Sequence[tuple[int, ...]]:
            if kind == "token_ids":
                ids = tuple(request.token_ids.ids)
            else:
                ids = await core.need_codec("text").encode_aside(request.text, add_special_tokens=special)
            return [core.builder.truncate(ids, _truncate(request.options), parameters, core.client.info)]

        rids = rids_of(request.options.rid or None, sequences)
        job = Job(prompts, sequences, parameters, GRPC_COMPLETE, context.time_remaining(), rids)
        parent = traceparent_of(context.invocation_metadata())
        replies_of = self._replies(core, job, gateway_pb2.CompleteReply, plain_reader, parent)
        async with aclosing(replies_of) as replies:
            async for reply in replies:
                yield reply

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsReply:
        """List the model names that requests may use."""
        await _tell_request_id(context)
        core = self._core
        infos = {name: core.of_model(name).client.info for name in core.model_names}
        return gateway_pb2.ListModelsReply(
            models=[
                gateway_pb2.Model(id=name, max_model_len=info.max_model_len) for name, info in infos.items()
            ]
        )

    async def Tokenize(
        self, request: gateway_pb2.TokenizeRequest, context: Context
    ) -> gateway_pb2.TokenizeReply:
        """Convert a text or a chat to token ids."""
        await _tell_request_id(context)
        core = self._core.of_model(request.model or None)
        core.builder.check_model(request.model or None, core.client.info)
        codec = core.need_codec("text")
        if request.messages:
            ids = await encode_chat(core, request)
        else:
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            codec.limit.check(len(request.text), "text")
            ids = await codec.encode_aside(request.text, add_special_tokens=special)
        reply = gateway_pb2.TokenizeReply(token_ids=ids, max_model_len=core.client.info.max_model_len)
        if request.return_tokens:
            reply.tokens.extend(codec.tokenizer.id_to_token(one) or "" for one in ids)
        return reply

    async def Detokenize(
        self, request: gateway_pb2.DetokenizeRequest, context: Context
    ) -> gateway_pb2.DetokenizeReply:
        """Convert token ids to text."""
        await _tell_request_id(context)
        core = self._core.of_model(request.model or None)
        info = core.client.info
        core.builder.check_model(request.model or None, info)
        codec = core.need_codec("token_ids")
        codec.limit.check_ids(len(request.token_ids), "token_ids")
        if any(token >= info.vocab_size for token in request.token_ids):
            raise InvalidRequestError(
                f"token_ids must be between 0 and {info.vocab_size - 1}.", field="token_ids"
            )
        ids = list(request.token_ids)
        text = await asyncio.to_thread(codec.decode, ids, skip_special_tokens=request.skip_special_tokens)
        return gateway_pb2.DetokenizeReply(text=text)

    async def Abort(self, request: gateway_pb2.AbortRequest, context: Context) -> gateway_pb2.AbortReply:
        """Abort the running requests with this name, or all requests."""
        await _tell_request_id(context)
        if not request.rid and not request.all:
            raise InvalidRequestError("Set rid, or all.", field="rid")
        return gateway_pb2.AbortReply(aborted=self._core.abort(None if request.all else request.rid))

    async def _replies(
        self,
        core: GatewayCore,
        job: Job,
        make: type[Reply],
        reader_of: Callable[[], AnswerReader],
        parent: str,
        hide_reasoning: bool = False,
    ) -> AsyncGenerator[Reply, None]:
        seed = 0
        readers: dict[int, AnswerReader] = {}
        note = RequestNote(span=self._core.tracer.begin("gRPC", parent))
        current_note.set(note)
        async with aclosing(self._logged(core, job, note)) as events:
            async for one in events:
                index = one.index
                match one.event:
                    case Started() as start:
                        seed = start.seed
                        readers[index] = reader_of()
                    case Chunk(text=text, token_ids=token_ids, rounds=rounds) as event:
                        pieces = readers[index].push(text, len(token_ids))
                        # If a chunk becomes several pieces, the first contains ids, rounds and logprobs.
                        first = gateway_pb2.Chunk(
                            index=index,
                            token_ids=token_ids,
                            rounds=[round_to_proto(each) for each in rounds],
                            states=states_to_proto(event.states),
                        )
                        for each in event.logprobs:
                            write_logprob(each, first.logprobs.add())
                        for each in event.prompt_logprobs:
                            write_logprob(each, first.prompt_logprobs.add())
                        for position, piece in enumerate(pieces or [Text("")]):
                            chunk = gateway_pb2.Chunk(index=index) if position else first
                            shown = Text("") if hide_reasoning and isinstance(piece, Reasoning) else piece
                            yield make(chunk=_add_piece(chunk, shown))
                    case Finished() as end:
                        for piece in readers[index].finish():
                            if not (hide_reasoning and isinstance(piece, Reasoning)):
                                yield make(chunk=_add_piece(gateway_pb2.Chunk(index=index), piece))
                        yield make(finished=_finished(end, seed, index))

    @staticmethod
    async def _logged(core: GatewayCore, job: Job, note: RequestNote) -> AsyncGenerator[ChoiceEvent, None]:
        """Generate, and log the request at its end."""
        try:
            async with aclosing(core.generate(job)) as events:
                async for event in events:
                    yield event
        except OutriderError as error:
            note.error = error
            raise
        finally:
            method = f"{SERVICE_NAME}/{'Chat' if job.surface is GRPC_CHAT else 'Complete'}"
            _log_call(f"/{method}", note)
            note.end_span(method, rpc__system="grpc")


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Requires an API key for all calls except health checks, and counts the calls of each key."""

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if not handler_call_details.method.startswith(HEALTH_PREFIX):
            metadata = dict(handler_call_details.invocation_metadata or ())
            caller = self._ring.identify(str(metadata.get("authorization", "")))
            if caller is not None:
                caller.count_request()
                # No reset is needed: the call's method runs in this task, whose context ends with the call.
                current_caller.set(caller)
        return await continuation(handler_call_details)


def _log_call(method: str, note: RequestNote) -> None:
    elapsed_ms = round((time.perf_counter() - note.began) * 1e3, 1)
    fields = {"request_id": request_id} if (request_id := _request_id.get()) else {}
    _log.info("request", method="gRPC", route=method, elapsed_ms=elapsed_ms, **fields, **note.fields())


async def _tell_request_id(context: Context) -> None:
    """Send the client's request id back, or a new id, together with the rate limits of the API key."""
    given = dict(context.invocation_metadata() or ()).get(REQUEST_ID_KEY)
    request_id = request_id_of(given if isinstance(given, str) else None)
    _request_id.set(request_id)
    caller = current_caller.get()
    limits = tuple(caller.headers().items()) if caller is not None else ()
    await context.send_initial_metadata(((REQUEST_ID_KEY, request_id), *limits))


def _add_piece(chunk: gateway_pb2.Chunk, piece: Piece) -> gateway_pb2.Chunk:
    match piece:
        case Text(text=text):
            chunk.text = text
        case Reasoning(text=text):
            chunk.reasoning = text
        case ToolCallStart(index=index, id=call_id, name=name):
            chunk.tool_call.CopyFrom(gateway_pb2.ToolCallDelta(index=index, id=call_id, name=name))
        case ToolCallArguments(index=index, text=text):
            chunk.tool_call.CopyFrom(gateway_pb2.ToolCallDelta(index=index, arguments=text))
    return chunk


def _truncate(options: gateway_pb2.GenerationOptions) -> int | None:
    """Return the number of tokens to keep from the end of the prompt. None keeps all tokens.

    Raises:
        InvalidRequestError: If the number is below -1.
    """
    if not options.HasField("truncate_prompt_tokens"):
        return None
    if options.truncate_prompt_tokens < -1:
        field = "options.truncate_prompt_tokens"
        raise InvalidRequestError(
            f"{field} must be at least -1, not {options.truncate_prompt_tokens}.", field=field
        )
    return options.truncate_prompt_tokens


def _parameters(options: gateway_pb2.GenerationOptions) -> Parameters:
    sampling, speculation = options.sampling, options.speculation
    if sampling.choice_index:
        raise InvalidRequestError(
            "options.sampling.choice_index is set by the server. Leave it out.",
            field="options.sampling.choice_index",
        )
    if speculation.mode not in MODE_FROM_PROTO:
        raise InvalidRequestError(
            "options.speculation.mode is not a known mode.", field="options.speculation.mode"
        )
    return Parameters.of(
        options_from_proto(options),
        speculation=RequestedSpeculation(
            mode=MODE_FROM_PROTO[speculation.mode],
            depth=speculation.depth if speculation.HasField("depth") else None,
            topk=speculation.topk if speculation.HasField("topk") else None,
            max_nodes=speculation.max_nodes if speculation.HasField("max_nodes") else None,
            trace=speculation.trace,
        ),
        logprobs=RequestedLogprobs(logprobs_from_proto(options.logprobs)),
        may_be_empty=options.logprobs.HasField("prompt_top"),
        constraint=_constraint(options),
        states=RequestedStates(state_params_from_proto(options.states)),
    )


def _constraint(options: gateway_pb2.GenerationOptions) -> Constraint | None:
    if not options.HasField("constraint"):
        return None
    asked = common_pb2.Constraint()
    asked.CopyFrom(options.constraint)
    asked.field = "options.constraint"
    asked.begins_after = asked.opening = ""
    return constraint_from_proto(asked)


def _finished(end: Finished, seed: int, index: int) -> gateway_pb2.Finished:
    usage = end.usage
    matched = end.matched_stop
    finished = gateway_pb2.Finished(
        reason=REASON_TO_PROTO[end.reason],
        usage=common_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        speculation=report_to_proto(end.speculation),
        seed=seed,
        index=index,
    )
    if isinstance(matched, str):
        finished.matched_text = matched
    elif matched is not None:
        finished.matched_token = matched
    return finished
