"""Builds the JSON object of ``GET /status.json``: services, load, memory, speculation, metrics, errors."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from outrider.services.gateway.core import GatewayCore
from outrider.services.gateway.served_target import ServedTarget, TargetStats
from outrider.shared.base.errors import OutriderError
from outrider.shared.base.version import installed_version

HIDDEN_SUFFIXES = ("_created", "_bucket")


async def status_object(core: GatewayCore) -> dict[str, Any]:
    """Return the current status. `target` and `model` are null while the target does not answer."""
    stats: TargetStats | None = None
    info: ServedTarget | None = None
    if core.client.ready:
        try:
            stats = await core.client.stats()
            info = await core.client.refresh_info()
        except OutriderError:
            stats = info = None
    now = time.time()
    return {
        "at": now,
        "version": installed_version(),
        "uptime_s": round(now - core.started_at, 3),
        "ready": core.ready,
        "draining": core.draining,
        "gateway": {
            "active": core.admission.active,
            "waiting": core.admission.waiting,
            "waiting_prompt_tokens": core.admission.waiting_tokens,
            "max_queued_requests": core.settings.max_queued_requests,
            "max_queued_prompt_tokens": core.settings.max_queued_prompt_tokens,
        },
        "model": None if info is None else _model(core, info),
        "target": None if stats is None or info is None else _target(stats, info),
        "metrics": _samples(core.join_metrics(stats)),
        "errors": core.errors.newest_first(),
    }


def _model(core: GatewayCore, info: ServedTarget) -> dict[str, Any]:
    return {
        "names": list(core.settings.served_model_name or (info.model_id,)),
        "architecture": info.architecture,
        "dtype": info.dtype,
        "device": info.device,
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "weight_version": info.weight_version,
    }


def _target(stats: TargetStats, info: ServedTarget) -> dict[str, Any]:
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "generated_tokens": stats.generated_tokens,
        "rounds": stats.rounds,
        "max_running_requests": info.max_running_requests,
        "kv_pages": {"total": stats.pages_total, "free": stats.pages_free, "held": stats.pages_held},
        "prefix_cache": asdict(stats.prefix_cache),
        "draft": {
            "state": stats.draft_state,
            "algorithm": info.algorithm or None,
            "model": info.draft_model or None,
            "num_steps": info.num_steps,
            "topk": info.topk,
            "num_draft_tokens": info.num_draft_tokens,
        },
        "accept_length": stats.accept_length if math.isfinite(stats.accept_length) else None,
    }


def _samples(exposition: str) -> dict[str, float]:
    """Return name → value for the samples of a Prometheus text, without buckets and creation times.

    A sample with labels has the name ``name{label="value"}``.
    """
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name.endswith(HIDDEN_SUFFIXES) or not math.isfinite(sample.value):
                continue
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples
