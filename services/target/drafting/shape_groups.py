"""The groups of a round: the sequences that draft with one tree shape, and their rows on the device."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from outrider.kernels.packed_round import GroupRows, gather_group, pack_trees
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.model.step_runner import StepRunner
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.engine.buckets import padded_size
from outrider.shared.spec.resident import GroupSize
from outrider.shared.spec.tree import DraftBatch, DraftShape


@dataclass(frozen=True, slots=True)
class ShapeGroup:
    """The sequences that draft with the same tree shape in a round.

    Attributes:
        shape: Shape of every tree of the group.
        sequences: The sequence of each row of the group's tensors. Any further rows are idle.
        size: Sizes of the group's tensors.
    """

    shape: DraftShape
    sequences: Seq[Sequence]
    size: GroupSize

    @property
    def session_ids(self) -> list[int]:
        """The session of each row."""
        return [sequence.session_id for sequence in self.sequences]

    @property
    def committed_upper(self) -> list[int]:
        """For each row, an upper bound of the number of committed tokens at the start of the round."""
        return [sequence.committed_upper for sequence in self.sequences]


def shape_groups(drafting: Seq[Entry], batch_sizes: Seq[int]) -> list[ShapeGroup]:
    """Divide the drafting entries of a round into groups with equal tree shapes.

    The order of the groups depends only on their shapes, so that fewer combinations of groups occur. The
    first round with a new combination is slower.

    Args:
        drafting: The entries that draft.
        batch_sizes: Numbers of rows that the tensors of a group may have, ascending.
    """
    by_shape: dict[DraftShape, list[Sequence]] = {}
    for entry in drafting:
        by_shape.setdefault(entry.shape, []).append(entry.sequence)
    groups: list[ShapeGroup] = []
    for shape in sorted(by_shape, key=lambda shape: (shape.topk, shape.depth, shape.max_nodes)):
        sequences = by_shape[shape]
        batch_size = padded_size(batch_sizes, len(sequences))
        columns = max(shape.columns, *(sequence.fresh_columns for sequence in sequences))
        groups.append(ShapeGroup(shape, sequences, GroupSize(batch_size, columns, shape.max_nodes)))
    return groups


def gather_rows(step_runner: StepRunner, members: torch.Tensor, rows: GroupRows) -> None:
    """Enqueue the copy of a group's state from the slots to the rows of the group's tensors.

    Args:
        step_runner: Owns the slots.
        members: ``[G] int32``, the index of the entry of each row. Idle rows have -1.
        rows: Receives the state.
    """
    table, batch = step_runner.table, step_runner.batch
    gather_group(table.state, table.features, table.sampling, members, batch.entries(batch.rows), rows)


def pack_drafts(step_runner: StepRunner, drafts: DraftBatch, members: torch.Tensor) -> None:
    """Enqueue the copy of a group's trees to the packed rows of their entries.

    Args:
        step_runner: Owns the packed trees.
        drafts: Trees on the target's device, ``[G, N]``: G rows with N nodes each.
        members: ``[G] int32``, the index of the entry of each row. Idle rows have -1.
    """
    batch = step_runner.batch
    pack_trees(
        drafts.tokens,
        drafts.parents,
        drafts.depths,
        drafts.ancestors,
        drafts.num_nodes,
        drafts.logprobs,
        members,
        batch.entries(batch.rows),
        batch.trees(batch.rows),
    )
