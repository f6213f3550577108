"""The public gRPC API (Chat, Complete, ListModels). It shares the request checks and the core with REST."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias, TypeVar

import grpc

from outrider.common.v1 import common_pb2
from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from outrider.services.gateway.convert import MODE_FROM_PROTO, REASON_TO_PROTO
from outrider.services.gateway.core import GatewayCore, Job
from outrider.services.gateway.middleware import REQUEST_ID_HEADER, KeyChecker, request_id_of
from outrider.services.gateway.parameters import GRPC_CHAT, GRPC_COMPLETE, Parameters
from outrider.services.gateway.request import Chunk, Finished, RequestedSpeculation, Started
from outrider.services.gateway.requested_rules import RequestedLogprobs, RequestedRules
from outrider.services.gateway.schemas.chat import Message
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.rpc.convert import report_to_proto, round_to_proto
from outrider.shared.rpc.convert_logprobs import logprob_to_proto, logprobs_from_proto

SERVICE_NAME = "outrider.gateway.v1.Inference"
ROLES = ("system", "developer", "user", "assistant")
HEALTH_PREFIX = "/grpc.health.v1.Health/"
REQUEST_ID_KEY = REQUEST_ID_HEADER.lower()

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Reply = TypeVar("Reply", gateway_pb2.ChatReply, gateway_pb2.CompleteReply)


def register(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """Register `servicer` with `server`."""
    gateway_pb2_grpc.add_InferenceServicer_to_server(servicer, server)


class InferenceServicer(gateway_pb2_grpc.InferenceServicer):
    """Implements Chat, Complete and ListModels.

    Cancelling a call cancels its request. The deadline of a call applies to its request.
    """

    def __init__(self, core: GatewayCore) -> None:
        self._core = core

    async def Chat(
        self, request: gateway_pb2.ChatRequest, context: Context
    ) -> AsyncGenerator[gateway_pb2.ChatReply, None]:
        """Answer a chat with a stream of chunks."""
        await _tell_request_id(context)
        core = self._core
        core.builder.check_model(request.model or None, core.client.info)
        codec = core.need_codec("messages")
        if not 1 <= len(request.messages) <= core.settings.max_messages:
            raise InvalidRequestError(
                f"messages must contain 1 to {core.settings.max_messages} messages.", field="messages"
            )
        messages = [_message(message, number) for number, message in enumerate(request.messages)]
        parameters = _parameters(request.options)
        sequences = core.builder.check(parameters, GRPC_CHAT, 1)

        async def prompts() -> Sequence[tuple[int, ...]]:
            return [await codec.encode_chat_aside(messages, {})]

        job = Job(prompts, sequences, parameters, GRPC_CHAT, context.time_remaining())
        async with aclosing(self._replies(job, gateway_pb2.ChatReply)) as replies:
            async for reply in replies:
                yield reply

    async def Complete(
        self, request: gateway_pb2.CompleteRequest, context: Context
    ) -> AsyncGenerator[gateway_pb2.CompleteReply, None]:
        """Continue text or token ids with a stream of chunks."""
        await _tell_request_id(context)
        core = self._core
        core.builder.check_model(request.model or None, core.client.info)
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidRequestError("Set either text or token_ids.", field="prompt")
        parameters = _parameters(request.options)
        sequences = core.builder.check(parameters, GRPC_COMPLETE, 1)
        if kind == "text":
            core.need_codec("text")

        async def prompts() -> Sequence[tuple[int, ...]]:
            if kind == "token_ids":
                return [tuple(request.token_ids.ids)]
            return [await core.need_codec("text").encode_aside(request.text)]

        job = Job(prompts, sequences, parameters, GRPC_COMPLETE, context.time_remaining())
        async with aclosing(self._replies(job, gateway_pb2.CompleteReply)) as replies:
            async for reply in replies:
                yield reply

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsReply:
        """List the model names that requests may use."""
        await _tell_request_id(context)
        info = self._core.client.info
        names = self._core.settings.served_model_name or (info.model_id,)
        return gateway_pb2.ListModelsReply(
            models=[gateway_pb2.Model(id=name, max_model_len=info.max_model_len) for name in names]
        )

    async def _replies(self, job: Job, make: type[Reply]) -> AsyncGenerator[Reply, None]:
        seed = 0
        async with aclosing(self._core.generate(job)) as events:
            async for one in events:
                match one.event:
                    case Started() as start:
                        seed = start.seed
                    case Chunk() as piece:
                        chunk = gateway_pb2.Chunk(
                            text=piece.text,
                            token_ids=piece.token_ids,
                            rounds=[round_to_proto(each) for each in piece.rounds],
                            logprobs=[logprob_to_proto(each) for each in piece.logprobs],
                            prompt_logprobs=[logprob_to_proto(each) for each in piece.prompt_logprobs],
                        )
                        yield make(chunk=chunk)
                    case Finished() as end:
                        yield make(finished=_finished(end, seed))


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Requires an API key for all calls except health checks."""

    def __init__(self, checker: KeyChecker) -> None:
        self._checker = checker

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if not handler_call_details.method.startswith(HEALTH_PREFIX):
            metadata = dict(handler_call_details.invocation_metadata or ())
            self._checker.check(str(metadata.get("authorization", "")))
        return await continuation(handler_call_details)


