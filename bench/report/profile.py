"""The table of GPU time in a round: sorts the kernels of a recorded profile into a few groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from outrider.bench.report.recorded import RecordedResult

GROUPS: Mapping[str, re.Pattern[str]] = {
    "matrix products (with fused norms, SwiGLU, RoPE and K/V store)": re.compile(
        r"_?(sum|stay)_rows$|_(dot|wide|gated)_tiles$|.*(gemm|nvjet|cutlass|splitk)", re.IGNORECASE
    ),
    "attention, including the merge of its splits": re.compile(
        r"_(attention|gather|merge|plan_attention)$|merge(_rows)?$"
    ),
    "growing the trees": re.compile(r"_(input|expand_.*|level_.*|select|build|plan)$"),
}
"""Group → pattern of its kernels' names. All other kernels are in `REST`."""
REST = "everything else, such as token choice and copies"


def profile_lines(recorded: RecordedResult) -> Iterator[str]:
    """Yield a table that has one column for each profile of a result file."""
    profiles: Mapping[str, Mapping[str, Any]] = recorded.content["profiles"]
    yield f"| share of the GPU's time | {' | '.join(profiles)} |"
    yield "| --- |" + " --- |" * len(profiles)
    columns = [group_shares(profile) for profile in profiles.values()]
    for group in (*GROUPS, REST):
        yield f"| {group} | " + " | ".join(_percent(column[group]) for column in columns) + " |"
    for pause, key in (
        ("all pauses between kernels", "gpu_idle"),
        ("pauses of more than 8 µs", "gpu_idle_between"),
    ):
        yield f"| {pause} | " + " | ".join(_percent(profile[key]) for profile in profiles.values()) + " |"


def group_shares(profile: Mapping[str, Any]) -> dict[str, float]:
    """Return group → share of the profile's span. The sum exceeds 1 if kernels overlap."""
    shares = dict.fromkeys((*GROUPS, REST), 0.0)
    for name, _count, _ms, share in profile["kernels"]:
        group = next((group for group, pattern in GROUPS.items() if pattern.match(name)), REST)
        shares[group] += share
    return shares


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
