"""Builds the JSON object of ``GET /status.json``: services, load, memory, speculation, metrics and errors."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from outrider.services.gateway.core import GatewayCore
from outrider.services.gateway.render import decision_object
from outrider.services.gateway.served_target import PrefixCacheStats, ServedTarget, TargetStats
from outrider.shared.base.resources import ResourceStats
from outrider.shared.base.version import installed_version

HIDDEN_SUFFIXES = ("_created", "_bucket")
TARGET_LABELS = frozenset(["model", "target"])
OWN_PREFIX = "outrider_gateway_"
# Gauges that are averaged over several targets. All other metrics are summed.
SHARES = frozenset(
    ["outrider_kv_cache_usage_perc", "outrider_estimated_speedup", "outrider_auto_estimated_speedup"]
)


async def status_object(core: GatewayCore) -> dict[str, Any]:
    """Return the current status of the gateway and of its targets.

    `targets` lists each target. `target` and `metrics` contain totals over the targets that reply. `model`
    describes the model of the first target that replies. While no target replies, `target` and `model` are
    null. `recent` contains this gateway's tokens, running sequences and accept lengths in each of the last
    seconds.
    """
    members = core.targets.members
    answers = await core.targets.refresh(members)
    found = [(member, *answer) for member, answer in zip(members, answers, strict=True) if answer]
    now = time.time()
    return {
        "at": now,
        "version": installed_version(),
        "uptime_s": round(now - core.started_at, 3),
        "ready": core.ready,
        "draining": core.lifecycle.draining,
        "gateway": {
            "active": core.admission.active,
            "waiting": core.admission.waiting,
            "waiting_prompt_tokens": core.admission.waiting_tokens,
            "max_queued_requests": core.settings.max_queued_requests,
            "max_queued_prompt_tokens": core.settings.max_queued_prompt_tokens,
            "speculation_mode": core.settings.speculation_mode.value,
        },
        "model": _model(core, found[0][1]) if found else None,
        "target": _total([(info, stats) for _, info, stats in found]) if found else None,
        "targets": [
            {
                "address": member.address,
                "ready": member.client.ready,
                "model": member.labels["model"] or None,
                "load_tokens": member.load,
                "connections_lost": member.client.connections_lost,
                "stats": _total([answer]) if answer else None,
            }
            for member, answer in zip(members, answers, strict=True)
        ],
        "metrics": _samples(
            core.join_metrics([(member, stats.prometheus_text) for member, _, stats in found])
        ),
        "recent": core.metrics.recent.as_json(),
        "errors": core.errors.newest_first(),
    }


def _model(core: GatewayCore, info: ServedTarget) -> dict[str, Any]:
    return {
        "names": list(core.model_names),
        "architecture": info.architecture,
        "dtype": info.dtype,
        "device": info.device,
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "weight_version": info.weight_version,
    }


def _total(found: Sequence[tuple[ServedTarget, TargetStats]]) -> dict[str, Any]:
    """Return the combined load of the targets. Uptime, draft and controller are those of the first target."""
    first, first_stats = found[0]
    all_stats = [stats for _, stats in found]
    lengths = [one.accept_length for one in all_stats]
    lengths = [one for one in lengths if one and math.isfinite(one)]
    return {
        "uptime_s": first_stats.uptime_s,
        "running": sum(one.running for one in all_stats),
        "waiting": sum(one.waiting for one in all_stats),
        "generated_tokens": sum(one.generated_tokens for one in all_stats),
        "rounds": sum(one.rounds for one in all_stats),
        "max_running_requests": sum(info.max_running_requests for info, _ in found),
        "kv_pages": {
            "total": sum(one.pages_total for one in all_stats),
            "free": sum(one.pages_free for one in all_stats),
            "held": sum(one.pages_held for one in all_stats),
        },
        "prefix_cache": PrefixCacheStats.total(one.prefix_cache for one in all_stats).as_json(),
        "resources": ResourceStats.total(one.resources for one in all_stats).as_json(),
        "auto": decision_object(first_stats.auto),
        "draft": {
            "state": first_stats.draft_state,
            "uptime_s": first_stats.resources.draft_uptime_s,
            "connections_lost": first_stats.resources.draft_connections_lost,
            "algorithm": first.algorithm or None,
            "model": first.draft_model or None,
            "num_steps": first.num_steps,
            "topk": first.topk,
            "num_draft_tokens": first.num_draft_tokens,
        },
        "accept_length": sum(lengths) / len(lengths) if lengths else 0.0,
    }


def _samples(exposition: str) -> dict[str, float]:
    """Return the value of each sample in a Prometheus text, by name, without buckets and creation times.

    A sample with labels has the name ``name{label="value"}``. Samples that differ only in the labels of their
    target are combined into one value.
    """
    samples: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name.endswith(HIDDEN_SUFFIXES) or not math.isfinite(sample.value):
                continue
            hidden = frozenset() if sample.name.startswith(OWN_PREFIX) else TARGET_LABELS
            shown = sorted((name, value) for name, value in sample.labels.items() if name not in hidden)
            labels = ",".join(f'{name}="{value}"' for name, value in shown)
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            samples.setdefault(name, []).append(sample.value)
    return {
        name: sum(values) / len(values) if name in SHARES else sum(values) for name, values in samples.items()
    }
