"""The target's gRPC service: accepts requests on asyncio, and streams the events of the engine thread.

Clients other than the gateway may call `Generate`. The engine pauses such a request while more than 64 KiB of
its tokens are unread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import grpc

from outrider.services.target.api.draft_metrics import DraftMetricsCache
from outrider.services.target.api.process_metrics import process_metrics
from outrider.services.target.api.request_messages import (
    decision_to_proto,
    prefix_stats_to_proto,
    request_from_proto,
    resources_to_proto,
    write_event,
)
from outrider.services.target.api.request_spans import RequestSpans
from outrider.services.target.api.stream_sink import StreamSink
from outrider.services.target.engine.engine import TargetEngine
from outrider.services.target.grammar.compiler import GrammarCompiler
from outrider.services.target.request import (
    EngineRequest,
    Event,
    FailedEvent,
    FinishedEvent,
    SpeculationLimits,
    TokensEvent,
)
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.constraint import Constraint
from outrider.shared.base.errors import InvalidRequestError, OutriderError, UnavailableError
from outrider.shared.base.generation import FinishReason, SpeculationReport
from outrider.shared.base.model_paths import model_name, model_path
from outrider.shared.nn.decoder import Decoder
from outrider.shared.obs.metrics import join_expositions
from outrider.shared.obs.open_tracer import open_tracer
from outrider.shared.obs.tracing import Tracer, traceparent_of
from outrider.shared.rpc.common_messages import report_to_proto
from outrider.shared.rpc.target_version import offer_to
from outrider.shared.rpc.tensors import split_tensor
from outrider.shared.spec.drafter import DrafterState
from outrider.target.v1 import target_pb2, target_pb2_grpc

STARTING_RETRY_AFTER_S = 1.0

SERVICE_NAME = target_pb2.DESCRIPTOR.services_by_name["Target"].full_name


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts of a started target that the gRPC servicer uses to answer calls.

    Attributes:
        engine: Generates tokens. The engine's thread must be running.
        decoder: The target model. Provides the model's configuration and the weights that a draft borrows.
        limits: The default draft shape of requests, and the caps on requested shapes.
        settings: The target's settings.
        describe_draft: Function that returns the draft's algorithm and the draft's model id.
        grammars: Compiles the constraints that requests put on their outputs.
    """

    engine: TargetEngine
    decoder: Decoder
    limits: SpeculationLimits
    settings: TargetSettings
    describe_draft: Callable[[], tuple[str, str]]
    grammars: GrammarCompiler

    @property
    def model_id(self) -> str:
        """Name of the model as reported to clients."""
        return self.settings.served_model_id or model_name(self.settings.model)


def register_target(servicer: TargetServicer, server: grpc.aio.Server) -> None:
    """Add `servicer` to `server`."""
    target_pb2_grpc.add_TargetServicer_to_server(servicer, server)


