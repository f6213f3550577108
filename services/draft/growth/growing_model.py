"""What the tree grower needs of a model: something that makes states of (token, state of its parent), level by level."""

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
"""(tokens ``[rows] int32``, states of the rows' parents ``[rows, hidden]``) → states ``[rows, hidden]``; attention is planned before."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a model that runs a level; a model that runs all levels alike has one.

    A stage keeps K/V of its own. Its rows see the stable rows of that K/V and their ancestors, of whatever level. A stage that takes over
    at a level from 2 therefore runs the levels before first, on the states that the stage before made of their parents.

    Attributes:
        behind: Stable rows that its K/V has less than the sequence's: the row of position t of the MTP module after `behind` others takes
            the token t + 1 + `behind`. Stages that lag 2 or more take over at level `behind`, from the one that lags one less.
    """

    behind: int = 0


ONE_STAGE = Stage()


@dataclass(frozen=True, slots=True)
class PassKey:
    """One pass over the rows of a level (from 1) by a stage."""

    level: int
    stage: Stage


def passes_of(model: GrowingModel, levels: int) -> list[list[PassKey]]:
    """Return the passes of each level from 1, the last of which is the level's own; those before are what its stage has missed."""
    passes: list[list[PassKey]] = []
    for level in range(1, levels + 1):
        stage = model.stage(level)
        takes_over = level > 1 and stage != passes[-1][-1].stage
        passes.append([PassKey(run, stage) for run in range(1 if takes_over else level, level + 1)])
    return passes


class GrowingModel(Protocol):
    """A model that grows trees; S = stable rows of a sequence, the last of them gave the state that level 0 starts from.

    The rows of level i of a stage sit at rope position ``S - 1 + i - behind``.

    Attributes:
        vocabulary: What its logits range over.
        device: Where it computes.
    """

    vocabulary: DraftVocabulary
    device: torch.device

    def stage(self, level: int) -> Stage:
        """Return which part runs a level, from 1."""
        ...

    def level_passes(
        self, positions: torch.Tensor, stages: Sequence[Stage], attention: AttentionBackend, pool: KVPool
    ) -> Sequence[LevelPass]:
        """Return the passes by the named stages, for rows at ``positions [passes, rows]``."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocabulary.size]`` for ``states [rows, hidden]``."""
        ...


class HeadGrowth:
    """`GrowingModel` of a recurrent head: one stage, the state of a row is the feature of its children."""

    def __init__(self, head: RecurrentHead) -> None:
        self._head = head
        self.vocabulary = head.vocabulary
        self.device = head.device

    def stage(self, level: int) -> Stage:
        """See `GrowingModel.stage`."""
        return ONE_STAGE

    def level_passes(
        self, positions: torch.Tensor, stages: Sequence[Stage], attention: AttentionBackend, pool: KVPool
    ) -> Sequence[LevelPass]:
        """See `GrowingModel.level_passes`."""
        rotations = split_rotation(self._head.rotation(positions.view(-1)), positions.shape[0])
        return [
            partial(self._head.forward, rotation=rotation, attention=attention, pool=pool)
            for rotation in rotations
        ]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """See `GrowingModel.logits`."""
        return self._head.logits(states)


def split_rotation(rotation: Rotation, levels: int) -> list[Rotation]:
    """Return the angles of each level, computed for the rows of all levels at once."""
    rows = rotation.cos.shape[0] // levels
    return [
        Rotation(rotation.cos[start : start + rows], rotation.sin[start : start + rows])
        for start in range(0, levels * rows, rows)
    ]
