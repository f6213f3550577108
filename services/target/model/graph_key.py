"""Keys of the target's CUDA graphs for drafts, verify passes and prompt passes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, NamedTuple

from outrider.services.target.model.packed_batch import SamplingMode
from outrider.shared.spec.tree import DraftShape


class GraphKey(NamedTuple):
    """Key of a CUDA graph in the graph cache. Passes with equal keys replay the same graph.

    Attributes:
        kind: "draft" for the drafting of one tree shape, "verify" for a verify pass, "prefill" for a pass
            over prompt chunks, "prompt" for a pass over one prompt from its first token on.
        rows: Number of sequences of a draft, of packed rows of a verify pass, or of tokens of a prompt pass.
        width: For a verify pass, the class of the widest tree (`packed_batch.width_class`). For a draft, the
            number of columns of its state.
        mode: The sampling mode. None if the graph serves every mode.
        shape: Shape of the trees of a draft.
        capture: True if feature rows are computed and stored.
        masked: True if the verify pass is split in two, so that the host can find the allowed tokens in
            between.
        drafter: The part of the key that the drafter supplies.
        draft_dependent: True if the graph reads the drafter's tensors, the stored feature rows or the
            projection of features. Such graphs become invalid when another draft connects. Graphs of plain
            decoding stay valid.
    """

    kind: Literal["draft", "verify", "prefill", "prompt"]
    rows: int
    width: int = 1
    mode: SamplingMode | None = None
    shape: DraftShape | None = None
    capture: bool = False
    masked: bool = False
    drafter: Hashable = None
    draft_dependent: bool = False
