"""Inputs and outputs of the rounds of one size, at addresses that CUDA graphs can contain."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.draft.v1 import draft_pb2
from outrider.kernels.packed_round import GroupRows
from outrider.shared.spec.resident import RoundState, TreesBlob


@dataclass(frozen=True, slots=True)
class RoundBuffers:
    """Inputs and outputs of the rounds of one size, at fixed addresses."""

    state: RoundState  # the received state
    blob: torch.Tensor  # all memory of `state`
    number: torch.Tensor  # the round number in the header of `blob`
    expected: torch.Tensor  # [1] int32, the current round; a state with another number drafts nothing
    trees: TreesBlob  # the trees to send

    @property
    def rows(self) -> GroupRows:
        """The received state as the input of a draft."""
        state = self.state
        return GroupRows(
            state.committed_lens,
            state.counts,
            state.tokens,
            state.features,
            state.temperature,
            state.seeds,
            state.choices,
        )

    @classmethod
    def make(cls, message: draft_pb2.RoundsEnter, dtype: torch.dtype, device: torch.device) -> RoundBuffers:
        """Allocate the buffers for the size in `message`."""
        state = RoundState.idle(message.batch, message.columns, message.feature_size, dtype, device)
        assert state.packed is not None
        with torch.inference_mode(False):
            expected = torch.zeros(1, dtype=torch.int32, device=device)
        trees = TreesBlob.make(message.batch, message.shape.max_nodes, device)
        return cls(state, state.packed, state.packed[:4].view(torch.int32), expected, trees)
