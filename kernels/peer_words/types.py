"""Mailboxes through which ranks (the GPUs of one machine) pass small messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.kernels._launch import ceil_div

BLOCK = 512
"""Number of words of a message that one program passes: one tile."""
TILES = 64
"""Largest number of tiles of a message."""


@dataclass(frozen=True, slots=True)
class Mail:
    """One rank's view of the mailboxes of all tensor-parallel ranks.

    Use the mailboxes from one CUDA stream at a time. Every rank must make the same calls in the same order.

    A letter is a 64-bit element with a word of a message and the number of the message. Letters are written
    atomically. A mailbox stores letters in tiles. A tile is written again only after its reader has sent a
    receipt for the previous message.

    Attributes:
        rank: Rank that this view belongs to.
        boxes: Mailbox of every rank, ``[ranks, TILES, BLOCK + 1] int64``: letters, indexed by sender,
            tile and word. The last column contains receipts, indexed by reader and tile.
        addresses: ``[ranks] int64``, start address of each mailbox.
        turns: ``[ranks, TILES] int32``, number of messages received from each rank. This rank's own entry is
            the number of messages that this rank has sent.
        lost: ``[1] int32``, 1 once a letter or receipt did not arrive in time. The tensor may be shared with
            other mail of this rank, and with this rank's `exchange_add.Boxes`.
        patience: Number of polls for a letter or receipt before its sender counts as lost. One poll takes
            about a microsecond.
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
        """Return a rank's view of the given mailboxes, and empty the rank's own mailbox.

        No rank may use its view before all ranks have created theirs.
        """
        own = boxes[rank].zero_()
        addresses = torch.tensor([box.data_ptr() for box in boxes], dtype=torch.int64, device=own.device)
        turns = torch.zeros(len(boxes), TILES, dtype=torch.int32, device=own.device)
        lost = torch.zeros(1, dtype=torch.int32, device=own.device) if lost is None else lost.zero_()
        return cls(rank, tuple(boxes), addresses, turns, lost, patience)


def box_shape(ranks: int) -> tuple[int, int, int]:
    """Return the shape of a rank's mailbox.

    Example:
        >>> from outrider.kernels.peer_words import box_shape
        >>> box_shape(ranks=2)  # senders, tiles, words of a tile and a receipt
        (2, 64, 513)
    """
    return ranks, TILES, BLOCK + 1


def can_pass(words: int) -> bool:
    """Return whether a message of this many words fits into a mailbox.

    Example:
        >>> from outrider.kernels.peer_words import can_pass
        >>> [can_pass(words) for words in (1, 64 * 512, 64 * 512 + 1)]
        [True, True, False]
    """
    return ceil_div(words, BLOCK) <= TILES
