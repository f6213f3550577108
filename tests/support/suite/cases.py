"""Selects cases of a test with several parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def every_pair(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return all pairs of `first` and `second`, each with one value of `third`, which take turns.

    Any two values of different parameters occur together in at least one case. Values that are tuples are
    joined: ``(1, 2), "a", (3,)`` becomes ``(1, 2, "a", 3)``.

    Raises:
        ValueError: `third` is longer than `first` or `second`, so some pairs could not occur.
    """
    if len(third) > min(len(first), len(second)):
        raise ValueError("the third parameter has more values than one of the others")
    return [
        (*_parts(one), *_parts(two), *_parts(third[(i + j) % len(third)]))
        for i, one in enumerate(first)
        for j, two in enumerate(second)
    ]


def _parts(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,)
