"""Converts requests, token deltas, traces and statistics to and from the target's protobuf messages.

Only this module, the target client and the gRPC servicer use protobuf messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.common.v1 import common_pb2
from outrider.gateway.v1 import gateway_pb2
from outrider.services.gateway.options.table import READ_OPTIONS, grpc_path
from outrider.services.gateway.options.values import OptionValues
from outrider.services.gateway.request import GenerationRequest, TargetDelta, TargetFinish, Usage
from outrider.services.gateway.served_target import (
    AutoDecision,
    PrefixCacheStats,
    ServedTarget,
    TargetStats,
)
from outrider.shared.base.generation import (
    FinishReason,
    RoundTrace,
    SpeculationMode,
    SpeculationReport,
    TraceNode,
)
from outrider.shared.base.resources import ResourceStats
from outrider.shared.rpc.constraint_messages import constraint_to_proto
from outrider.shared.rpc.logprob_messages import logprob_from_proto, logprobs_to_proto, set_rules
from outrider.shared.rpc.state_messages import state_params_to_proto, states_from_proto
from outrider.shared.rpc.target_version import TargetFeature, agree_with_target
from outrider.target.v1 import target_pb2

MESSAGE_INTERVAL_MS = 200
"""Least time between messages with tokens of an answer that is needed only as a whole.

With one message per round, the gateway would need about as long as the GPU for the tokens of 64 requests."""
MODE_TO_PROTO = {
    None: common_pb2.SPECULATION_MODE_UNSPECIFIED,
    SpeculationMode.AUTO: common_pb2.SPECULATION_MODE_AUTO,
    SpeculationMode.ON: common_pb2.SPECULATION_MODE_ON,
    SpeculationMode.OFF: common_pb2.SPECULATION_MODE_OFF,
}
MODE_FROM_PROTO = {value: mode for mode, value in MODE_TO_PROTO.items()}
REASON_TO_PROTO = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
}
REASON_FROM_PROTO = {value: reason for reason, value in REASON_TO_PROTO.items()}
# The first part of each path is the field `options` of the request.
_OPTION_PATHS = tuple((option, grpc_path(option.grpc[0]).split(".")[1:]) for option in READ_OPTIONS)


def options_from_proto(message: gateway_pb2.GenerationOptions) -> OptionValues:
    """Return the options of a client's gRPC request."""
    values = OptionValues()
    for option, (*outer, name) in _OPTION_PATHS:
        inner: Any = message
        for part in outer:
            inner = getattr(inner, part)
        kind = inner.DESCRIPTOR.fields_by_name[name]
        value = getattr(inner, name) if not kind.has_presence or inner.HasField(name) else None
        if isinstance(value, Mapping):
            value = {str(key): one for key, one in value.items()}
        elif isinstance(value, Sequence) and not isinstance(value, str):
            value = tuple(tuple(one.ids) if kind.message_type else one for one in value) or None
        values.put(option, value)
    return values


def request_to_proto(request: GenerationRequest, timeout_s: float) -> target_pb2.GenerateRequest:
    """Return the message that submits `request`.

    Args:
        request: The sequence to generate.
        timeout_s: Time left until the request's deadline, in seconds.
    """
    sampling, speculation = request.sampling, request.speculation
    options = common_pb2.SamplingOptions(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        choice_index=sampling.choice_index,
    )
    set_rules(options, sampling.rules)
    return target_pb2.GenerateRequest(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        max_new_tokens=request.max_new_tokens,
        sampling=options,
        speculation=common_pb2.SpeculationOptions(
            mode=MODE_TO_PROTO[speculation.mode],
            depth=speculation.depth,
            topk=speculation.topk,
            max_nodes=speculation.max_nodes,
            trace=speculation.trace,
        ),
        stop_token_ids=sorted(request.stop.token_ids),
        ignore_eos=request.stop.ignore_eos,
        timeout_ms=max(1, int(timeout_s * 1000)),
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        logprobs=logprobs_to_proto(request.logprobs),
        constraint=constraint_to_proto(request.constraint),
        traceparent=request.traceparent,
        resume_ids=request.resume_ids,
        states=state_params_to_proto(request.states),
        message_interval_ms=0 if request.streams else MESSAGE_INTERVAL_MS,
    )


def delta_from_proto(delta: target_pb2.TokenDelta) -> TargetDelta:
    """Convert the tokens of one message."""
    return TargetDelta(
        delta.token_ids[:],  # a slice is copied at once, not token by token
        [round_from_proto(one) for one in delta.rounds] if delta.rounds else (),
        [logprob_from_proto(one) for one in delta.logprobs] if delta.logprobs else (),
        [logprob_from_proto(one) for one in delta.prompt_logprobs] if delta.prompt_logprobs else (),
        states_from_proto(delta.states) if delta.HasField("states") else None,
        delta.cached_tokens,
        (delta.draft_tokens, delta.accepted_tokens) if delta.HasField("draft_tokens") else None,
    )


def finish_from_proto(finish: target_pb2.Finish) -> TargetFinish:
    """Convert the end of a sequence. A reason that only a newer target defines becomes `STOP`."""
    return TargetFinish(
        reason=REASON_FROM_PROTO.get(finish.reason, FinishReason.STOP),
        matched_token=finish.matched_token if finish.HasField("matched_token") else None,
        usage=Usage(finish.usage.prompt_tokens, finish.usage.completion_tokens, finish.usage.cached_tokens),
        speculation=stats_from_proto(finish.speculation),
        queue_s=finish.queue_ms / 1e3,
        prefill_s=finish.prefill_ms / 1e3,
        decode_s=finish.decode_ms / 1e3,
    )


