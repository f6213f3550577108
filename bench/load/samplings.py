"""The named samplings of the load commands. A request with one of them has the fields listed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.shared.base.errors import ConfigurationError

Sampling = Mapping[str, Any]

GREEDY: Sampling = {"temperature": 0.0}
SAMPLINGS: Mapping[str, Sampling] = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 40},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "min_p": {"temperature": 1.1, "min_p": 0.05},
    "filters": {"temperature": 1.2, "top_k": 100, "top_p": 0.95, "min_p": 0.1},
    "seed": {"temperature": 0.8, "seed": 7},
}
"""Name → fields of the samplings that draw tokens at random. ``filters`` has all filters at once."""


def named_samplings(text: str) -> list[Sampling]:
    """Parse the comma-separated names of `--sampling`.

    Raises:
        ConfigurationError: A name is unknown.
    """
    known = {"greedy": GREEDY, **SAMPLINGS}
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"--sampling {name}: expected a comma-separated list of {', '.join(known)}.",
                field="--sampling",
            )
    return [known[name] for name in names]
