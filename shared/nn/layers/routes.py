"""Records which experts the routers of a pass chose, for clients that request the routed experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

NO_EXPERT = -1
"""Stands for the experts of a layer that has none."""

_record: ContextVar[list[torch.Tensor] | None] = ContextVar("routes", default=None)


@contextmanager
def recording_routes(wanted: bool = True) -> Iterator[list[torch.Tensor]]:
    """Context manager: record the experts that routers choose on this thread inside the ``with`` block.

    If a forward pass inside the block is captured into a CUDA graph, each replay writes the tensors again.

    Args:
        wanted: If False, nothing is recorded.

    Yields:
        A list that gets one tensor ``[rows, top_k] int64`` per sparse layer, in the order of the layers.
    """
    routes: list[torch.Tensor] = []
    token = _record.set(routes if wanted else None)
    try:
        yield routes
    finally:
        _record.reset(token)


def note_route(chosen: torch.Tensor) -> None:
    """Record the experts that a router chose, ``[rows, top_k] int64``, if they are being recorded."""
    routes = _record.get()
    if routes is not None:
        routes.append(chosen)


def stack_routes(routes: Sequence[torch.Tensor], sparse: Sequence[int], num_layers: int) -> torch.Tensor:
    """Return the recorded experts of one forward pass as a tensor ``[rows, num_layers, top_k] int32``.

    Args:
        routes: The list from `recording_routes`, with one tensor per sparse layer.
        sparse: Indices of the sparse layers, ascending.
        num_layers: Number of all layers. The entries of layers without experts are `NO_EXPERT`.

    Raises:
        ValueError: The list does not have one tensor per sparse layer.
    """
    if len(routes) != len(sparse) or not routes:
        raise ValueError(f"{len(routes)} routers ran in a model with {len(sparse)} sparse layers")
    found = torch.stack(list(routes), dim=1).to(torch.int32)
    if len(sparse) == num_layers:
        return found
    rows, _, top_k = found.shape
    stacked = found.new_full((rows, num_layers, top_k), NO_EXPERT)
    stacked[:, list(sparse)] = found
    return stacked
