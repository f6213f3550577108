"""Stages of a draft model: chained MTP layers. Each stage has its own K/V and runs certain levels of a tree.

Stage s runs level s of a tree, and the last stage runs all further levels. The row of stage s at position t
has two inputs: the token at position t + 1 + s, and the state of stage s - 1 at position t. Rows that are
computed from committed tokens are *stable*. Stage s has s fewer stable rows than stage 0. In the KV of each
stage, the rows of a growing tree follow the stable rows:

    position         S - 2     S - 1     S         S + 1          (S stable rows of stage 0, topk = 1)
    stage 0          stable    stable
    stage 1          stable    level 1
    stage 2          level 1   level 2   level 3

A row of the tree attends to the stable rows of its stage, and to its ancestors on all levels. A later stage
therefore needs its own K/V of the earlier levels. It first runs these levels (`passes_of`), with the states
of the previous stage as input.

At the end of a round, stage s cannot use the last state of stage s - 1 yet: the next token is not known.
`StageStates` therefore keeps the last state of every stage but the final one until the next round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from outrider.services.draft.growth.draft_model import DraftModel
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.tree import MASK_WORD_BITS, mask_words


class PassKey(NamedTuple):
    """One pass of a stage over the rows of a level.

    Level 0 contains the newly committed tokens of each sequence. The other levels belong to the draft tree.
    """

    level: int
    stage: int


def passes_of(model: DraftModel, levels: int) -> list[list[PassKey]]:
    """Return the passes of each level of a draft tree, from level 1 on, for a model with several stages.

    The last pass of a level computes the level itself. If another stage begins at this level, additional
    passes come first. They run the earlier levels through the new stage.
    """
    passes: list[list[PassKey]] = []
    for level in range(1, levels + 1):
        stage = model.stage(level)
        takes_over = level > 1 and stage != passes[-1][-1].stage
        passes.append([PassKey(run, stage) for run in range(1 if takes_over else level, level + 1)])
    return passes


class StageStates:
    """The state of the last stable row, for each sequence and for each stage but the final one.

    The index of a sequence's states is its *place*: the number of the sequence's first page that was not
    stored before the sequence began (`PageLease.first_new_page`). No two sequences have the same such page at
    the same time. The places are on the device, beside the page table, so CUDA graphs find the states without
    the host.

    Args:
        model: The draft model, with at least two stages.
        pool: The KV pool of the model.
    """

    def __init__(self, model: DraftModel, pool: KVPool) -> None:
        self._idle = pool.num_pages
        with torch.inference_mode(False):
            self._states = torch.zeros(
                (pool.num_pages + 1, model.stages - 1, model.hidden_size),
                dtype=model.dtype,
                device=model.device,
            )
            self._rows = torch.zeros(pool.num_pages + 1, dtype=torch.int32, device=model.device)

    def places(self, places: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the place of each sequence's states, ``[bs] int64``. Idle sequences share one extra place.

        Args:
            places: ``[bs] int32``, the places of the sequences that are not idle.
            counts: ``[bs] int32``, number of new tokens of each sequence; 0 for idle sequences.
        """
        return torch.where(counts > 0, places, self._idle).to(torch.int64)

    def read(self, places: torch.Tensor) -> torch.Tensor:
        """Return the states at ``places [n] int64``, as ``[n, stages - 1, hidden]``."""
        return self._states.index_select(0, places)

    def fresh_rows(self, places: torch.Tensor, stop: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the number of new rows of each sequence in an extension, ``[n] int32``.

        An earlier extension may already have computed the other rows. For example, the host may have extended
        a sequence by tokens that the target's slot contains too.

        Args:
            places: ``[n] int64``, the places of the sequences' states.
            stop: ``[n] int32``, the number of rows of stage 0 after the extension.
            counts: ``[n] int32``, the number of rows by which the round extends each sequence.
        """
        return (stop - self._rows.index_select(0, places)).clamp(min=0).minimum(counts)

    def keep(
        self, places: torch.Tensor, states: torch.Tensor, stop: torch.Tensor, fresh: torch.Tensor
    ) -> None:
        """Replace the stored states of the sequences. Sequences without new rows keep their old states.

        Args:
            places: ``[n] int64``, the places of the sequences' states.
            states: ``[n, stages - 1, hidden]``, the states of the stages' last rows after an extension.
            stop: ``[n] int32``, the number of rows of stage 0 after the extension.
            fresh: ``[n] int32``, how many rows of the extension were new.
        """
        new = fresh > 0
        self._states.index_copy_(0, places, torch.where(new[:, None, None], states, self.read(places)))
        self._rows.index_copy_(0, places, torch.where(new, stop, self._rows.index_select(0, places)))

    def clear(self, place: int) -> None:
        """Forget the states of an ended sequence whose place now belongs to another sequence."""
        self._rows[place] = 0


class HiddenLevels:
    """Attention masks for sequences that are too short for the first tree levels of one stage.

    If a sequence has S < s stable rows, the first s - S levels of stage s would lie before position 0. The
    rows of these levels are computed like all other rows, but the masks hide them from all other rows.

    Args:
        stage: The number s of the stage.
        depth, topk: Depth and level width of the trees.
        device: Device of the masks.
    """

    def __init__(self, stage: int, depth: int, topk: int, device: torch.device) -> None:
        columns = max(1, depth - 1) * topk
        every = torch.arange(mask_words(columns) * MASK_WORD_BITS)
        self._stage = stage
        # Row h of `_visible` has the bits of all columns from level 1 + h on. Row (i, j) of `_own` has only
        # the bit of row j of level 1 + i.
        self._visible = _packed(every >= (torch.arange(stage + 1) * topk)[:, None]).to(device)
        self._own = _packed(every == torch.arange(columns)[:, None]).view(-1, topk, mask_words(columns))
        self._own = self._own.to(device)

    def apply(self, ancestors: torch.Tensor, level: int, stable_lens: torch.Tensor) -> torch.Tensor:
        """Return the ancestor masks of one tree level, without the columns that must be hidden.

        Every row still sees itself. A row that saw nothing would become NaN. The NaN would then spread even
        to rows that do not see this row.

        Args:
            ancestors: ``[bs * topk, words] int32``, masks of the level's rows.
            level: The level, counted from 1.
            stable_lens: ``[bs] int32``, number of stable rows of stage 0.
        """
        bs, topk = stable_lens.shape[0], self._own.shape[1]
        visible = self._visible.index_select(0, (self._stage - stable_lens).clamp(0, self._stage))
        seen = ancestors.view(bs, topk, -1) & visible[:, None] | self._own[level - 1]
        return seen.view(bs * topk, -1)


def after_last(states: torch.Tensor, last: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """Return the states that a stage reads when it is extended.

    These are the states of the previous stage, shifted by one row.

    Args:
        states: ``[bs, R, hidden]``, states of the previous stage. The last ``fresh[b]`` rows are new.
        last: ``[bs, hidden]``, the state of the previous stage's last row before this extension.
        fresh: ``[bs] int32``, number of new rows of each sequence.

    Returns:
        ``[bs, R, hidden]``. The first new row has the state `last`.
    """
    rows = states.shape[1]
    earlier = torch.cat([last[:, None], states[:, :-1]], 1)
    first = torch.arange(rows, device=states.device) == (rows - fresh)[:, None]  # [bs, R]
    return torch.where(first[:, :, None], last[:, None], earlier)


def fresh_slots(slots: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """Return ``slots [bs * R] int64``, with -1 for every row but the last ``fresh[b]`` rows of sequence b."""
    rows = slots.view(fresh.shape[0], -1)
    stale = torch.arange(rows.shape[1], device=slots.device) < (rows.shape[1] - fresh)[:, None]
    return torch.where(stale, -1, rows).view(-1)


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """Pack ``bits [rows, words * 32] bool`` into masks ``[rows, words] int32``."""
    weights = torch.ones((), dtype=torch.int64) << torch.arange(MASK_WORD_BITS)
    words = (bits.view(bits.shape[0], -1, MASK_WORD_BITS) * weights).sum(-1)  # 0 … 2**32 - 1
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
