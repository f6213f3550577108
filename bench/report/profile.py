"""Where the GPU's time goes in a round: the kernels of a recorded profile in a few groups, for docs/performance.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from outrider.bench.report.recorded import RecordedResult

GROUPS: Mapping[str, re.Pattern[str]] = {
    "matrix products (norms, SwiGLU, rope and K/V store in their tails)": re.compile(
        r"_?(sum|stay)_rows$|_(dot|wide|gated)_tiles$|.*(gemm|nvjet|cutlass|splitk)", re.IGNORECASE
    ),
    "attention and the merge of its splits": re.compile(r"_(attention|gather|merge)$"),
    "growing the tree: inputs, top-k, next beam, build": re.compile(
        r"_(input|expand_.*|level_.*|select|build|plan)$"
    ),
}
"""What a kernel belongs to, by its name; the others are the rest."""
REST = "choice, walk, compaction, bookkeeping, copies, remaining sums of split products"


def profile_lines(recorded: RecordedResult) -> Iterator[str]:
    """Yield the lines of a table with a column for every profile of a file."""
    profiles: Mapping[str, Mapping[str, Any]] = recorded.content["profiles"]
    yield f"| shares of the GPU's time | {' | '.join(profiles)} |"
    yield "| --- |" + " --- |" * len(profiles)
    columns = [group_shares(profile) for profile in profiles.values()]
    for group in (*GROUPS, REST):
        yield f"| {group} | " + " | ".join(_percent(column[group]) for column in columns) + " |"
    pauses = [
        f"{_percent(profile['gpu_idle'])}; {_percent(profile['gpu_idle_between'])}"
        for profile in profiles.values()
    ]
    yield (
        "| pauses between kernels; of them over 8 µs, where only the host can be late | "
        + " | ".join(pauses)
        + " |"
    )


def group_shares(profile: Mapping[str, Any]) -> dict[str, float]:
    """Return group → share of the profile's span; they add up to more than 1 where kernels overlap."""
    shares = dict.fromkeys((*GROUPS, REST), 0.0)
    for name, _count, _ms, share in profile["kernels"]:
        group = next((group for group, pattern in GROUPS.items() if pattern.match(name)), REST)
        shares[group] += share
    return shares


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
