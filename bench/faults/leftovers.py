"""Counts what requests left behind in idle services: sequences, pages, and sessions of the draft."""

from __future__ import annotations

import asyncio
import re
import time

from outrider.bench.faults.answers import Asker

SETTLE_S = 20.0
"""Longest wait until an idle server has freed everything. The draft's metrics are some seconds old."""
POLL_S = 0.5
GAUGE = re.compile(r"^([A-Za-z_:][\w:]*)(\{.*\})?\s+([-+.\deE]+)$", re.MULTILINE)
LEFT_OVER = re.compile(r"running|waiting|requests_active|leaked|draft_sessions|load_tokens")
NO_GAUGE = ("_bucket", "_sum", "_count", "_total", "_created")


async def settle(asker: Asker) -> dict[str, float]:
    """Empty the prefix cache of an idle server, and return the gauges that do not return to zero.

    The gauges count sequences, sessions of the draft, leaked slots, and KV pages in use.
    """
    await asker.post("/flush_cache")
    ends = time.monotonic() + SETTLE_S
    while True:
        left = await _left_over(asker)
        if not left or time.monotonic() >= ends:
            return left
        await asyncio.sleep(POLL_S)


async def _left_over(asker: Asker) -> dict[str, float]:
    metrics, info = await asker.get("/metrics"), await asker.get("/server_info")
    if metrics is None or info is None or not metrics.is_success or not info.is_success:
        return {"no answer": 1.0}
    left = {
        name + labels: float(value)
        for name, labels, value in GAUGE.findall(metrics.text)
        if LEFT_OVER.search(name + labels) and not name.endswith(NO_GAUGE) and float(value)
    }
    held = sum(one["kv_pages_total"] - one["kv_pages_free"] for one in info.json()["internal_states"])
    return {**left, "pages not free": held} if held else left
