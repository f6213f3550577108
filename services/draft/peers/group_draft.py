"""One group of a round for a remote target: sessions that draft with one shape, as a graph if possible."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from outrider.kernels.round_trade import admit_counts, pack_trees
from outrider.services.draft.growth.slot_groups import SessionGroup
from outrider.services.draft.peers.group_buffers import GroupBuffers
from outrider.services.draft.sessions.session import Session
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.spec.seeds import signed_seed
from outrider.shared.spec.tree import DraftShape


class GroupDraft:
    """One group's part of a drafting pass. The trees of all sessions in the group have the same shape.

    Args:
        group: The sessions, with reserved KV pages.
        buffers: Inputs and outputs for a group of this size.
        shape: Shape of every tree.
        sessions: The session of each batch row; None for a row that does not draft. If the batch has more
            rows than this list, the further rows are idle.

    Attributes:
        buffers: The inputs and outputs.
        key: Identifies everything that a recorded CUDA graph of the group depends on.
    """

    def __init__(
        self,
        group: SessionGroup,
        buffers: GroupBuffers,
        shape: DraftShape,
        sessions: Sequence[Session | None],
    ) -> None:
        self.buffers = buffers
        self.key: Hashable = (buffers.state.bs, buffers.state.columns, shape, group.key, buffers.kept)
        self._group = group
        self._sessions = list(sessions)
        self._sampling: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._drafts: torch.Tensor | None = None

    def replays(self, graphs: GraphCache) -> bool:
        """Return True if `run` launches nothing for the first time once this group has run."""
        return graphs.replays(self.key) or not graphs.enabled

    def record(self, graphs: GraphCache) -> None:
        """Record the group unless its graph exists already."""
        if not graphs.holds(self.key):
            self.buffers.expected.fill_(-1)  # idle rows: recording runs the group for real
            graphs.capture(self.key, self._run)

    def stage(self) -> None:
        """Prepare all copies to the device, which `load` then only enqueues.

        Pinned memory must not be allocated while the device waits for a state.
        """
        self._group.stage()
        state, sampled = self.buffers.state, self.buffers.sampled
        if sampled != self._sessions:
            parameters = [
                (0.0, 0, 0) if one is None else (one.temperature, signed_seed(one.seed), one.choice_index)
                for one in self._sessions
            ]
            fields = (state.temperature, state.seeds, state.choices)
            self._sampling = [
                (field, _pinned(values, field))
                for field, values in zip(fields, zip(*parameters, strict=True), strict=False)
            ]
            sampled[:] = self._sessions
        if None in self._sessions:
            drafts = _pinned([one is not None for one in self._sessions], state.counts)
            self._drafts = drafts.to(state.counts.device, non_blocking=True)

    def load(self) -> None:
        """Write pages and sampling parameters, in stream order, and make the rows without a session idle."""
        self._group.load()
        for field, values in self._sampling:
            field[: values.shape[0]].copy_(values, non_blocking=True)
        if self._drafts is not None:
            counts = self.buffers.state.counts
            counts[: self._drafts.shape[0]].mul_(self._drafts)

    def run(self, graphs: GraphCache) -> None:
        """Enqueue the group."""
        if graphs.replays(self.key):
            graphs.run(self.key, self._run)
        else:
            graphs.run_eagerly(self.key, self._run)

    def _run(self) -> None:
        """Run the part that can be recorded. All tensors of this part keep their addresses."""
        buffers = self.buffers
        # If the state did not arrive in time, the blob still contains the state of an earlier round. This
        # round then stores nothing and drafts nothing.
        admit_counts(buffers.number, buffers.expected, buffers.state.counts)
        trees, out = self._group.draft(buffers.state.rows), buffers.trees
        pack_trees(trees.num_nodes, trees.tokens, trees.parents, out.num_nodes, out.tokens, out.parents)


def _pinned(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    host = torch.tensor(values, dtype=like.dtype)
    return host.pin_memory() if like.is_cuda else host
