"""Converts the field `speculation` of REST requests."""

from __future__ import annotations

from outrider.services.gateway.request import RequestedSpeculation
from outrider.services.gateway.schemas.option_fields.speculation import SpeculationOptions
from outrider.shared.base.generation import SpeculationMode


def requested_speculation(given: SpeculationOptions | None) -> RequestedSpeculation:
    """Return the speculation options of a request. None is treated like an empty object."""
    options = given or SpeculationOptions()
    return RequestedSpeculation(
        SpeculationMode(options.mode) if options.mode else None,
        options.depth,
        options.topk,
        options.max_nodes,
        options.trace,
    )
