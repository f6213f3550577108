"""Inboxes through which tensor-parallel ranks exchange partial products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.kernels._launch import ceil_div
from outrider.kernels.stream import FEW_ROWS

BLOCK = 512
"""Columns of a row that one program exchanges: one tile of an inbox."""
ABSENT = -0x7FFF8000
"""Reserved word for an inbox element that has not been written yet: 0x80008000.

In fp32, this word is a denormal number. As two 16-bit numbers, it is -0 twice. If a rank computes such a
number, it sends +0 instead."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """One rank's view of the inboxes of all tensor-parallel ranks.

    Use the inboxes from one CUDA stream at a time. Every rank must make the same calls in the same order.

    An inbox has two slots. Each tile (a block of columns of a row) uses them alternately. A rank writes to a
    slot again only after every other rank has emptied it. A rank empties a slot before it sends its next
    data. Once this data arrives, the slot is therefore empty.

    Attributes:
        rank: Rank that this view belongs to.
        inboxes: Inbox of every rank, ``[2, ranks, tiles, BLOCK] int32``, indexed by slot, sender, tile and
            column.
        addresses: ``[ranks] int64``, start address of each inbox.
        slots: ``[tiles] int32``, slot that each tile uses next.
        lost: ``[1] int32``, 1 after the data of a rank did not arrive in time. The tensor may be shared with
            this rank's `peer_words.Mail`.
        patience: Number of polls before a rank counts as lost. One poll takes about a microsecond.
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
        """Return a rank's view of the given inboxes, and empty the rank's own inbox.

        No rank may use its view before all ranks have created theirs.
        """
        own = inboxes[rank].fill_(ABSENT)
        addresses = torch.tensor(
            [inbox.data_ptr() for inbox in inboxes], dtype=torch.int64, device=own.device
        )
        slots = torch.zeros(own.shape[2], dtype=torch.int32, device=own.device)
        lost = torch.zeros(1, dtype=torch.int32, device=own.device) if lost is None else lost.zero_()
        return cls(rank, tuple(inboxes), addresses, slots, lost, patience)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.inboxes)

    @property
    def tiles(self) -> int:
        """Largest number of tiles that one call can exchange."""
        return self.slots.shape[0]


def inbox_shape(ranks: int, width: int) -> tuple[int, int, int, int]:
    """Return the shape of a rank's inbox for up to `FEW_ROWS` rows of a given width.

    Example:
        >>> from outrider.kernels.exchange_add import inbox_shape
        >>> inbox_shape(ranks=2, width=1024)  # slots, senders, tiles, columns of a tile
        (2, 2, 128, 512)
    """
    return 2, ranks, FEW_ROWS * ceil_div(width, BLOCK), BLOCK
