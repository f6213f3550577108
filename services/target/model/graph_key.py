"""Names the CUDA graphs of the target: rounds, verify passes and prompts."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, NamedTuple

from outrider.services.target.model.input_batch import SamplingMode
from outrider.shared.spec.tree import DraftShape


class GraphKey(NamedTuple):
    """Identifies one recorded pass: passes with equal keys replay the same graph.

    Attributes:
        kind: A round that stays on the device, a verify pass of a round through the host, or a pass over a prompt.
        rows: Sequences of a batch, or tokens of a prompt.
        nodes: Nodes of each tree, the root included.
        pages: Columns of the page table.
        mode: How tokens are sampled; None where the graph serves every mode.
        shape: The shape of the draft trees of a round.
        columns: The most tokens that a round may choose.
        capture: Whether feature rows are computed and stored.
        drafter: The drafter's own part of the key, see `ResidentBatch.key`.
        draft_dependent: Whether the graph reads the drafter's tensors, the feature plane or the projector. Such graphs are void once
            another draft connects; those of plain decoding stay valid.
    """

    kind: Literal["round", "verify", "prefill"]
    rows: int
    nodes: int = 1
    pages: int = 0
    mode: SamplingMode | None = None
    shape: DraftShape | None = None
    columns: int = 0
    capture: bool = False
    drafter: Hashable = None
    draft_dependent: bool = False
