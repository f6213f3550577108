"""Torch reference of peer_words, over boxes in memory shared by processes.

`kernels.peer_words` documents the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from outrider.kernels.peer_words.types import BLOCK, Mail


def send_words(words: torch.Tensor, mail: Mail, readers: range, missing: int) -> None:
    words = torch.full_like(words, missing) if mail.lost.item() else words
    for tile, part in _tiles(words):
        turn = int(mail.turns[mail.rank, tile])
        for reader in readers:
            receipt = mail.boxes[mail.rank][reader, tile, BLOCK:]
            if _comes(mail, lambda receipt=receipt, turn=turn: bool(receipt == turn)):  # type: ignore[misc]
                mail.boxes[reader][mail.rank, tile, : part.shape[0]] = (part.long() & 0xFFFFFFFF) | (
                    (turn + 1) << 32
                )
        mail.turns[mail.rank, tile] = turn + 1


def receive_words(
    out: torch.Tensor, mail: Mail, senders: range, missing: int, own: torch.Tensor | None
) -> None:
    for row, sender in zip(out, senders, strict=True):
        if sender == mail.rank:
            assert own is not None
            row.copy_(own)
            continue
        for tile, part in _tiles(row):
            turn = int(mail.turns[sender, tile]) + 1
            letters = mail.boxes[mail.rank][sender, tile, : part.shape[0]]
            believed = not mail.lost.item()  # once a rank is lost, even words that arrive are not used
            there = _comes(mail, lambda letters=letters, turn=turn: bool((letters >> 32 == turn).all()))  # type: ignore[misc]
            part.copy_(letters.int() if there and believed else torch.full_like(part, missing))
            mail.boxes[sender][mail.rank, tile, BLOCK] = turn
            mail.turns[sender, tile] = turn


def _tiles(words: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    return (
        (tile, words[first : first + BLOCK]) for tile, first in enumerate(range(0, words.shape[0], BLOCK))
    )


def _comes(mail: Mail, look: Callable[[], bool]) -> bool:
    """Poll until `look` returns true. If polls run out first, mark a rank as lost and return False."""
    for _look in range(1 if mail.lost.item() else mail.patience):
        if look():
            return True
    mail.lost.fill_(1)
    return False
