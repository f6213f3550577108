"""Torch reference of exchange_add, over inboxes in memory shared by processes.

`kernels.exchange_add` documents the op.
"""

from __future__ import annotations

import torch

from outrider.kernels.add_norm import reference as add_norm
from outrider.kernels.exchange_add.types import ABSENT, BLOCK, Boxes
from outrider.kernels.stream import ResidualStream


def exchange_add(
    parts: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, boxes: Boxes,
    bias: torch.Tensor | None,
    out: torch.Tensor | None
) -> ResidualStream:  # fmt: skip
    rows, width = residual.shape
    own = parts.sum(0) if parts.dim() == 3 else parts
    send(own, boxes)
    total = torch.zeros(rows, width)
    for received in _receive(boxes, own):
        total += received.float()
    return add_norm.add_sums(total, residual, norm_weight, eps, bias, out)


def send(own: torch.Tensor, boxes: Boxes) -> None:
    """Write this rank's rows, ``[rows, width]``, into the current slot of every inbox."""
    word, absent = _word(own.dtype)
    words = own.contiguous().view(word)
    words = words.masked_fill(words == absent, 0)  # the word for "no number yet" cannot be sent
    for inbox in boxes.inboxes:
        for (row, columns), place in _places(inbox, boxes, own):
            place[boxes.rank] = words[row, columns]


def _receive(boxes: Boxes, own: torch.Tensor) -> list[torch.Tensor]:
    """Wait for the rows of every rank, empty this rank's inbox, and return one tensor per rank.

    Each tensor has the shape of `own`. If the rows of one rank do not arrive, all tensors are NaN.
    """
    _, absent = _word(own.dtype)
    places = _places(boxes.inboxes[boxes.rank], boxes, own)
    boxes.slots[: len(places)] = 1 - boxes.slots[: len(places)]
    looks = 1 if boxes.lost.item() else boxes.patience
    while looks and any(bool((place == absent).any()) for _, place in places):
        looks -= 1
    received = own.new_full((boxes.ranks, *own.shape), float("nan"))
    if looks == 0:
        boxes.lost.fill_(1)
        return list(received)
    for (row, columns), place in places:
        received[:, row, columns] = place.view(own.dtype)
        place.fill_(absent)
    return list(received)


def _places(
    inbox: torch.Tensor, boxes: Boxes, own: torch.Tensor
) -> list[tuple[tuple[int, slice], torch.Tensor]]:
    """Return each tile's row and columns, and the view ``[ranks, columns]`` of the tile in an inbox."""
    rows, width = own.shape
    word, _ = _word(own.dtype)
    tiles = [
        (row, slice(first, min(first + BLOCK, width)))
        for row in range(rows)
        for first in range(0, width, BLOCK)
    ]
    slots = boxes.slots[: len(tiles)].tolist()
    return [
        ((row, columns), inbox[slot, :, tile].view(word)[:, : columns.stop - columns.start])
        for tile, ((row, columns), slot) in enumerate(zip(tiles, slots, strict=True))
    ]


def _word(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """Return the integer type in which a number is sent, and the word that marks a missing number."""
    return (torch.int32, ABSENT) if dtype.itemsize == 4 else (torch.int16, -0x8000)
