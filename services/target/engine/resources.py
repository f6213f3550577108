"""Measures what a target uses now: memory, CUDA graphs, and the transport of its drafts."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from outrider.services.target.engine.recorder import GraphRecorder
from outrider.services.target.model.model_runner import ModelRunner
from outrider.shared.base.resources import ResourceStats
from outrider.shared.spec.drafter import Drafter


def measure_resources(
    runner: ModelRunner, recorder: GraphRecorder, drafter: Drafter, drafted_on_device: bool | None
) -> ResourceStats:
    """Measure the memory and the CUDA graphs of a target now. Thread-safe.

    Args:
        runner: Owns the model, the K/V cache and the CUDA graphs.
        recorder: Counts the graphs that are left to record.
        drafter: Describes its transport.
        drafted_on_device: True if the trees of the last drafted round stayed on the devices, and False if
            they passed through the host. None before the first drafted round.
    """
    device, pool = runner.pool.device, runner.pool
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    route = drafter.route()
    return ResourceStats(
        weight_bytes=runner.decoder.weight_bytes,
        kv_bytes=pool.capacity_tokens * pool.bytes_per_token,
        process_bytes=resident_bytes(),
        gpu_used_bytes=total - free,
        gpu_total_bytes=total,
        graphs_recorded=len(runner.graphs.keys),
        graph_bytes=runner.graphs.memory_bytes,
        graphs_left=recorder.num_first + recorder.num_further,
        draft_transport=route.transport,
        draft_on_device=drafted_on_device,
        draft_features=route.features,
        draft_uptime_s=route.uptime_s,
        draft_connections_lost=route.connections_lost,
    )


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if Linux's /proc is not there."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
