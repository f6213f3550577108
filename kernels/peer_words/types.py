"""The memory through which ranks pass small messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.kernels._launch import ceil_div

BLOCK = 512
"""Words of a message that one program passes: a tile."""
TILES = 64
"""What a message has at most."""


@dataclass(frozen=True, slots=True)
class Mail:
    """The mailboxes of all ranks, as one rank reaches them.

    Used by one stream at a time; every rank makes the same calls in the same order. A letter is a word of a message beside the number of
    the message, in 64 bits that are written at once. A tile is written again when its reader has sent the receipt of the message before.

    Attributes:
        rank: Whose view this is.
        boxes: Of every rank, ``[ranks, TILES, BLOCK + 1] int64``: letters by sender and place; last, receipts by reader and tile.
        addresses: ``[ranks] int64``, where they begin.
        turns: ``[ranks, TILES] int32``, how many messages of each sender have passed here.
        lost: ``[1] int32``, 1 once a rank was waited for in vain; may be shared with other mail and `exchange_add.Boxes` of this rank.
        patience: How often a letter or receipt is looked for before its rank is taken for lost; a look takes about a microsecond.
    """

    rank: int
    boxes: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    turns: torch.Tensor
    lost: torch.Tensor
    patience: int

    @classmethod
    def of(
        cls, rank: int, boxes: Sequence[torch.Tensor], patience: int, lost: torch.Tensor | None = None
    ) -> Mail:
        """Return rank's view of these boxes, and empty its own; no rank may use its mail before all are made."""
        own = boxes[rank].zero_()
        addresses = torch.tensor([box.data_ptr() for box in boxes], dtype=torch.int64, device=own.device)
        turns = torch.zeros(len(boxes), TILES, dtype=torch.int32, device=own.device)
        lost = torch.zeros(1, dtype=torch.int32, device=own.device) if lost is None else lost.zero_()
        return cls(rank, tuple(boxes), addresses, turns, lost, patience)


def box_shape(ranks: int) -> tuple[int, int, int]:
    """Return the shape of a rank's box."""
    return ranks, TILES, BLOCK + 1


def can_pass(words: int) -> bool:
    """Whether a message of so many words fits."""
    return ceil_div(words, BLOCK) <= TILES
