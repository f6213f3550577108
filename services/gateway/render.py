"""Builds the JSON objects that several routes use in their replies: usage, speculation and metadata."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from outrider.services.gateway.parsers.answer import ParsedAnswer
from outrider.services.gateway.request import (
    FINISH_NAMES,
    Completion,
    Finished,
    Usage,
    drafted_rounds,
    merge_speculation,
)
from outrider.services.gateway.served_target import AutoDecision, ServedTarget
from outrider.shared.base.errors import CancelledError
from outrider.shared.base.generation import FinishReason, RoundTrace, SpeculationReport
from outrider.shared.base.resources import ResourceStats

GIB = 1024**3


def usage_object(usage: Usage, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Return OpenAI's `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def finish_name(end: Finished, answer: ParsedAnswer) -> str:
    """Return OpenAI's name for the reason why an answer ended.

    Raises:
        CancelledError: If the sequence was aborted.
    """
    check_not_aborted(end)
    return "tool_calls" if ends_with_calls(end, answer) else FINISH_NAMES[end.reason]


def ends_with_calls(end: Finished, answer: ParsedAnswer) -> bool:
    """Return whether the answer ended by itself and calls tools. A stop string may cut off a call."""
    if not answer.tool_calls or end.reason is not FinishReason.STOP:
        return False
    return not (isinstance(end.matched_stop, str) and answer.ends_in_call)


def check_not_aborted(end: Finished) -> None:
    """Raise CancelledError if the sequence was aborted, because OpenAI's API has no name for this reason."""
    if end.reason is FinishReason.CANCELLED:
        raise CancelledError("The request was aborted.", reason="aborted")


def trace_object(one: RoundTrace) -> dict[str, Any]:
    """Return one round of `speculation.trace`."""
    return {
        "round": one.round,
        "base_len": one.base_len,
        "nodes": [
            {
                "token": node.token,
                "parent": node.parent,
                "depth": node.depth,
                "logprob": _finite(node.logprob),
                "text": node.text,
            }
            for node in one.nodes
        ],
        "accepted": list(one.accepted),
        "emitted": list(one.emitted),
        "emitted_text": list(one.emitted_text),
        "draft_ms": _finite(one.draft_ms),
        "verify_ms": _finite(one.verify_ms),
        "reason": one.reason or None,
    }


def speculation_object(stats: SpeculationReport, trace: Sequence[RoundTrace] | None = None) -> dict[str, Any]:
    """Return the `speculation` object. If the request asked for a trace, the object includes the trace."""
    body: dict[str, Any] = {
        "accept_length": _finite(stats.accept_length),
        "rounds": stats.rounds,
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "accepted_histogram": list(stats.accepted_histogram),
        "fallback_reason": stats.fallback_reason or None,
        "speedup_estimate": None if stats.speedup_estimate is None else _finite(stats.speedup_estimate),
    }
    if trace is not None:
        body["trace"] = [trace_object(one) for one in trace]
    return body


def memory_gib(resources: ResourceStats) -> tuple[float, float, float]:
    """Return the memory of a target's weights, KV cache and CUDA graphs, in GiB as in SGLang's replies."""
    sizes = (resources.weight_bytes, resources.kv_bytes, resources.graph_bytes)
    weights, cache, graphs = (round(size / GIB, 2) for size in sizes)
    return weights, cache, graphs


def decision_object(auto: AutoDecision) -> dict[str, Any] | None:
    """Return the last decision of mode `auto`, and its reason. None if the target reports no decision."""
    if not auto.reason:
        return None
    speedup, round_ms = auto.estimated_speedup, auto.round_ms
    return {
        "reason": auto.reason,
        "shapes": [
            {"depth": depth, "topk": topk, "max_nodes": max_nodes, "rows": rows}
            for depth, topk, max_nodes, rows in auto.shapes
        ],
        "plain_rows": auto.plain_rows,
        "batch_size": auto.batch_size,
        "estimated_speedup": None if speedup is None else _finite(speedup),
        "round_ms": None if round_ms is None else _finite(round_ms),
        "looks_lost_ms": _finite(auto.looks_lost_ms),
    }


def reply_speculation(completions: Sequence[Completion], trace: bool, info: ServedTarget) -> dict[str, Any]:
    """Return the fields `speculation` and `metrics` of a reply, with sums over all sequences of the request.

    If the request has only one sequence, `speculation` includes the trace of the sequence. Otherwise each
    choice in the reply includes its own trace.
    """
    merged = merge_speculation([one.finished.speculation for one in completions])
    rounds = completions[0].rounds if trace and len(completions) == 1 else None
    return {"speculation": speculation_object(merged, rounds), **metrics_field(merged, info)}


def choice_extras(
    one: Completion, alone: bool, trace: bool, with_ids: bool, with_prompt_ids: bool
) -> dict[str, Any]:
    """Return the fields of a choice that OpenAI's API does not define."""
    extras: dict[str, Any] = {"matched_stop": one.finished.matched_stop}
    if with_ids:
        extras["token_ids"] = one.token_ids
    if with_prompt_ids:
        extras["prompt_token_ids"] = list(one.prompt_ids)
    if not alone:
        extras["speculation"] = speculation_object(one.finished.speculation, one.rounds if trace else None)
    return extras


def metadata_object(info: ServedTarget, seed: int) -> dict[str, Any]:
    """Return the `metadata` object, which contains the values needed to reproduce the answer."""
    # OpenAI's clients expect text.
    return {"weight_version": info.weight_version, "seed": str(seed)}


def finish_extras(end: Finished, info: ServedTarget, seed: int) -> dict[str, Any]:
    """Return the additional top-level fields of a stream's finish chunk."""
    return {
        "speculation": speculation_object(end.speculation),
        "metadata": metadata_object(info, seed),
        **metrics_field(end.speculation, info),
    }


def metrics_field(stats: SpeculationReport, info: ServedTarget) -> dict[str, Any]:
    """Return vLLM's field `metrics` with speculation statistics. Empty if no tokens were drafted.

    All numbers cover only the rounds with drafted tokens. The histogram maps a number of accepted tokens to
    the number of rounds in which the target accepted exactly that many tokens.
    """
    if not stats.draft_tokens:
        return {}
    accepted = stats.accepted_tokens
    histogram = {at: count for at, count in enumerate(stats.accepted_histogram) if at and count}
    steps = max(round(drafted_rounds(stats)), sum(histogram.values()))
    histogram[0] = steps - sum(histogram.values())
    return {
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": round(1 + accepted / steps, 6) if steps else 1.0,
                "draft_acceptance_rate": round(accepted / stats.draft_tokens, 6),
                "acceptance_histogram": {str(at): count for at, count in sorted(histogram.items()) if count},
                "num_spec_steps": steps,
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": stats.draft_tokens,
                "num_spec_tokens": max([info.num_steps, *histogram]),
            }
        }
    }


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
