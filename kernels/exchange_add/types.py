"""The memory through which ranks exchange partial products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.kernels._launch import ceil_div
from outrider.kernels.stream import FEW_ROWS

BLOCK = 512
"""Columns of a row that one program exchanges: a tile of the inboxes."""
ABSENT = -0x7FFF8000
"""What a word holds that nobody has written, 0x80008000: no sum in fp32 (a denormal number), and twice -0 in 16 bits; a rank whose number
this is sends +0 in its place."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """The inboxes of all ranks, as one rank reaches them. Used by one stream at a time; every rank makes the same calls in the same order.

    An inbox has two slots, which every tile takes in turn: a rank that writes to a slot has heard from all others since they emptied it.

    Attributes:
        rank: Whose view this is.
        inboxes: Of every rank, ``[2, ranks, tiles, BLOCK] int32``: by slot, sender, and place in the rows.
        addresses: ``[ranks] int64``, where they begin.
        slots: ``[tiles] int32``, which slot each tile takes next.
        lost: ``[1] int32``, 1 once a rank was waited for in vain; may be shared with `peer_words.Mail` of this rank.
        patience: How often a word is looked for before its rank is taken for lost; a look takes about a microsecond.
    """

    rank: int
    inboxes: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    slots: torch.Tensor
    lost: torch.Tensor
    patience: int

    @classmethod
    def of(
        cls, rank: int, inboxes: Sequence[torch.Tensor], patience: int, lost: torch.Tensor | None = None
    ) -> Boxes:
        """Return rank's view of these inboxes, and empty its own; no rank may use its boxes before all are made."""
        own = inboxes[rank].fill_(ABSENT)
        addresses = torch.tensor(
            [inbox.data_ptr() for inbox in inboxes], dtype=torch.int64, device=own.device
        )
        slots = torch.zeros(own.shape[2], dtype=torch.int32, device=own.device)
        lost = torch.zeros(1, dtype=torch.int32, device=own.device) if lost is None else lost.zero_()
        return cls(rank, tuple(inboxes), addresses, slots, lost, patience)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.inboxes)

    @property
    def tiles(self) -> int:
        """How many tiles a call may have."""
        return self.slots.shape[0]


def inbox_shape(ranks: int, width: int) -> tuple[int, int, int, int]:
    """Return the shape of an inbox for up to `FEW_ROWS` rows."""
    return 2, ranks, FEW_ROWS * ceil_div(width, BLOCK), BLOCK
