"""Memory for the inputs and outputs of groups (at fixed addresses, for CUDA graphs) and of whole rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.services.draft.sessions.session import Session
from outrider.shared.spec.resident import GroupSize, RoundState, StateBlob, StateLayout, TreesBlob


@dataclass(frozen=True, slots=True)
class GroupBuffers:
    """Inputs and outputs of the groups of one size, at fixed addresses."""

    state: RoundState  # the received state
    blob: torch.Tensor  # all memory of `state`
    number: torch.Tensor  # the round number in the header of `blob`
    expected: torch.Tensor  # [1] int32, the current round; a state with another number drafts nothing
    trees: TreesBlob  # the trees to send
    kept: bool  # False if only one round uses this memory, which graphs then must not contain
    sampled: list[Session | None] = field(default_factory=list)  # whose sampling parameters `state` has

    @classmethod
    def make(
        cls, size: GroupSize, feature_size: int, dtype: torch.dtype, device: torch.device, *, kept: bool
    ) -> GroupBuffers:
        """Allocate the buffers of a size."""
        state = RoundState.idle(size.batch_size, size.columns, feature_size, dtype, device)
        assert state.packed is not None
        with torch.inference_mode(False):
            expected = torch.zeros(1, dtype=torch.int32, device=device)
        trees = TreesBlob.make(size.batch_size, size.nodes, device)
        return cls(state, state.packed, state.packed[:4].view(torch.int32), expected, trees, kept)


class JointBuffers:
    """Memory for the messages of rounds with several groups. The rounds use it in turn, in stream order.

    A blob is the packed state or the packed trees of one round.

    Attributes:
        states, trees: ``[n] uint8``, the memory for the state blob and for the tree blob.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.states = self.trees = torch.zeros(0, dtype=torch.uint8, device=device)
        with torch.inference_mode(False):
            self._expected = torch.zeros(1, dtype=torch.int32, device=device)

    def reserve(self, state_bytes: int, trees_bytes: int) -> None:
        """Grow the memory. The old memory is freed in stream order."""
        with torch.inference_mode(False):
            if state_bytes > self.states.nbytes:
                self.states = torch.zeros(state_bytes, dtype=torch.uint8, device=self._device)
            if trees_bytes > self.trees.nbytes:
                self.trees = torch.zeros(trees_bytes, dtype=torch.uint8, device=self._device)

    def parts(self, groups: Sequence[GroupBuffers]) -> JointParts:
        """Return the blobs of a round with these groups. A single group needs no joint memory."""
        if len(groups) == 1:
            return JointParts(_state(groups[0].blob, groups), groups[0].expected, groups[0].trees.blob, ())
        state_bytes = sum(group.blob.nbytes for group in groups)
        trees_bytes = sum(group.trees.blob.nbytes for group in groups)
        state = _state(self.states[:state_bytes], groups)
        return JointParts(state, self._expected, self.trees[:trees_bytes], groups)


def _state(packed: torch.Tensor, groups: Sequence[GroupBuffers]) -> StateBlob:
    return StateBlob(packed, StateLayout([group.state.layout for group in groups]))


@dataclass(frozen=True, slots=True)
class JointParts:
    """The packed state and the packed trees of one round, as transferred between target and draft.

    Attributes:
        state: The received round state.
        trees: ``[n] uint8``, the packed trees to send.
        expected: ``[1] int32``, receives the round's number.
        groups: The groups whose own memory differs from the memory of `state` and `trees`. Their parts must
            be copied. Empty if there is only one group.
    """

    state: StateBlob
    expected: torch.Tensor
    trees: torch.Tensor
    groups: Sequence[GroupBuffers]

    def spread(self) -> None:
        """Copy the received states to their groups, in stream order."""
        start, packed = 0, self.state.packed
        for group in self.groups:
            stop = start + group.blob.nbytes
            group.blob.copy_(packed[start:stop], non_blocking=True)
            if start:  # only the first header contains the number
                group.number.copy_(packed[:4].view(torch.int32), non_blocking=True)
            group.expected.copy_(self.expected, non_blocking=True)
            start = stop

    def collect(self) -> None:
        """Copy the trees of all groups to the blob that is sent, in stream order."""
        start = 0
        for group in self.groups:
            stop = start + group.trees.blob.nbytes
            self.trees[start:stop].copy_(group.trees.blob, non_blocking=True)
            start = stop