def info_from_proto(reply: target_pb2.GetInfoReply) -> ServedTarget:
    """Convert the reply of GetInfo.

    Raises:
        ProtocolError: If the target and this gateway support no common version of the protocol.
    """
    speculation, features = reply.speculation, agree_with_target(reply)
    return ServedTarget(
        model_id=reply.model_id,
        architecture=reply.architecture,
        vocab_size=reply.vocab_size,
        max_model_len=reply.max_model_len,
        eos_token_ids=frozenset(reply.eos_token_ids),
        dtype=reply.dtype,
        device=reply.device,
        fingerprint=reply.fingerprint,
        weight_version=reply.weight_version or "default",
        max_running_requests=reply.max_running_requests,
        algorithm=speculation.algorithm,
        draft_model=speculation.draft_model,
        num_steps=speculation.num_steps,
        topk=speculation.topk,
        num_draft_tokens=speculation.num_draft_tokens,
        max_steps=speculation.max_steps,
        max_topk=speculation.max_topk,
        max_nodes=speculation.max_nodes,
        speculation_state=speculation.state,
        resumes=TargetFeature.RESUME in features,
        constrains=TargetFeature.CONSTRAINT in features,
        reports_states=TargetFeature.STATES in features,
        hidden_size=reply.hidden_size,
        routed_layers=reply.routed_layers,
        experts_per_token=reply.experts_per_token,
        model_path=reply.model_path or reply.model_id,
        tp_size=reply.tp_size or None,
        page_size=reply.page_size,
    )


def target_stats_from_proto(reply: target_pb2.GetStatsReply) -> TargetStats:
    """Convert the reply of GetStats."""
    return TargetStats(
        running=reply.running,
        waiting=reply.waiting,
        pages_total=reply.pages_total,
        pages_free=reply.pages_free,
        pages_held=reply.pages_held,
        draft_state=reply.draft_state,
        accept_length=reply.speculation.accept_length,
        generated_tokens=reply.generated_tokens,
        rounds=reply.rounds,
        prometheus_text=reply.prometheus_text,
        auto=_decision_from_proto(reply.auto),
        prefix_cache=PrefixCacheStats(
            reply.prefix_cache.enabled,
            reply.prefix_cache.queried_tokens,
            reply.prefix_cache.hit_tokens,
            reply.prefix_cache.pages,
            reply.prefix_cache.evicted_pages,
        ),
        resources=_resources_from_proto(reply.resources),
        waiting_prompt_tokens=reply.waiting_prompt_tokens,
        draft_tokens=reply.speculation.draft_tokens,
        accepted_tokens=reply.speculation.accepted_tokens,
        uptime_s=reply.uptime_s if reply.HasField("uptime_s") else None,
    )


def _resources_from_proto(stats: target_pb2.ResourceStats) -> ResourceStats:
    return ResourceStats(
        weight_bytes=stats.weight_bytes,
        kv_bytes=stats.kv_bytes,
        process_bytes=stats.process_bytes,
        gpu_used_bytes=stats.gpu_used_bytes,
        gpu_total_bytes=stats.gpu_total_bytes,
        graphs_recorded=stats.graphs_recorded,
        graph_bytes=stats.graph_bytes,
        graphs_left=stats.graphs_left,
        draft_transport=stats.draft_transport,
        draft_on_device=stats.draft_on_device if stats.HasField("draft_on_device") else None,
        draft_features=tuple(stats.draft_features),
        draft_uptime_s=stats.draft_uptime_s if stats.HasField("draft_uptime_s") else None,
        draft_connections_lost=stats.draft_connections_lost,
    )


def _decision_from_proto(auto: target_pb2.AutoDecision) -> AutoDecision:
    return AutoDecision(
        reason=auto.reason,
        shapes=tuple((one.depth, one.topk, one.max_nodes, one.rows) for one in auto.shapes),
        plain_rows=auto.plain_rows,
        batch_size=auto.batch_size,
        estimated_speedup=auto.estimated_speedup if auto.HasField("estimated_speedup") else None,
        round_ms=auto.round_ms if auto.HasField("round_ms") else None,
        looks_lost_ms=auto.looks_lost_ms,
    )


def stats_from_proto(stats: common_pb2.SpeculationStats) -> SpeculationReport:
    """Convert the speculation statistics of a sequence from protobuf."""
    return SpeculationReport(
        accept_length=stats.accept_length,
        rounds=stats.rounds,
        draft_tokens=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens,
        accepted_histogram=tuple(stats.accepted_histogram),
        fallback_reason=stats.fallback_reason,
        speedup_estimate=stats.speedup_estimate if stats.HasField("speedup_estimate") else None,
    )


def round_from_proto(one: common_pb2.RoundTrace) -> RoundTrace:
    """Convert one traced round from protobuf."""
    return RoundTrace(
        round=one.round,
        base_len=one.base_len,
        nodes=tuple(TraceNode(node.token, node.parent, node.depth, node.logprob) for node in one.nodes),
        accepted=tuple(one.accepted),
        emitted=tuple(one.emitted),
        draft_ms=one.draft_ms,
        verify_ms=one.verify_ms,
        reason=one.reason,
    )
