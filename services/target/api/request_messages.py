"""Converts protobuf messages of the target's API to the target's own types and back, and checks requests.

A request without a `speculation` object has the speculation mode `auto`. If a request leaves out a field of
its draft shape, `SpeculationLimits.resolve` takes the value from the target's default draft shape.
"""

from __future__ import annotations

import secrets
import time

from outrider.common.v1 import common_pb2
from outrider.services.target.policy.verdict import AutoVerdict
from outrider.services.target.request import (
    EngineRequest,
    Event,
    FinishedEvent,
    SpeculationLimits,
    TokensEvent,
)
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.generation import (
    FinishReason,
    SamplingParams,
    SpeculationMode,
)
from outrider.shared.base.resources import ResourceStats
from outrider.shared.kv.prefix_cache import PrefixStats
from outrider.shared.rpc.common_messages import error_to_proto, report_to_proto, round_to_proto
from outrider.shared.rpc.constraint_messages import constraint_from_proto
from outrider.shared.rpc.logprob_messages import logprobs_from_proto, rules_from_proto, write_logprob
from outrider.shared.rpc.state_messages import state_params_from_proto, states_to_proto
from outrider.target.v1 import target_pb2

MAX_REQUEST_ID_LENGTH = 256
MAX_STOP_TOKENS = 256
MAX_SALT_LENGTH = 512
MAX_TENANT_LENGTH = 64
MAX_MESSAGE_INTERVAL_S = 1.0

MODES = {
    common_pb2.SPECULATION_MODE_UNSPECIFIED: SpeculationMode.AUTO,
    common_pb2.SPECULATION_MODE_AUTO: SpeculationMode.AUTO,
    common_pb2.SPECULATION_MODE_ON: SpeculationMode.ON,
    common_pb2.SPECULATION_MODE_OFF: SpeculationMode.OFF,
}
REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
}


