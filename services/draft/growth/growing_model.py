"""The interface of a model with which `HostGrower` grows trees, and the adapter for recurrent heads.

Such a model maps tokens and their parents' states to states, level by level. A model may run different
levels with different stages, as chained MTP modules do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from outrider.services.draft.growth.recurrent_head import RecurrentHead
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.layers.rope import Rotation

LevelPass = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes the states ``[rows, hidden]`` of a level.

The arguments are the tokens ``[rows] int32`` and the states of the rows' parents ``[rows, hidden]``. The
caller plans attention before the call.
"""


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a model that runs a level. A model that runs all levels alike has one stage.

    Each stage has its own K/V. A row of the tree attends to the sequence's stable rows (those of committed
    tokens) in that K/V, and to its ancestors on all levels. A stage that takes over at level 2 or later
    therefore runs the earlier levels first. As inputs, it uses the states that the previous stage computed
    for the parents of those levels' rows.

    Attributes:
        behind: Number of the sequence's stable rows that this stage's K/V lacks. If `behind` modules precede
            an MTP module, that module reads the token t + 1 + `behind` in the row of position t. A stage with
            `behind` >= 2 takes over at level `behind`, from the stage whose `behind` is one less.
    """

    behind: int = 0


ONE_STAGE = Stage()


@dataclass(frozen=True, slots=True)
class PassKey:
    """One pass of a stage over the rows of a level. Levels are counted from 1."""

    level: int
    stage: Stage


def passes_of(model: GrowingModel, levels: int) -> list[list[PassKey]]:
    """Return the passes of each level from 1 on.

    The last pass of a level is the level's own. The passes before it run the earlier levels through a stage
    that takes over at this level.
    """
    passes: list[list[PassKey]] = []
    for level in range(1, levels + 1):
        stage = model.stage(level)
        takes_over = level > 1 and stage != passes[-1][-1].stage
        passes.append([PassKey(run, stage) for run in range(1 if takes_over else level, level + 1)])
    return passes


class GrowingModel(Protocol):
    """A model that grows trees.

    S is the number of stable rows of a sequence. Level 0 starts from the state of the last stable row. The
    rows of level i of a stage have rope position ``S - 1 + i - behind``.

    Attributes:
        vocabulary: Vocabulary of the logits.
        device: Device of the model.
    """

    vocabulary: DraftVocabulary
    device: torch.device

    def stage(self, level: int) -> Stage:
        """Return the stage that runs a level. Levels are counted from 1."""
        ...

    def level_passes(
        self, positions: torch.Tensor, stages: Sequence[Stage], attention: AttentionBackend, pool: KVPool
    ) -> Sequence[LevelPass]:
        """Return one pass for each of `stages`, for rows at rope positions ``positions [passes, rows]``."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[rows, vocabulary.size]`` for ``states [rows, hidden]``."""
        ...


class HeadGrowth(GrowingModel):
    """Grows trees with a recurrent head, which has one stage.

    The state of a row is the feature of the row's children.
    """

    def __init__(self, head: RecurrentHead) -> None:
        self._head = head
        self.vocabulary = head.vocabulary
        self.device = head.device

    def stage(self, level: int) -> Stage:
        return ONE_STAGE

    def level_passes(
        self, positions: torch.Tensor, stages: Sequence[Stage], attention: AttentionBackend, pool: KVPool
    ) -> Sequence[LevelPass]:
        rotations = split_rotation(self._head.rotation(positions.view(-1)), positions.shape[0])
        return [
            partial(self._head.forward, rotation=rotation, attention=attention, pool=pool)
            for rotation in rotations
        ]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._head.logits(states)


def split_rotation(rotation: Rotation, levels: int) -> list[Rotation]:
    """Split the rotary angles of all rows into equal parts, one for each level."""
    rows = rotation.cos.shape[0] // levels
    return [
        Rotation(rotation.cos[start : start + rows], rotation.sin[start : start + rows])
        for start in range(0, levels * rows, rows)
    ]
