"""round_trade: the ends of rounds that two processes share: blobs to and from a mailbox, states that count, trees packed to go.

Blobs are copied by kernels: the engines that copy memory between GPUs take longer to start than 50 kB take to travel.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous

__all__ = ["admit_counts", "fetch_blob", "pack_trees", "post_blob"]

WORD_BYTES = 4


def post_blob(blob: torch.Tensor, slot: int, number: int) -> None:
    """Copy a blob to a mailbox's slot, where its first word is the number of its round.

    Args:
        blob: ``[n] uint8``, contiguous, n a multiple of 4.
        slot: Address, a multiple of 16, of n bytes that the blob's device reaches.
        number: Fits into an int32.

    Raises:
        ValueError: The tensor's dtype, layout or size is wrong, or the address is not aligned; the message names it.
    """
    _expect_blob(blob, slot)
    if blob.is_cuda or use_triton(blob):
        from outrider.kernels.round_trade import triton as compiled

        compiled.post_blob(blob, slot, number)
        return
    from outrider.kernels.round_trade import reference

    reference.post_blob(blob, slot, number)


def fetch_blob(slot: int, blob: torch.Tensor, passed: int, number: int) -> None:
    """Copy what lies in a mailbox's slot to a blob, and say that this side has come so far.

    Args:
        slot: Address, a multiple of 16.
        blob: ``[n] uint8``, contiguous, n a multiple of 4; overwritten.
        passed: Address of a word of 4 bytes that becomes `number`.
        number: Fits into an int32.

    Raises:
        ValueError: See `post_blob`.
    """
    _expect_blob(blob, slot)
    if blob.is_cuda or use_triton(blob):
        from outrider.kernels.round_trade import triton as compiled

        compiled.fetch_blob(slot, blob, passed, number)
        return
    from outrider.kernels.round_trade import reference

    reference.fetch_blob(slot, blob, passed, number)


def _expect_blob(blob: torch.Tensor, slot: int) -> None:
    expect("blob", blob, (None,), torch.uint8)
    expect_contiguous("blob", blob)
    if blob.nbytes % WORD_BYTES:
        raise ValueError(f"blob has {blob.nbytes} bytes, expected a multiple of {WORD_BYTES}")
    if slot % 16 or blob.data_ptr() % 16:
        raise ValueError("slot and blob must lie at multiples of 16 bytes")


def admit_counts(number: torch.Tensor, expected: torch.Tensor, counts: torch.Tensor) -> None:
    """Let every row go idle, in place, unless ``number == expected``: a state that did not come in time is one of an earlier round.

    Args:
        number: ``[1] int32``, of the round that the state says it is for.
        expected: ``[1] int32``, of this round.
        counts: ``[bs] int32``, contiguous; changed.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
    """
    expect("number", number, (1,), torch.int32)
    expect("expected", expected, (1,), torch.int32)
    expect("counts", counts, (None,), torch.int32)
    expect_contiguous("counts", counts)
    if use_triton(counts):
        from outrider.kernels.round_trade import triton as compiled

        compiled.admit_counts(number, expected, counts)
        return
    from outrider.kernels.round_trade import reference

    reference.admit_counts(number, expected, counts)


def pack_trees(
    num_nodes: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    out_nodes: torch.Tensor,
    out_tokens: torch.Tensor,
    out_parents: torch.Tensor,
) -> None:
    """Copy trees to where they go from.

    Args:
        num_nodes: ``[bs] int32``.
        tokens, parents: ``[bs, N] int32``, contiguous.
        out_nodes, out_tokens, out_parents: Of the same shapes, contiguous.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
    """
    bs, nodes = tokens.shape
    planes = {"tokens": tokens, "parents": parents, "out_tokens": out_tokens, "out_parents": out_parents}
    for name, tensor in planes.items():
        expect(name, tensor, (bs, nodes), torch.int32)
        expect_contiguous(name, tensor)
    for name, tensor in {"num_nodes": num_nodes, "out_nodes": out_nodes}.items():
        expect(name, tensor, (bs,), torch.int32)
        expect_contiguous(name, tensor)
    arguments = (num_nodes, tokens, parents, out_nodes, out_tokens, out_parents)
    if use_triton(tokens):
        from outrider.kernels.round_trade import triton as compiled

        compiled.pack_trees(*arguments)
        return
    from outrider.kernels.round_trade import reference

    reference.pack_trees(*arguments)
