"""peer_words: sends small messages of 32-bit words between GPUs of one machine, with one launch at each end.

The scheme is the LL ("low latency") protocol of NCCL, without NCCL's work on the host.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.peer_words import reference
from outrider.kernels.peer_words.types import BLOCK, TILES, Mail, box_shape, can_pass

__all__ = ["BLOCK", "TILES", "Mail", "box_shape", "can_pass", "receive_words", "send_words"]


def send_words(words: torch.Tensor, mail: Mail, readers: range, *, missing: int) -> None:
    """Send a message to each of the ranks `readers`, which must all call `receive_words`.

    Args:
        words: ``[n] int32``, contiguous; `can_pass` limits n.
        mail: This rank's view of the mailboxes.
        readers: Consecutive ranks, excluding this rank. They must be the same for every message that this
            rank sends through this mail.
        missing: Value sent in place of every word once `Mail.lost` is 1. The words of this rank may then be
            wrong, because they may depend on words that never arrived.

    Raises:
        ValueError: The words' shape, dtype or layout is wrong, or the message is too long.

    Example:
        Both ranks run in one process here. Normally, each rank runs in its own process.

        >>> import torch
        >>> from outrider.kernels.peer_words import Mail, box_shape, receive_words, send_words
        >>> boxes = [torch.empty(box_shape(2), dtype=torch.int64) for _ in range(2)]
        >>> mails = [Mail.of(rank, boxes, patience=100) for rank in range(2)]
        >>> send_words(torch.tensor([7, 8, 9], dtype=torch.int32), mails[0], range(1, 2), missing=-1)
        >>> out = torch.empty(1, 3, dtype=torch.int32)
        >>> receive_words(out, mails[1], range(1), missing=-1)
        >>> out
        tensor([[7, 8, 9]], dtype=torch.int32)
    """
    expect("words", words, (None,), torch.int32)
    expect_contiguous("words", words)
    if not can_pass(words.shape[0]):
        raise ValueError(f"a message of {words.shape[0]} words is too long; check with `can_pass`")
    if use_triton(words):
        from outrider.kernels.peer_words import triton as compiled

        compiled.send_words(words, mail, readers, missing)
        return
    reference.send_words(words, mail, readers, missing)


def receive_words(
    out: torch.Tensor, mail: Mail, senders: range, *, missing: int, own: torch.Tensor | None = None
) -> None:
    """Wait for a message from each of the ranks `senders`.

    If a message does not arrive in time, `Mail.lost` becomes 1. Later calls then do not wait, and replace all
    words of other ranks by `missing`.

    Args:
        out: ``[len(senders), n] int32``, contiguous; overwritten.
        mail: This rank's view of the mailboxes.
        senders: Consecutive ranks.
        missing: Value of all words of a message that did not arrive in time.
        own: ``[n] int32``, contiguous: this rank's own words, which are copied to the rank's row of `out`.
            Required if this rank is among the senders.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong, the message is too long, or `own` is missing.

    Example:
        Rank 0 never sends. Rank 1 therefore stops waiting after `patience` polls.

        >>> import torch
        >>> from outrider.kernels.peer_words import Mail, box_shape, receive_words
        >>> boxes = [torch.empty(box_shape(2), dtype=torch.int64) for _ in range(2)]
        >>> mail = Mail.of(1, boxes, patience=5)
        >>> out = torch.empty(2, 3, dtype=torch.int32)
        >>> receive_words(out, mail, range(2), missing=-1, own=torch.tensor([7, 8, 9], dtype=torch.int32))
        >>> out
        tensor([[-1, -1, -1],
                [ 7,  8,  9]], dtype=torch.int32)
        >>> mail.lost
        tensor([1], dtype=torch.int32)
    """
    if own is None and mail.rank in senders:
        raise ValueError(f"rank {mail.rank} is among the senders; pass its own words as `own`")
    if own is not None:
        expect("own", own, (out.shape[1],), torch.int32)
        expect_contiguous("own", own)
    expect("out", out, (len(senders), None), torch.int32)
    expect_contiguous("out", out)
    if not can_pass(out.shape[1]):
        raise ValueError(f"a message of {out.shape[1]} words is too long; check with `can_pass`")
    if use_triton(out):
        from outrider.kernels.peer_words import triton as compiled

        compiled.receive_words(out, mail, senders, missing, own)
        return
    reference.receive_words(out, mail, senders, missing, own)
