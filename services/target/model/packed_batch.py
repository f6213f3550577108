"""Buffers at fixed addresses for the inputs and results of rounds.

One set of buffers serves rounds of all sizes. A round of M packed rows uses the first M elements. The host
writes the entries of a round with one copy in stream order. A round in flight therefore does not see the
entries of the next round.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from outrider.kernels.packed_round import Entries, PackedTrees
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.engine.buckets import power_of_2
from outrider.shared.spec.tree import DraftShape, mask_words


class SamplingMode(Enum):
    """The sampling code that a round needs. A CUDA graph contains the code of a single mode.

    Attributes:
        GREEDY: All sequences are greedy.
        NOISE: Some sequences are sampled, but none is filtered.
        FILTERED: Some of the sampled sequences use top-k, top-p or min-p.
        FULL: Some sequences have rules for their logits (`kernels/logit_rules`) or want logprobs. This
            mode also filters.
    """

    GREEDY = "greedy"
    NOISE = "noise"
    FILTERED = "filtered"
    FULL = "full"

    @classmethod
    def of(cls, sequences: Seq[Sequence]) -> SamplingMode:
        """Return the cheapest mode that serves all sequences."""
        mode = cls.GREEDY
        for sequence in sequences:
            if sequence.ruled:
                return cls.FULL
            params = sequence.request.sampling
            if params.temperature > 0 and mode is not cls.FILTERED:
                filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
                mode = cls.FILTERED if filtered else cls.NOISE
        return mode


@dataclass(frozen=True, slots=True)
class Entry:
    """One sequence of a round.

    Attributes:
        sequence: The sequence, which has a slot.
        residence: The sequence's residence when the round was planned. If the residence has changed, the
            sequence has left its slot, and the result is void.
        shape: The shape of the tree to draft, within all limits. With `NO_DRAFT`, only the root is verified.
        epoch: The sequence's epoch when the round was planned. If the epoch has changed, the drafter's
            session was reopened and has not drafted in this round.
        most_columns: Largest number of tokens that a round may choose for the sequence. It may exceed the
            number of levels of the drafted tree, because a constrained output may force additional text.
    """

    sequence: Sequence
    residence: int
    shape: DraftShape
    epoch: int = 0
    most_columns: int = 1

    @property
    def rows(self) -> int:
        """Number of packed rows."""
        return self.shape.max_nodes if self.shape.drafts else 1

    @property
    def columns(self) -> int:
        """Largest number of tokens that the round can choose."""
        if not self.shape.drafts:
            return 1
        most = self.shape.depth + 1
        return min(most if self.sequence.form is None else max(most, self.most_columns), self.shape.max_nodes)

    @property
    def void(self) -> bool:
        """True if the sequence has left the slot since the round was planned."""
        return self.sequence.has_left(self.residence)


WIDTHS = (1, 8, 64)
"""Classes of the number of rows of a round's widest entry. Attention chooses its block sizes by the class.

The class of a wider entry is the next power of 2."""


def width_class(rows: int) -> int:
    """Return the class of a round whose widest entry has this number of rows."""
    return next((width for width in WIDTHS if rows <= width), power_of_2(rows))


class PackedBatch:
    """Device buffers for the entries, trees and results of all rounds of one engine.

    Args:
        rows: Largest number of packed rows of a round.
        slots: Number of slots.
        columns: R, the largest number of tokens that a round may choose for an entry.
        max_nodes: Largest number of nodes of a tree.
        device: Device of the buffers.
    """

    def __init__(self, rows: int, slots: int, columns: int, max_nodes: int, device: torch.device) -> None:
        self.rows = rows
        self.slots = slots
        self.columns = columns
        self._host = np.zeros((4, rows + 1), dtype=np.int32)
        with torch.inference_mode(False):
            self._entries = torch.zeros((4, rows + 1), dtype=torch.int32, device=device)
            words = mask_words(max_nodes)
            self._nodes = torch.zeros((4, rows), dtype=torch.int32, device=device)
            self._ancestors = torch.zeros((rows, words), dtype=torch.int32, device=device)
            self._num_nodes = torch.ones(rows, dtype=torch.int32, device=device)
        self._loaded = b""

    def entries(self, rows: int) -> Entries:
        """Return the entries of rounds of `rows` rows."""
        slots, starts, drafted, captures = self._entries
        return Entries(slots[:rows], starts[: rows + 1], drafted[:rows], captures[:rows])

    def trees(self, rows: int) -> PackedTrees:
        """Return the trees of rounds of `rows` rows."""
        tokens, parents, depths, logprobs = (part[:rows] for part in self._nodes)
        return PackedTrees(
            tokens,
            parents,
            depths,
            self._ancestors[:rows],
            logprobs.view(torch.float32),
            self._num_nodes[:rows],
        )

    @property
    def nodes(self) -> torch.Tensor:
        """``[4, rows] int32``: tokens, parents, depths and log-probabilities of the last round's trees."""
        return self._nodes

    def results(self, rows: int) -> int:
        """Return the number of leading entries of a round of `rows` rows that may be other than padding."""
        return min(rows, self.slots)

    def load(self, entries: Seq[Entry], rows: int) -> None:
        """Upload the entries of a round of `rows` rows, unless the last round had the same entries."""
        slots, starts, drafted, captures = self._host
        count = len(entries)
        slots[:count] = [entry.sequence.slot for entry in entries]
        slots[count:] = -1
        used = np.cumsum([0, *[entry.rows for entry in entries]])
        starts[: count + 1] = used
        # Each padding entry owns one padding row. Surplus padding entries own none.
        starts[count + 1 :] = np.minimum(used[-1] + np.arange(1, self.rows - count + 1), rows)
        drafted[:count] = [entry.shape.drafts for entry in entries]
        drafted[count:] = 0
        captures[:count] = [entry.sequence.has_features for entry in entries]
        captures[count:] = 0
        packed = self._host.tobytes()
        if packed == self._loaded:
            return
        self._loaded = packed
        source = torch.from_numpy(self._host.copy())
        self._entries.copy_(source.pin_memory() if self._entries.is_cuda else source, non_blocking=True)

    def make_idle(self, rows: int) -> None:
        """Load a round of `rows` rows without entries, in order to record a graph."""
        self.load((), rows)
