"""Writes the profile that `outrider up --profile FILE` loads: options of `up` as TOML, with comments."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.services.tune.result import TuneResult
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.spec.tree import DraftShape

EXPLANATIONS = {
    SpeculationMode.AUTO: "The server chooses shapes within these limits, or decodes without drafts.",
    SpeculationMode.ON: "This shape was faster than mode auto for every number of requests.",
    SpeculationMode.OFF: "Drafting did not pay. Requests can still ask for drafts with mode auto or on.",
}
"""Mode → comment in the profile."""


def profile_text(result: TuneResult, target: str, draft: str) -> str:
    """Return the contents of a profile.

    Args:
        result: The result of the search.
        target, draft: Names of the pair, for the comments.
    """
    lines = [
        "# Written by `outrider tune`. Load it with `outrider up --profile FILE`.",
        f"# Target: {_comment(target)}",
        f"# Draft: {_comment(draft)}",
        "#",
        "# Measured speed relative to plain decoding:",
    ]
    for one in result.batches:
        speedups = sorted(
            ((shape, one.speedup(shape) or 0.0) for shape in one.measured if shape.drafts),
            key=lambda found: -found[1],
        )
        found = ", ".join(f"{shape.name} {speedup:.2f}" for shape, speedup in speedups)
        if one.auto_speedup is not None:
            found = f"auto {one.auto_speedup:.2f}, {found}"
        lines.append(f"# batch {one.batch}: {found}")
    lines += ["#", f"# {EXPLANATIONS[result.mode]}"]
    for name, value in profile_values(result).items():
        lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join([*lines, ""])


def profile_values(result: TuneResult) -> dict[str, str | int]:
    """Return the options of `outrider up` in the profile: the mode, and the shape unless the mode is off."""
    values: dict[str, str | int] = {"speculation_mode": result.mode.value}
    if result.mode is SpeculationMode.OFF:
        return values
    return values | shape_json(result.default_shape)


def shape_json(shape: DraftShape) -> dict[str, int]:
    """Return a shape under the names of the options of `outrider up`."""
    return {"num_steps": shape.depth, "topk": shape.topk, "num_draft_tokens": shape.max_nodes}


def write_profile(path: Path, text: str) -> None:
    """Write a profile.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--output {path} cannot be written: {error}.", field="--output") from error


def _comment(text: str) -> str:
    return " ".join(text.split())
