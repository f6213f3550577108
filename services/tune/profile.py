"""Writes the profile that `outrider up --profile FILE` loads: options of `up` as TOML, with comments."""

from __future__ import annotations

from pathlib import Path

from outrider.services.tune.candidates import shape_name
from outrider.services.tune.search import TuneResult
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.spec.tree import NO_DRAFT


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
        found = ", ".join(f"{shape_name(shape)} {speedup:.2f}" for shape, speedup in speedups)
        lines.append(f"# {one.batch} requests at a time: {found}")
    shape = result.shape
    if shape == NO_DRAFT:
        return "\n".join([*lines, "#", "# Drafting did not pay for any number of requests.", ""])
    return "\n".join(
        [
            *lines,
            f"num_steps = {shape.depth}",
            f"topk = {shape.topk}",
            f"num_draft_tokens = {shape.max_nodes}",
            "",
        ]
    )


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