class TargetServicer(target_pb2_grpc.TargetServicer):
    """Implements the gRPC service `Target` of target.proto. Answers UNAVAILABLE until `serve` is called.

    Args:
        tracer: Records the tracing spans of requests.
        draft_address: Address of the draft service. Its metrics are added to the target's statistics. None if
            there is no draft process.
    """

    def __init__(self, tracer: Tracer | None = None, draft_address: str | None = None) -> None:
        self._serving: Serving | None = None
        self._began_s = time.monotonic()
        self._tracer = tracer or Tracer()
        self._draft_metrics = DraftMetricsCache(draft_address)

    @classmethod
    def of(cls, settings: TargetSettings) -> TargetServicer:
        """Return the servicer for these settings.

        Raises:
            ConfigurationError: The endpoint for traces is not a URL, or OpenTelemetry is not installed.
        """
        tracer = open_tracer("target", settings.otlp_endpoint, settings.trace_share)
        return cls(tracer, settings.draft_address())

    async def close(self) -> None:
        """Send the last spans, and close the connection to the draft."""
        await asyncio.to_thread(self._tracer.close)
        await self._draft_metrics.close()

    def serve(self, serving: Serving) -> None:
        """Start accepting requests."""
        self._serving = serving

    async def Session(
        self,
        request_iterator: AsyncIterable[target_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[target_pb2.SessionReply]:
        """Serve one stream of requests from a gateway.

        When the call ends, all live requests of the stream are cancelled. If the client only closes its
        sending side, the requests that it has already sent are served to the end.
        """
        serving = self._get()
        session = _Session(serving, RequestSpans(self._tracer, serving.model_id))
        reader = asyncio.create_task(session.read(request_iterator))
        try:
            async for events in session.sink.batches():
                session.forget_ended(events)
                message = target_pb2.SessionReply()
                for event in events:
                    write_event(event, message.replies.add())
                yield message
        finally:
            reader.cancel()
            session.cancel_all()

    async def Generate(
        self, request: target_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[target_pb2.GenerateReply]:
        """Generate one sequence and stream its tokens. The end of the call cancels the request."""
        serving = self._get()
        engine = serving.engine
        parsed = request_from_proto(request, serving.limits, engine.limits.vocab_size)
        if parsed.constraint is not None:
            parsed = replace(parsed, grammar=await serving.grammars.compile(parsed.constraint))
        # The call and the message may each set a deadline; the earlier deadline applies.
        remaining = context.time_remaining()
        if remaining is not None:
            deadline = time.monotonic() + remaining
            parsed = replace(
                parsed, deadline=deadline if parsed.deadline is None else min(parsed.deadline, deadline)
            )
        handle = 0  # The sink needs the handle, but `submit`, which returns the handle, needs the sink.
        sink = StreamSink(lambda paused: engine.pause(handle) if paused else engine.resume(handle))
        spans = RequestSpans(self._tracer, serving.model_id)
        parent = request.traceparent or traceparent_of(context.invocation_metadata())
        handle = engine.submit(spans.begin(parsed, parent), sink)
        try:
            async for events in sink.batches():
                for event in events:
                    spans.end(event)
                    if isinstance(event, FailedEvent):
                        raise event.error
                    reply = target_pb2.GenerateReply()
                    write_event(event, reply)
                    yield reply
                    if not isinstance(event, TokensEvent):
                        return
        finally:
            engine.cancel(handle)
            spans.drop_all()

    async def GetInfo(
        self, request: target_pb2.GetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.GetInfoReply:
        """Return the model's configuration, the limits of requests and the state of speculation."""
        serving = self._get()
        decoder, limits = serving.decoder, serving.limits
        config, shape = decoder.config, limits.default
        algorithm, draft_model = serving.describe_draft()
        reply = target_pb2.GetInfoReply(
            model_id=serving.model_id,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            max_model_len=serving.engine.limits.max_model_len,
            eos_token_ids=sorted(serving.engine.limits.eos_token_ids),
            dtype=str(decoder.dtype).removeprefix("torch."),
            device=str(decoder.device),
            fingerprint=decoder.fingerprint,
            max_running_requests=serving.settings.running_requests,
            speculation=target_pb2.SpeculationInfo(
                algorithm=algorithm,
                draft_model=draft_model,
                num_steps=shape.depth,
                topk=shape.topk,
                num_draft_tokens=shape.max_nodes,
                max_steps=limits.max_steps,
                max_topk=limits.max_topk,
                max_nodes=limits.max_nodes,
                state=serving.engine.stats().draft_state.value,
            ),
            weight_version=decoder.fingerprint[:16],
            model_path=model_path(serving.settings.model),
            tp_size=serving.settings.tp,
            page_size=serving.settings.page_size,
        )
        if serving.engine.limits.routes and config.experts is not None:
            reply.routed_layers = config.num_layers
            reply.experts_per_token = config.experts.routing.top_k
        offer_to(reply)
        return reply

    async def GetStats(
        self, request: target_pb2.GetStatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.GetStatsReply:
        """Return counters of requests, pages and speculation, and the Prometheus text."""
        serving = self._get()
        stats, resources = serving.engine.stats(), serving.engine.resources()
        uptime_s = time.monotonic() - self._began_s
        others = (self._draft_metrics.text(), process_metrics(uptime_s, resources))
        return target_pb2.GetStatsReply(
            running=stats.running,
            waiting=stats.waiting,
            waiting_prompt_tokens=stats.waiting_prompt_tokens,
            pages_total=stats.pages_total,
            pages_free=stats.pages_free,
            pages_held=stats.pages_held,
            draft_state=stats.draft_state.value if stats.draft_state is not DrafterState.NONE else "none",
            generated_tokens=stats.generated_tokens,
            rounds=stats.rounds,
            speculation=report_to_proto(stats.speculation.report(stats.speedup_estimate)),
            prometheus_text=join_expositions(
                serving.engine.prometheus_text(), [({}, text) for text in others]
            ),
            auto=decision_to_proto(stats.verdict, stats.looks_lost_s),
            prefix_cache=prefix_stats_to_proto(stats.prefixes),
            resources=resources_to_proto(resources),
            uptime_s=uptime_s,
        )

    async def FlushPrefixCache(
        self, request: target_pb2.FlushPrefixCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.FlushPrefixCacheReply:
        """Empty the prefix cache, and return the number of pages that were removed."""
        removed = await asyncio.wrap_future(self._get().engine.flush_prefixes())
        return target_pb2.FlushPrefixCacheReply(pages=removed)

    async def GetTensor(
        self, request: target_pb2.GetTensorRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[target_pb2.GetTensorReply]:
        """Stream a weight that the draft borrows, in chunks."""
        weight = self._get().decoder.weight(request.name)
        # Copying a chunk to the host takes long, so a worker thread copies it.
        chunks = split_tensor(request.name, weight)
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield target_pb2.GetTensorReply(chunk=chunk)

    def _get(self) -> Serving:
        if self._serving is None:
            raise UnavailableError("This target is still starting.", retry_after_s=STARTING_RETRY_AFTER_S)
        return self._serving


class _Session:
    """One gateway's stream. Maps the gateway's request ids to the engine's handles of live requests."""

    def __init__(self, serving: Serving, spans: RequestSpans) -> None:
        self.sink = StreamSink()
        self._spans = spans
        self._serving = serving
        self._handles: dict[str, int] = {}
        # Requests whose constraints are being compiled, before they reach the engine.
        self._compiling: dict[str, asyncio.Task[None]] = {}
        self._refused: set[int] = set()  # object ids of queued events whose requests never reached the engine
        self._half_closed = False

    async def read(self, requests: AsyncIterable[target_pb2.SessionRequest]) -> None:
        """Read messages until the client closes its side."""
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "generate":
                self._generate(message.generate)
            elif kind == "cancel" and message.cancel.request_id in self._compiling:
                self._compiling[message.cancel.request_id].cancel()
            elif kind == "cancel" and message.cancel.request_id in self._handles:
                keep = message.cancel.keep_tokens if message.cancel.HasField("keep_tokens") else None
                self._serving.engine.cancel(self._handles[message.cancel.request_id], keep)
            elif kind == "pause" and message.pause.request_id in self._handles:
                self._serving.engine.pause(self._handles[message.pause.request_id])
            elif kind == "resume" and message.resume.request_id in self._handles:
                self._serving.engine.resume(self._handles[message.resume.request_id])
        self._half_closed = True
        self._close_if_done()

    def forget_ended(self, events: Iterable[Event]) -> None:
        """Forget the ids of requests whose last event is being sent."""
        for event in events:
            if id(event) in self._refused:
                self._refused.remove(id(event))
            elif not isinstance(event, TokensEvent):
                self._handles.pop(event.request_id, None)
                self._spans.end(event)
        self._close_if_done()

    def cancel_all(self) -> None:
        """Cancel every live request."""
        for task in self._compiling.values():
            task.cancel()
        for handle in self._handles.values():
            self._serving.engine.cancel(handle)
        self._handles.clear()
        self._spans.drop_all()

    def _generate(self, message: target_pb2.GenerateRequest) -> None:
        engine = self._serving.engine
        try:
            if message.request_id in self._handles or message.request_id in self._compiling:
                raise InvalidRequestError(
                    f"request_id {message.request_id!r} is already in use on this stream.", field="request_id"
                )
            request = request_from_proto(message, self._serving.limits, engine.limits.vocab_size)
            request = self._spans.begin(request, message.traceparent)
            if request.constraint is None:
                self._handles[message.request_id] = engine.submit(request, self.sink)
            else:
                task = asyncio.create_task(self._compile(request, request.constraint))
                self._compiling[message.request_id] = task
        except OutriderError as error:
            event = FailedEvent(message.request_id, error)
            if message.request_id not in self._handles and message.request_id not in self._compiling:
                self._spans.end(event)
            self._refuse(event)

    async def _compile(self, request: EngineRequest, constraint: Constraint) -> None:
        """Compile the constraint of a request, then submit the request."""
        event: Event | None = None
        try:
            grammar = await self._serving.grammars.compile(constraint)
            compiled = replace(request, grammar=grammar)
            self._handles[request.request_id] = self._serving.engine.submit(compiled, self.sink)
        except OutriderError as error:
            event = FailedEvent(request.request_id, error)
        except asyncio.CancelledError:
            event = _cancelled(request)
        finally:
            del self._compiling[request.request_id]
        if event is not None:
            self._spans.end(event)
            self._refuse(event)

    def _refuse(self, event: Event) -> None:
        """Queue the last event of a request that has not reached the engine."""
        # Events are matched by object id, because a live request may have the same request id.
        self._refused.add(id(event))
        self.sink.put([event])

    def _close_if_done(self) -> None:
        if self._half_closed and not self._handles and not self._refused and not self._compiling:
            self.sink.close()


def _cancelled(request: EngineRequest) -> FinishedEvent:
    """Return the end of a request that was cancelled before it reached the engine."""
    return FinishedEvent(
        request.request_id,
        FinishReason.CANCELLED,
        matched_token=None,
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=0,
        speculation=SpeculationReport(),
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
    )
