"""peer_words: small messages of 32-bit words between the GPUs of one machine, one launch at either end.

Source of the scheme: the LL protocol of NCCL, without its host side.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.peer_words import reference
from outrider.kernels.peer_words.types import BLOCK, TILES, Mail, box_shape, can_pass

__all__ = ["BLOCK", "TILES", "Mail", "box_shape", "can_pass", "receive_words", "send_words"]


def send_words(words: torch.Tensor, mail: Mail, readers: range, *, missing: int) -> None:
    """Send a message to each of the ranks `readers`, which are not this one and call `receive_words`.

    Args:
        words: ``[n] int32``, n as `can_pass` allows.
        mail: Of this rank.
        readers: Ranks that follow one another; the same for every message that this rank sends by this mail.
        missing: What is sent instead once `Mail.lost` is 1: this rank may have computed with words that did not come.
    """
    expect("words", words, (None,), torch.int32)
    expect_contiguous("words", words)
    if not can_pass(words.shape[0]):
        raise ValueError(f"a message of {words.shape[0]} words does not fit")
    if use_triton(words):
        from outrider.kernels.peer_words import triton as compiled

        compiled.send_words(words, mail, readers, missing)
        return
    reference.send_words(words, mail, readers, missing)


def receive_words(
    out: torch.Tensor, mail: Mail, senders: range, *, missing: int, own: torch.Tensor | None = None
) -> None:
    """Wait for a message from each of the ranks `senders`.

    Args:
        out: ``[len(senders), n] int32``, written.
        mail: Of this rank.
        senders: Ranks that follow one another.
        missing: What words are that did not come in time. `Mail.lost` is 1 from then on: nobody waits again, and all words are that.
        own: ``[n] int32``, for the row of this rank itself, if it is among the senders.
    """
    if own is None and mail.rank in senders:
        raise ValueError(f"rank {mail.rank} is among the senders; pass its own words")
    if own is not None:
        expect("own", own, (out.shape[1],), torch.int32)
        expect_contiguous("own", own)
    expect("out", out, (len(senders), None), torch.int32)
    expect_contiguous("out", out)
    if not can_pass(out.shape[1]):
        raise ValueError(f"a message of {out.shape[1]} words does not fit")
    if use_triton(out):
        from outrider.kernels.peer_words import triton as compiled

        compiled.receive_words(out, mail, senders, missing, own)
        return
    reference.receive_words(out, mail, senders, missing, own)
