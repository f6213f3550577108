"""Drafts on the target's device. For each tree shape, the drafting can be recorded as one CUDA graph.

For each tree shape of a round, the device gathers the state of the slots that draft with this shape. The
drafter extends its K/V by the tokens of the last round and grows the trees. The trees are written to the
packed rows of their sequences. All this is enqueued before the host has read the previous round.

The drafter does no work for a sequence that does not draft in a round. Its feature rows stay in the target's
KV pool, and this module keeps its tokens. Before the sequence drafts again, the drafter processes these
tokens and feature rows.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from outrider.kernels.packed_round import GroupRows
from outrider.services.target.drafting.draft_source import DraftSource, PreparedDrafts
from outrider.services.target.drafting.planner import DraftPlanner
from outrider.services.target.drafting.shape_groups import (
    ShapeGroup,
    gather_rows,
    pack_drafts,
    shape_groups,
)
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.model.step_runner import StepRunner
from outrider.services.target.policy.cost_model import DraftPath
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.engine.buckets import batch_buckets
from outrider.shared.kv.upload import upload
from outrider.shared.spec.device_drafter import DeviceDrafter, SeatedGroup
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

TOLD_TOGETHER = 64
"""Number of tokens of a sequence without drafts that are passed to the drafter together."""


@dataclass(frozen=True, slots=True)
class _Group:
    """The inputs of a draft of one size, at fixed addresses."""

    members: torch.Tensor
    rows: GroupRows


class ResidentSource(DraftSource):
    """Draft source for a drafter on the target's device. Engine thread only, under inference mode.

    Args:
        drafter: Drafts in stream order.
        runner: The target's model and KV pool.
        step_runner: Owns the slots and the packed trees.
        planner: Counts the sequences that cannot draft in a round, and predicts which sequences will draft.
    """

    def __init__(
        self,
        drafter: DeviceDrafter,
        runner: ModelRunner,
        step_runner: StepRunner,
        planner: DraftPlanner,
    ) -> None:
        self._drafter = drafter
        self._runner = runner
        self._step_runner = step_runner
        self._planner = planner
        self._batch_sizes = batch_buckets(step_runner.table.slots)
        self._groups: dict[tuple[int, int], _Group] = {}
        # Sessions that drafted in the last enqueued pass. Their K/V contains all rows of earlier passes.
        self._continuous: set[int] = set()
        # New tokens of sequences that do not draft. The drafter receives them later, in larger commits.
        self._untold: dict[int, list[int]] = {}

    @property
    def path(self) -> DraftPath:
        return DraftPath.DEVICE

    def recording(self, batch_size: int, shape: DraftShape) -> Callable[[], None]:
        return lambda: self._capture(batch_size, shape)

    def waits_for_host(self, entries: Seq[Entry]) -> bool:
        return False

    def prepare(self, entries: Seq[Entry]) -> PreparedDrafts:
        # 1. Supply the rows that sessions lack because they did not draft in the last pass.
        drafting = {entry.sequence.session_id for entry in entries if entry.shape.drafts}
        behind = [
            entry.sequence
            for entry in entries
            if entry.shape.drafts and entry.sequence.session_id not in self._continuous
        ]
        most_rows = 0
        for sequence in behind:
            rows = self._supply(sequence, sequence.committed_len - 1)
            if rows is None:
                drafting.discard(sequence.session_id)
            else:
                most_rows = max(most_rows, rows)
        self._drafter.catch_up([one.session_id for one in behind if one.session_id in drafting])
        self._continuous -= {entry.sequence.session_id for entry in entries}
        # 2. Seat the sessions of each shape.
        placed = list(entries)
        places = {entry.sequence.session_id: index for index, entry in enumerate(entries)}
        for index, entry in enumerate(entries):
            if entry.shape.drafts and entry.sequence.session_id not in drafting:
                self._drop(placed, index, "not_followed")
        groups = shape_groups([entry for entry in placed if entry.shape.drafts], self._batch_sizes)
        launches = [
            self._seat(group, [places[session_id] for session_id in group.session_ids], placed)
            for group in groups
        ]
        if not launches:
            return PreparedDrafts(placed, None)

        def draft() -> None:
            for launch in launches:
                launch()

        return PreparedDrafts(placed, draft, catches_up=most_rows > self._step_runner.table.columns)

    def prefilled(self, chunk: PrefillChunk) -> None:
        """Feed the drafter a prompt chunk, if the sequence will probably draft in its first round."""
        sequence = chunk.sequence
        if not sequence.drafted or sequence.remaining <= 1:
            return
        if self._planner.expects_drafts(sequence):
            stop = min(chunk.stop, sequence.committed_len - 1)
            if self._supply(sequence, stop) is not None:
                self._drafter.catch_up([sequence.session_id])
                if sequence.controller_state is not None:
                    sequence.controller_state.drafted_len = chunk.stop

    def first_token(self, sequence: Sequence, token: int) -> None:
        self._keep(sequence.session_id, [token])

    def committed(self, entry: Entry, kept: Seq[int], outcome: Outcome) -> None:
        session_id = entry.sequence.session_id
        # A session that was reopened after the round began has none of the round's rows.
        if entry.shape.drafts and entry.epoch == entry.sequence.epoch:
            self._tell(session_id)
            self._drafter.committed(session_id, kept, drafted=True)
        else:
            self._keep(session_id, kept)

    def ended(self, sequence: Sequence) -> None:
        self._continuous.discard(sequence.session_id)
        self._untold.pop(sequence.session_id, None)

    def abandon(self) -> None:
        self._continuous.clear()
        self._untold.clear()

    @torch.inference_mode()
    def _capture(self, batch_size: int, shape: DraftShape) -> None:
        """Record the draft of one size before it is needed, with idle rows."""
        shape = shape.bounded()
        columns = shape.columns
        group = self._group(batch_size, columns)
        group.members.fill_(-1)
        seated = self._drafter.seat((), (), shape, batch_size, columns)
        key = _key(batch_size, columns, shape, seated)
        self._runner.graphs.capture(key, lambda: self._run(group, seated))

    def _keep(self, session_id: int, tokens: Seq[int]) -> None:
        """Pass tokens without drafts to the drafter: in batches, unless the session has just drafted."""
        untold = self._untold.setdefault(session_id, [])
        untold += tokens
        if session_id in self._continuous or len(untold) >= TOLD_TOGETHER:
            self._tell(session_id)

    def _tell(self, session_id: int) -> None:
        """Tell the drafter of all tokens that were kept."""
        tokens = self._untold.pop(session_id, None)
        if tokens:
            self._drafter.committed(session_id, tokens, drafted=False)

    def _supply(self, sequence: Sequence, stop: int) -> int | None:
        """Send the drafter the tokens and stored feature rows that it lacks. Send no rows from `stop` on.

        Returns:
            The number of feature rows that were lacking. None if the drafter does not follow the sequence.
        """
        self._tell(sequence.session_id)
        lacking = self._drafter.lacking(sequence.session_id)
        if lacking is None:
            return None
        if lacking.start < min(lacking.stop, stop):
            rows = self._runner.read_features(sequence, lacking.start, min(lacking.stop, stop))
            self._drafter.features(sequence.session_id, lacking.start, rows)
        return max(0, min(lacking.stop, stop) - lacking.start)

    def _seat(self, seats: ShapeGroup, members: list[int], placed: list[Entry]) -> Callable[[], None]:
        """Seat the sessions of one shape, and return a function that enqueues their drafts.

        Args:
            seats: The sessions.
            members: For each session, the index of its entry.
            placed: The entries of the round. Entries of refused sessions lose their drafts.
        """
        size, columns = seats.size.batch_size, seats.size.columns
        group = self._group(size, columns)
        seated = self._drafter.seat(seats.session_ids, seats.committed_upper, seats.shape, size, columns)
        refused = set(seated.refused)
        for row in refused:
            self._drop(placed, members[row], "kv_full")
        self._continuous |= {
            session_id for row, session_id in enumerate(seats.session_ids) if row not in refused
        }
        held = [-1 if row in refused else index for row, index in enumerate(members)]
        places = upload(held + [-1] * (size - len(held)), torch.int32, self._runner.device)
        key, graphs = _key(size, columns, seats.shape, seated), self._runner.graphs
        recorded = len(members) <= self._step_runner.recorded_entries

        def launch() -> None:
            if recorded and graphs.due(key) and not graphs.holds(key):
                group.members.fill_(-1)  # idle rows, because a recording runs the draft
                graphs.capture(key, lambda: self._run(group, seated))
            seated.load()
            group.members.copy_(places)
            if not recorded:
                self._run(group, seated)
            elif graphs.replays(key):
                graphs.run(key, lambda: self._run(group, seated))
            else:
                graphs.run_eagerly(key, lambda: self._run(group, seated))

        return launch

    def _run(self, group: _Group, seated: SeatedGroup) -> None:
        """Run the part of a draft that can be recorded. All tensors of this part keep their addresses."""
        gather_rows(self._step_runner, group.members, group.rows)
        pack_drafts(self._step_runner, seated.draft(group.rows), group.members)

    def _drop(self, placed: list[Entry], index: int, reason: str) -> None:
        """Let an entry verify its root alone in this round."""
        placed[index] = replace(placed[index], shape=NO_DRAFT)
        self._planner.fell_back(placed[index].sequence, reason)

    def _group(self, batch_size: int, columns: int) -> _Group:
        key = (batch_size, columns)
        if key not in self._groups:
            self._groups[key] = self._make_group(batch_size, columns)
        return self._groups[key]

    def _make_group(self, batch_size: int, columns: int) -> _Group:
        pool = self._runner.pool
        with torch.inference_mode(False):
            integers = torch.zeros((4, batch_size), dtype=torch.int32, device=pool.device)
            rows = GroupRows(
                committed_lens=integers[0],
                counts=integers[1],
                tokens=torch.zeros((batch_size, columns), dtype=torch.int32, device=pool.device),
                features=torch.zeros(
                    (batch_size, columns, pool.feature_size), dtype=pool.dtype, device=pool.device
                ),
                temperature=torch.zeros(batch_size, device=pool.device),
                seeds=torch.zeros(batch_size, dtype=torch.int64, device=pool.device),
                choices=integers[2],
            )
            rows.committed_lens.fill_(1)
        return _Group(integers[3], rows)


def _key(batch_size: int, columns: int, shape: DraftShape, seated: SeatedGroup) -> GraphKey:
    return GraphKey("draft", batch_size, width=columns, shape=shape, drafter=seated.key, draft_dependent=True)
