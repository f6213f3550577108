"""SGLang's routes ``/v1/loads`` and ``/get_load``: the load of each target, for routers and autoscalers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from outrider.services.gateway.core import GatewayCore
from outrider.services.gateway.errors import JsonResponse
from outrider.services.gateway.render import memory_gib
from outrider.services.gateway.routes.context import ERROR_RESPONSES, core_of
from outrider.services.gateway.served_target import ServedTarget, TargetStats
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.version import installed_version
from outrider.shared.obs.metrics import CONTENT_TYPE

SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
"""Values of `include`. Targets of this server have only the sections core, memory and spec."""

Load = dict[str, Any]

router = APIRouter()


@router.get("/v1/loads", responses=ERROR_RESPONSES)
async def loads(
    request: Request,
    dp_rank: Annotated[int | None, Query(description="The target to describe. Default: all.")] = None,
    include: Annotated[str | None, Query(description=f"Comma-separated: {', '.join(SECTIONS)}.")] = None,
    kind: Annotated[Literal["json", "prometheus"], Query(alias="format")] = "json",
) -> Response:
    """Return the load of each target, under SGLang's names."""
    sections = [one.strip() for one in include.split(",")] if include else ["all"]
    if unknown := [one for one in sections if one not in SECTIONS]:
        raise InvalidRequestError(
            f"include: {unknown[0][:32]!r} is not one of {', '.join(SECTIONS)}.", field="include"
        )
    found = await _loads(core_of(request), sections)
    accelerators = found[0][1].tp_size or 1
    listed = [load for load, _ in found if dp_rank in (None, load["dp_rank"])]
    if kind == "prometheus":
        return Response(_prometheus(listed), media_type=CONTENT_TYPE)
    return JsonResponse(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": installed_version(),
            # The targets do not report the name of their GPU.
            "accelerator": None,
            "num_accelerators": accelerators,
            "dp_rank_count": len(listed),
            "loads": listed,
            "aggregate": _aggregate(listed),
        }
    )


@router.get("/get_load", responses=ERROR_RESPONSES)
async def get_load(request: Request) -> Response:
    """Return the load of each target in SGLang's older form."""
    now = time.perf_counter()
    return JsonResponse(
        [
            {
                "dp_rank": load["dp_rank"],
                "num_reqs": load["num_total_reqs"],
                "num_waiting_reqs": load["num_waiting_reqs"],
                "num_tokens": load["num_total_tokens"],
                "num_pending_tokens": load["num_total_tokens"] - load["num_used_tokens"],
                "ts_tic": now,
            }
            for load, _ in await _loads(core_of(request), ["core"])
        ]
    )


async def _loads(core: GatewayCore, sections: Sequence[str]) -> list[tuple[Load, ServedTarget]]:
    """Return the load and the description of each target that replies.

    Raises:
        UnavailableError: If no target replies.
    """
    answers = await core.targets.refresh(core.targets.members)
    throughput = core.metrics.recent.throughput()
    found = [
        (_load(rank, *answer, throughput, sections), answer[0])
        for rank, answer in enumerate(answers)
        if answer is not None
    ]
    if not found:
        raise core.targets.unavailable()
    return found


def _load(
    rank: int, info: ServedTarget, stats: TargetStats, throughput: float, sections: Sequence[str]
) -> Load:
    capacity = stats.pages_total * info.page_size
    used = stats.pages_held * info.page_size
    usage = stats.pages_held / stats.pages_total if stats.pages_total else 0.0
    busy = stats.running / info.max_running_requests if info.max_running_requests else 0.0
    prefixes = stats.prefix_cache
    load: Load = {
        "dp_rank": rank,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_total_reqs": stats.running + stats.waiting,
        "num_used_tokens": used,
        "num_total_tokens": used + stats.waiting_prompt_tokens,
        "max_total_num_tokens": capacity,
        "token_usage": round(usage, 4),
        # The gateway counts the tokens of all targets together.
        "gen_throughput": throughput,
        "cache_hit_rate": round(prefixes.hit_tokens / prefixes.queried_tokens, 4)
        if prefixes.queried_tokens
        else 0.0,
        "utilization": round(max(usage, busy), 4),
        "max_running_requests": info.max_running_requests,
    }
    if {"all", "memory"}.intersection(sections):
        weights, cache, graphs = memory_gib(stats.resources)
        load["memory"] = {
            "weight_gb": weights,
            "kv_cache_gb": cache,
            "graph_gb": graphs,
            "token_capacity": capacity,
        }
    if info.algorithm and {"all", "spec"}.intersection(sections):
        rate = stats.accepted_tokens / stats.draft_tokens if stats.draft_tokens else 0.0
        load["speculative"] = {
            "accept_length": round(stats.accept_length, 4),
            "accept_rate": round(rate, 4),
        }
    return load


def _aggregate(listed: Sequence[Load]) -> dict[str, float]:
    """Return sums and means over the targets."""

    def total(name: str) -> int:
        return sum(load[name] for load in listed)

    def mean(name: str) -> float:
        return round(sum(load[name] for load in listed) / len(listed), 4) if listed else 0.0

    return {
        "total_running_reqs": total("num_running_reqs"),
        "total_waiting_reqs": total("num_waiting_reqs"),
        "total_reqs": total("num_total_reqs"),
        "total_used_tokens": total("num_used_tokens"),
        "total_tokens": total("num_total_tokens"),
        "avg_token_usage": mean("token_usage"),
        "avg_throughput": mean("gen_throughput"),
        "avg_utilization": mean("utilization"),
    }


def _prometheus(listed: Sequence[Load]) -> str:
    """Return the loads as Prometheus text. SGLang abbreviates the section `speculative` in the names."""
    samples: dict[str, list[str]] = {}

    def add(prefix: str, values: Mapping[str, Any], rank: int) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                add(f"{prefix}{'spec' if name == 'speculative' else name}_", value, rank)
            elif name != "dp_rank":
                samples.setdefault(prefix + name, []).append(f'{prefix}{name}{{dp_rank="{rank}"}} {value}')

    for load in listed:
        add("sglang_", load, load["dp_rank"])
    lines = [line for name, found in samples.items() for line in (f"# TYPE {name} gauge", *found)]
    return "\n".join(lines) + "\n"