def request_from_proto(
    message: target_pb2.GenerateRequest, limits: SpeculationLimits, vocab_size: int
) -> EngineRequest:
    """Check a generation request that was received as protobuf, and convert it to an `EngineRequest`.

    Absent fields get defaults. Absent sampling fields leave the model's distribution unchanged. If the seed
    is absent, a random seed is drawn. An absent `speculation.mode` means `auto`.

    Args:
        message: The request as protobuf.
        limits: The server's default draft shape and its caps on requested shapes.
        vocab_size: Size of the model's vocabulary.

    Raises:
        InvalidRequestError: A field is invalid. The error names the field.
    """
    if not message.request_id or len(message.request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidRequestError(
            f"request_id must have 1 to {MAX_REQUEST_ID_LENGTH} characters.", field="request_id"
        )
    if len(message.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequestError(
            f"stop_token_ids has more than {MAX_STOP_TOKENS} tokens.", field="stop_token_ids"
        )
    if any(token >= vocab_size for token in message.stop_token_ids):
        raise InvalidRequestError(
            f"stop_token_ids must be below {vocab_size}, the size of the vocabulary.", field="stop_token_ids"
        )
    if len(message.cache_salt) > MAX_SALT_LENGTH:
        raise InvalidRequestError(
            f"cache_salt must have at most {MAX_SALT_LENGTH} characters.", field="cache_salt"
        )
    if len(message.tenant) > MAX_TENANT_LENGTH:
        raise InvalidRequestError(f"tenant must have at most {MAX_TENANT_LENGTH} characters.", field="tenant")
    options = message.speculation
    if options.mode not in MODES:
        raise InvalidRequestError(
            f"speculation.mode {options.mode} is not a known mode.", field="speculation.mode"
        )
    return EngineRequest(
        request_id=message.request_id,
        prompt_ids=tuple(message.prompt_ids[:]),  # a slice is copied at once, not token by token
        max_new_tokens=message.max_new_tokens,
        sampling=_sampling(message.sampling),
        speculation=limits.resolve(
            MODES[options.mode],
            depth=options.depth if options.HasField("depth") else None,
            topk=options.topk if options.HasField("topk") else None,
            max_nodes=options.max_nodes if options.HasField("max_nodes") else None,
            trace=options.trace,
        ),
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        deadline=time.monotonic() + message.timeout_ms / 1e3 if message.timeout_ms else None,
        priority=message.priority,
        logprobs=logprobs_from_proto(message.logprobs),
        constraint=constraint_from_proto(message.constraint) if message.HasField("constraint") else None,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        resume_ids=tuple(message.resume_ids),
        states=state_params_from_proto(message.states),
        message_interval_s=min(message.message_interval_ms / 1e3, MAX_MESSAGE_INTERVAL_S),
    )


def _sampling(options: common_pb2.SamplingOptions) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature if options.HasField("temperature") else 1.0,
        top_k=options.top_k,
        top_p=options.top_p if options.HasField("top_p") else 1.0,
        min_p=options.min_p,
        seed=options.seed if options.HasField("seed") else secrets.randbits(64),
        choice_index=options.choice_index,
        rules=rules_from_proto(options),
    )


def write_event(event: Event, reply: target_pb2.GenerateReply) -> None:
    """Write an event into a new message.

    Fields without a value are left out, because a message with all fields takes about three times as long.
    """
    reply.request_id = event.request_id
    if isinstance(event, TokensEvent):
        delta = reply.delta
        delta.SetInParent()
        delta.token_ids.extend(event.token_ids)
        if event.cached_tokens:
            delta.cached_tokens = event.cached_tokens
        if event.draft_tokens is not None:
            delta.draft_tokens, delta.accepted_tokens = event.draft_tokens, event.accepted_tokens
        for scored in event.logprobs:
            write_logprob(scored, delta.logprobs.add())
        for scored in event.prompt_logprobs:
            write_logprob(scored, delta.prompt_logprobs.add())
        if event.rounds:
            delta.rounds.extend(round_to_proto(one) for one in event.rounds)
        if (states := states_to_proto(event.states)) is not None:
            delta.states.CopyFrom(states)
    elif isinstance(event, FinishedEvent):
        reply.finish.CopyFrom(_finish(event))
    else:
        reply.error.CopyFrom(error_to_proto(event.error))


def decision_to_proto(verdict: AutoVerdict, looks_lost_s: float) -> target_pb2.AutoDecision:
    """Convert the controller's last decision, and the seconds lost by trying other shapes, to a message."""
    return target_pb2.AutoDecision(
        reason=verdict.reason.value,
        shapes=[
            target_pb2.ShapeRows(depth=shape.depth, topk=shape.topk, max_nodes=shape.max_nodes, rows=rows)
            for shape, rows in verdict.shapes.items()
        ],
        plain_rows=verdict.plain_rows,
        batch_size=verdict.batch_size,
        estimated_speedup=verdict.speedup,
        round_ms=None if verdict.round_s is None else verdict.round_s * 1e3,
        looks_lost_ms=looks_lost_s * 1e3,
    )


def prefix_stats_to_proto(stats: PrefixStats) -> target_pb2.PrefixCacheStats:
    """Convert the numbers of the prefix cache to a message."""
    return target_pb2.PrefixCacheStats(
        enabled=stats.enabled,
        queried_tokens=stats.queried_tokens,
        hit_tokens=stats.hit_tokens,
        pages=stats.pages,
        evicted_pages=stats.evicted_pages,
    )


def resources_to_proto(stats: ResourceStats) -> target_pb2.ResourceStats:
    """Convert the memory, the graphs and the transport of a target to a message."""
    return target_pb2.ResourceStats(
        weight_bytes=stats.weight_bytes,
        kv_bytes=stats.kv_bytes,
        process_bytes=stats.process_bytes,
        gpu_used_bytes=stats.gpu_used_bytes,
        gpu_total_bytes=stats.gpu_total_bytes,
        graphs_recorded=stats.graphs_recorded,
        graph_bytes=stats.graph_bytes,
        graphs_left=stats.graphs_left,
        draft_transport=stats.draft_transport,
        draft_on_device=stats.draft_on_device,
        draft_features=stats.draft_features,
        draft_uptime_s=stats.draft_uptime_s,
        draft_connections_lost=stats.draft_connections_lost,
    )


def _finish(event: FinishedEvent) -> target_pb2.Finish:
    return target_pb2.Finish(
        reason=REASONS[event.reason],
        matched_token=event.matched_token,
        usage=common_pb2.Usage(
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.completion_tokens,
            cached_tokens=event.cached_tokens,
        ),
        speculation=report_to_proto(event.speculation),
        queue_ms=event.queue_s * 1e3,
        prefill_ms=event.prefill_s * 1e3,
        decode_ms=event.decode_s * 1e3,
    )
