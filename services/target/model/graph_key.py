"""Keys of the target's CUDA graphs for rounds on the device, verify passes and prompt passes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, NamedTuple

from outrider.services.target.model.input_batch import SamplingMode
from outrider.shared.spec.tree import DraftShape


class GraphKey(NamedTuple):
    """Identifies one recorded pass. Passes with equal keys replay the same graph.

    Attributes:
        kind: "round" for a round on the device, "verify" for the verify pass of a host round, "prefill" for a
            pass over a prompt.
        rows: Number of sequences of a batch, or of tokens of a prompt.
        nodes: Number of nodes of each tree, including the root.
        pages: Number of columns of the page table.
        mode: The sampling mode. None if the graph serves every mode.
        shape: Shape of the draft trees of a round.
        columns: Maximum number of tokens that a round may choose per row.
        capture: True if feature rows are computed and stored.
        drafter: The drafter's part of the key, from `ResidentBatch.key`.
        draft_dependent: True if the graph reads the drafter's tensors, the feature plane or the projector.
            Such graphs become invalid when another draft connects. Graphs of plain decoding stay valid.
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
