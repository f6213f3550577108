"""Builds the JSON objects that replies of several routes share: usage, speculation and metadata."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from outrider.services.gateway.request import Completion, Finished, Usage, merge_speculation
from outrider.services.gateway.served_target import AutoDecision, ServedTarget
from outrider.shared.base.generation import RoundTrace, SpeculationReport


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


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
            }
            for node in one.nodes
        ],
        "accepted": list(one.accepted),
        "emitted": list(one.emitted),
        "draft_ms": _finite(one.draft_ms),
        "verify_ms": _finite(one.verify_ms),
    }


def speculation_object(stats: SpeculationReport, trace: Sequence[RoundTrace] | None = None) -> dict[str, Any]:
    """Return the `speculation` object. It includes a trace only if the request asked for one."""
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


def decision_object(auto: AutoDecision) -> dict[str, Any] | None:
    """Return what mode `auto` has decided and why; None if the target does not tell."""
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


def reply_speculation(completions: Sequence[Completion], trace: bool) -> dict[str, Any]:
    """Return the `speculation` object of a whole reply, summed over all sequences.

    If there is one sequence, the object includes its trace. Otherwise each choice contains its own trace.
    """
    merged = merge_speculation([one.finished.speculation for one in completions])
    return speculation_object(merged, completions[0].rounds if trace and len(completions) == 1 else None)


def choice_extras(one: Completion, alone: bool, trace: bool, with_ids: bool) -> dict[str, Any]:
    """Return the fields of a choice that are not part of OpenAI's API."""
    extras: dict[str, Any] = {"matched_stop": one.finished.matched_stop}
    if with_ids:
        extras["token_ids"] = one.token_ids
    if not alone:
        extras["speculation"] = speculation_object(one.finished.speculation, one.rounds if trace else None)
    return extras


def metadata_object(info: ServedTarget, seed: int) -> dict[str, Any]:
    """Return the `metadata` object: the values needed to reproduce the answer."""
    return {"weight_version": info.weight_version, "seed": seed}


def finish_extras(end: Finished, info: ServedTarget, seed: int) -> dict[str, Any]:
    """Return the additional top-level fields of a stream's finish chunk."""
    return {"speculation": speculation_object(end.speculation), "metadata": metadata_object(info, seed)}


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
