"""Request fields of REST, written by `scripts/option_sources.py` from the table of options."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outrider.services.gateway.schemas.base import StrictModel


class SpeculationOptions(StrictModel):
    """The `speculation` object of a request. The number `max_nodes` includes the root of the draft tree.

    Without this object or without a mode, the mode is that of the gateway's setting `speculation_mode`.
    """

    mode: Literal["auto", "on", "off"] | None = Field(
        default=None,
        description="auto: the server decides in which rounds it drafts; on: in every round; off: in none.",
    )
    depth: int | None = Field(default=None, description="The largest number of levels of the tree.")
    topk: int | None = Field(
        default=None, description="Number of branches per level. With 1, the tree is a chain."
    )
    max_nodes: int | None = Field(
        default=None, description="The largest number of nodes of the tree, including the root."
    )
    trace: bool = Field(default=False, description="Whether the reply contains the tree of every round.")