async def _tell_request_id(context: Context) -> None:
    """Send the caller's x-request-id back, or a new one."""
    given = dict(context.invocation_metadata() or ()).get(REQUEST_ID_KEY)
    await context.send_initial_metadata(
        ((REQUEST_ID_KEY, request_id_of(given if isinstance(given, str) else None)),)
    )


def _message(message: gateway_pb2.Message, number: int) -> dict[str, Any]:
    field = f"messages.{number}"
    if message.role not in ROLES:
        raise InvalidRequestError(
            f"{field}.role must be one of {', '.join(ROLES)}, not {message.role[:32]!r}.",
            field=f"{field}.role",
        )
    return Message.model_validate({"role": message.role, "content": message.content}).for_template(field)


def _parameters(options: gateway_pb2.GenerationOptions) -> Parameters:
    sampling, speculation = options.sampling, options.speculation
    if sampling.choice_index:
        raise InvalidRequestError(
            "options.sampling.choice_index is set by the server. Leave it out.",
            field="options.sampling.choice_index",
        )
    mode = MODE_FROM_PROTO.get(speculation.mode)
    if mode is None:
        raise InvalidRequestError(
            "options.speculation.mode is not a known mode.", field="options.speculation.mode"
        )
    return Parameters(
        max_tokens=options.max_tokens if options.HasField("max_tokens") else None,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        min_p=sampling.min_p if sampling.HasField("min_p") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop=tuple(options.stop),
        stop_token_ids=tuple(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        skip_special_tokens=options.skip_special_tokens if options.HasField("skip_special_tokens") else True,
        speculation=RequestedSpeculation(
            mode=mode,
            depth=speculation.depth if speculation.HasField("depth") else None,
            topk=speculation.topk if speculation.HasField("topk") else None,
            max_nodes=speculation.max_nodes if speculation.HasField("max_nodes") else None,
            trace=speculation.trace,
        ),
        rules=_rules(options),
        logprobs=RequestedLogprobs(logprobs_from_proto(options.logprobs)),
        may_be_empty=options.logprobs.HasField("prompt_top"),
    )


def _rules(options: gateway_pb2.GenerationOptions) -> RequestedRules:
    sampling = options.sampling
    return RequestedRules(
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else None,
        logit_bias={str(token): bias for token, bias in sampling.logit_bias.items()},
        min_tokens=sampling.min_tokens,
        allowed_token_ids=tuple(sampling.allowed_token_ids) or None,
        bad_words=tuple(options.bad_words),
        bad_word_ids=tuple(tuple(word.ids) for word in sampling.bad_words),
    )


def _finished(end: Finished, seed: int) -> gateway_pb2.Finished:
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
    )
    if isinstance(matched, str):
        finished.matched_text = matched
    elif matched is not None:
        finished.matched_token = matched
    return finished
