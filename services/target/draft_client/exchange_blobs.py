"""Owns the memory of rounds with a remote draft: the states to send, and the trees to receive."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from outrider.draft.v1 import draft_pb2
from outrider.kernels.tree_check import tree_check
from outrider.services.target.draft_client.transport.exchange import Exchange
from outrider.shared.spec.exchanged_slots import TreeExchange
from outrider.shared.spec.resident import (
    GroupSize,
    RoundState,
    StateBlob,
    StateLayout,
    TreesBlob,
    state_starts,
    trees_starts,
)
from outrider.shared.spec.tree import DraftBatch

MAX_LAYOUTS = 256
"""Number of combinations of sizes whose views of the memory are kept."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Views of the memory for rounds with one combination of sizes.

    Attributes:
        state: The memory that is sent.
        states: Views of that memory as one state per group.
        blob: The memory that receives the trees.
        trees: Views of that memory as the trees of one group each.
    """

    state: StateBlob
    states: Sequence[RoundState]
    blob: torch.Tensor
    trees: Sequence[TreesBlob]


class ExchangeBlobs:
    """Owns the device memory for the round states and trees that the target and the draft exchange.

    All rounds use the same memory one after the other, in stream order.

    Args:
        device: The target's device.
        vocab_size: The target's vocabulary size.
    """

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._states = self._trees = torch.zeros(0, dtype=torch.uint8, device=device)
        with torch.inference_mode(False):
            self._expected = torch.zeros(1, dtype=torch.int32, device=device)
        self._layouts: dict[tuple[tuple[GroupSize, ...], int, torch.dtype], _Layout] = {}

    def views(
        self, sizes: Sequence[GroupSize], feature_size: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory for the states and the memory for the trees of a round with these group sizes."""
        layout = self._layout(tuple(sizes), feature_size, dtype)
        return layout.state.packed, layout.blob

    def round(
        self,
        message: draft_pb2.RoundsNext,
        sizes: Sequence[GroupSize],
        channel: Exchange,
        *,
        feature_size: int,
        dtype: torch.dtype,
        longest_s: float,
        least_s: float,
        refused: Collection[int],
    ) -> BoundedTreeExchange:
        """Return a round whose states and trees are stored in this object's memory.

        Args:
            message: The message that announces the round to the draft.
            sizes: The size of each group. The sequences that draft with the same tree shape form a group.
            channel: Carries the states to the draft, and the trees to the target.
            feature_size, dtype: Number of elements and data type of a feature row.
            longest_s: Longest wait for the trees, in seconds.
            least_s: Lower limit, in seconds, for a wait that `BoundedTreeExchange.exchange` shortens. It is
                positive if the draft may need more time than usual.
            refused: Ids of the sessions that cannot draft in this round.
        """
        layout = self._layout(tuple(sizes), feature_size, dtype)
        return BoundedTreeExchange(
            message, layout, channel, self._expected, self._vocab_size, longest_s, least_s, refused
        )

    def forget(self) -> None:
        """Discard the trees that have arrived, because round numbers start again."""
        self._trees.zero_()

    def _layout(self, sizes: tuple[GroupSize, ...], feature_size: int, dtype: torch.dtype) -> _Layout:
        key = (sizes, feature_size, dtype)
        starts, ends = state_starts(sizes, feature_size, dtype), trees_starts(sizes)
        if starts[-1] > self._states.nbytes or ends[-1] > self._trees.nbytes:
            # The old memory is freed in stream order.
            self._layouts.clear()
            with torch.inference_mode(False):
                state_bytes = max(starts[-1], self._states.nbytes)
                trees_bytes = max(ends[-1], self._trees.nbytes)
                self._states = torch.zeros(state_bytes, dtype=torch.uint8, device=self._device)
                self._trees = torch.zeros(trees_bytes, dtype=torch.uint8, device=self._device)
        if key not in self._layouts:
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts.clear()
            states = [
                RoundState.of_packed(
                    self._states[start:stop], size.batch_size, size.columns, feature_size, dtype
                )
                for size, start, stop in zip(sizes, starts, starts[1:], strict=False)
            ]
            trees = [
                TreesBlob.of(self._trees[start:stop], size.batch_size, size.nodes)
                for size, start, stop in zip(sizes, ends, ends[1:], strict=False)
            ]
            layout = StateLayout([one.layout for one in states])
            state = StateBlob(self._states[: starts[-1]], layout)
            self._layouts[key] = _Layout(state, states, self._trees[: ends[-1]], trees)
        return self._layouts[key]


class BoundedTreeExchange(TreeExchange):
    """One round of drafting in another process, with a limit on the wait for the trees.

    `ExchangeBlobs.round` explains the arguments.

    Attributes:
        may_be_slow: True if the draft may need more time than usual for this round.
        patient: True if only sequences without a deadline (speculation mode `on`) wait for the trees.
        limit_s: Longest wait for the trees, in seconds.
    """

    def __init__(
        self,
        message: draft_pb2.RoundsNext,
        layout: _Layout,
        channel: Exchange,
        expected: torch.Tensor,
        vocab_size: int,
        longest_s: float,
        least_s: float,
        refused: Collection[int],
    ) -> None:
        self.number = message.number
        self.states = layout.states
        self.refused = refused
        self.may_be_slow = least_s > 0
        self.patient = False
        self.limit_s = 0.0
        self._message = message
        self._layout = layout
        self._channel = channel
        self._expected = expected
        self._vocab_size = vocab_size
        self._longest_s = longest_s
        self._least_s = least_s

    def exchange(self, limit_s: float | None, ahead: bool) -> None:
        self.patient = limit_s is None
        self.limit_s = (
            self._longest_s if limit_s is None else min(max(limit_s, self._least_s), self._longest_s)
        )
        self._channel.exchange(
            self._message, self._layout.state, self._layout.blob, self._expected, self.limit_s, ahead
        )

    def trees(self, group: int) -> DraftBatch:
        state, trees = self._layout.states[group], self._layout.trees[group]
        checked = tree_check(
            self._layout.trees[0].number,
            self._expected,
            trees.num_nodes,
            trees.tokens,
            trees.parents,
            state.tokens,
            state.counts,
            vocab_size=self._vocab_size,
            depth=self._message.groups[group].shape.depth,
        )
        return DraftBatch(
            checked.tokens, checked.parents, checked.depths, checked.num_nodes, checked.ancestors
        )
