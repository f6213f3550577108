"""Rows, attention masks and KV slots of each level of a growing draft tree, for `HostGrower`.

- `ShapeConstants`: tensors that depend only on the shape of a batch.
- `Levels`: positions and memory of all levels of one round.
- `TreeBeam`: the rows that the next level runs, with their scores, parents and ancestor masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.topk_expand import Expansion, select_beam
from outrider.services.draft.growth.growing_model import GrowingModel, LevelPass, PassKey, passes_of
from outrider.shared.attn.base import AttentionBatch
from outrider.shared.spec.tree import MASK_WORD_BITS, mask_words


@dataclass(frozen=True, slots=True)
class ShapeConstants:
    """Tensors that depend only on the shape of a batch, so that rounds of one shape share them.

    Attributes:
        bs: Number of sequences.
        topk: Rows per sequence and level.
        zeros: ``[bs] fp32``, the scores of the roots.
        root_parents: ``[bs, topk] int32``, all -1: the parents of the root's children.
        query_start: ``[bs + 1] int32``, index of each sequence's first row in a level, and the row count.
        first_child: ``[bs, 1] int32``, index of each sequence's first child among the children of a level.
        self_bits: ``[depth - 1, bs * topk, words] int32``, mask with each row's own bit, for each level.
        passes: The passes that run each level, starting with level 1.
        offsets: ``[passes, 1] int32``, rope position of each pass's rows, minus the number of stable rows.
        lags: The distinct values of `Stage.behind`, ascending.
        catches_up: True if a stage also runs levels before the one at which it takes over.
    """

    bs: int
    topk: int
    zeros: torch.Tensor
    root_parents: torch.Tensor
    query_start: torch.Tensor
    first_child: torch.Tensor
    self_bits: torch.Tensor
    passes: Sequence[Sequence[PassKey]]
    offsets: torch.Tensor
    lags: Sequence[int]
    catches_up: bool

    @classmethod
    def make(cls, bs: int, depth: int, topk: int, model: GrowingModel) -> ShapeConstants:
        """Make the constants of a shape on the model's device."""
        device = model.device
        levels = max(1, depth - 1)
        passes = passes_of(model, levels)
        keys = [key for of_level in passes for key in of_level]
        words = mask_words(levels * topk)
        columns = torch.arange(levels * topk)
        one = torch.ones((), dtype=torch.int32)
        bits = torch.zeros(levels * topk, words, dtype=torch.int32)
        bits[columns, columns // MASK_WORD_BITS] = one << (columns % MASK_WORD_BITS).to(torch.int32)
        self_bits = (
            bits.view(levels, 1, topk, words)
            .expand(levels, bs, topk, words)
            .reshape(levels, bs * topk, words)
        )
        return cls(
            bs,
            topk,
            torch.zeros(bs, device=device),
            torch.full((bs, topk), -1, dtype=torch.int32, device=device),
            (torch.arange(bs + 1, dtype=torch.int32) * topk).to(device),
            (torch.arange(bs, dtype=torch.int32) * topk * topk).view(bs, 1).to(device),
            self_bits.contiguous().to(device),
            passes,
            torch.tensor([key.level - 1 - key.stage.behind for key in keys], dtype=torch.int32)
            .view(-1, 1)
            .to(device),
            sorted({key.stage.behind for key in keys}),
            len(keys) > levels,
        )

    def columns_from(self, firsts: Sequence[int]) -> torch.Tensor:
        """Return masks of all scratch columns from a first column on.

        Args:
            firsts: The first column of each sequence.

        Returns:
            ``[bs * topk, words] int32``; the rows of one sequence have equal masks.
        """
        words = self.self_bits.shape[2]
        bits = [
            [(-1 << max(0, first - word * MASK_WORD_BITS)) & 0xFFFFFFFF for word in range(words)]
            for first in firsts
        ]
        masks = torch.tensor(bits, dtype=torch.int64).to(torch.int32)
        return masks.repeat_interleave(self.topk, 0).to(self.self_bits.device)


@dataclass(frozen=True, slots=True)
class Levels:
    """Positions and memory of the levels of one round's trees. A lag is a value of `Stage.behind`.

    Attributes:
        page_table: ``[bs, pages] int32``.
        prefixes: For each lag, ``[bs] int32``: the number of stable rows of a stage with that lag.
        slots: For each lag, ``[bs, depth - 1, topk] int64``: the KV slots that each level writes.
        visible: For each lag with which some rows would lie before position 0, ``[bs * topk, words] int32``:
            a mask of the scratch columns at position 0 or later.
        passes: The model's pass for each `PassKey`.
        constants: Constants of the shape.
        max_stable_len: Largest number of stable rows of a sequence.
    """

    page_table: torch.Tensor
    prefixes: Mapping[int, torch.Tensor]
    slots: Mapping[int, torch.Tensor]
    visible: Mapping[int, torch.Tensor]
    passes: Mapping[PassKey, LevelPass]
    constants: ShapeConstants
    max_stable_len: int

    def attention_batch(self, key: PassKey, ancestors: torch.Tensor) -> AttentionBatch:
        """Return the attention inputs of a pass. `ancestors` are the ancestor masks of its level's rows."""
        behind, topk = key.stage.behind, self.constants.topk
        prefix, written = self.prefixes[behind], topk * key.level
        if behind in self.visible:
            # Let every row attend to itself. A row that attends to nothing would become NaN. The NaN would
            # spoil even rows that do not attend to that row.
            ancestors = ancestors & self.visible[behind] | self.constants.self_bits[key.level - 1]
        return AttentionBatch(
            page_table=self.page_table,
            prefix_lens=prefix,
            kv_lens=prefix + written,
            query_start=self.constants.query_start,
            ancestors=ancestors,
            slots=self.slots[behind][:, key.level - 1].flatten().contiguous(),
            max_query_len=topk,
            max_kv_len=self.max_stable_len + written,
        )


@dataclass(frozen=True, slots=True)
class LevelRows:
    """The rows of one level, sequence by sequence.

    Attributes:
        tokens: ``[rows] int32``.
        ancestors: ``[rows, words] int32``, masks over the scratch columns: a row's ancestors and the row
            itself.
        parents: ``[rows]``, index of each row's parent among the rows of the previous level; meaningless at
            level 1.
    """

    tokens: torch.Tensor
    ancestors: torch.Tensor
    parents: torch.Tensor


class TreeBeam:
    """The rows that the next level runs, sequence by sequence. Starts with the children of the roots.

    Attributes:
        tokens: ``[rows] int32``.
        scores: ``[rows] fp32``, cumulative scores.
        states: ``[rows, hidden]``, the states of the rows' parents, used as the rows' features.
        ancestors, parents: The same as in `LevelRows`.
        candidates: ``[bs, topk] int32``, the index of each row among all candidates of its tree.
    """

    def __init__(self, children: Expansion, states: torch.Tensor, constants: ShapeConstants) -> None:
        topk = constants.topk
        self._constants = constants
        self.tokens = children.token_ids.view(-1)
        self.scores = children.scores.view(-1)
        self.states = states
        self.ancestors = constants.self_bits[0]
        self.parents = children.token_ids.view(-1)  # a placeholder: level 1 has no parents to gather from
        self.candidates = torch.arange(topk, dtype=torch.int32, device=states.device).expand(
            constants.bs, topk
        )

    def rows(self) -> LevelRows:
        """Return the rows that a pass needs, without scores and states."""
        return LevelRows(self.tokens, self.ancestors, self.parents)

    def advance(self, children: Expansion, states: torch.Tensor, level: int) -> None:
        """Move on to the best children of the rows of `level`. Each child inherits its parent's mask."""
        bs, topk = self._constants.bs, self._constants.topk
        chosen = select_beam(children.scores.view(bs, topk * topk), topk)  # [bs, topk] int32
        child = (chosen + self._constants.first_child).view(-1)  # index among the children of all sequences
        self.parents = child // topk
        self.tokens = children.token_ids.view(-1).index_select(0, child)
        self.scores = children.scores.view(-1).index_select(0, child)
        self.states = states.index_select(0, self.parents)
        self.ancestors = self.ancestors.index_select(0, self.parents).bitwise_or_(
            self._constants.self_bits[level]
        )
        # A tree's candidates are listed level by level: topk children of the root, then topk * topk per
        # level.
        self.candidates = chosen + (topk + (level - 1) * topk * topk)
