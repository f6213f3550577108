"""round_trade: ops for a round's data from and for another process: blobs, round states and draft trees.

A blob is the data of one round in one direction. Kernels copy the blobs, because starting the GPU's copy
engines takes longer than transferring 50 kB.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous

__all__ = ["admit_counts", "fetch_blob", "pack_trees", "post_blob"]

WORD_BYTES = 4


def post_blob(blob: torch.Tensor, slot: int, number: int) -> None:
    """Copy a blob to a mailbox slot in shared memory. The first word of the slot becomes the round's number.

    Args:
        blob: ``[n] uint8``, contiguous, n a multiple of 4, at an address that is a multiple of 16.
        slot: Address of n bytes that the blob's device can write; a multiple of 16.
        number: Number of the round; must fit into an int32.

    Raises:
        ValueError: The tensor's dtype, layout or size is wrong, or an address is not aligned. The message
            names the argument.

    Example:
        >>> import torch
        >>> from outrider.kernels.round_trade import post_blob
        >>> blob = torch.tensor([0, 11, 12], dtype=torch.int32).view(torch.uint8)
        >>> slot = torch.zeros(12, dtype=torch.uint8)  # stands for shared memory
        >>> post_blob(blob, slot.data_ptr(), 7)
        >>> slot.view(torch.int32)
        tensor([ 7, 11, 12], dtype=torch.int32)
    """
    _expect_blob(blob, slot)
    if blob.is_cuda or use_triton(blob):
        from outrider.kernels.round_trade import triton as compiled

        compiled.post_blob(blob, slot, number)
        return
    from outrider.kernels.round_trade import reference

    reference.post_blob(blob, slot, number)


def fetch_blob(slot: int, blob: torch.Tensor, passed: int, number: int) -> None:
    """Copy a mailbox slot in shared memory to a blob, and publish the number of the round that was read.

    Args:
        slot: Address to read from; a multiple of 16.
        blob: ``[n] uint8``, contiguous, n a multiple of 4, at an address that is a multiple of 16;
            overwritten.
        passed: Address of a 4-byte word that is set to `number`.
        number: Number of the round; must fit into an int32.

    Raises:
        ValueError: The tensor's dtype, layout or size is wrong, or an address is not aligned. The message
            names the argument.

    Example:
        >>> import torch
        >>> from outrider.kernels.round_trade import fetch_blob
        >>> slot = torch.tensor([7, 11, 12], dtype=torch.int32)  # stands for shared memory
        >>> blob, passed = torch.empty(12, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
        >>> fetch_blob(slot.data_ptr(), blob, passed.data_ptr(), 7)
        >>> blob.view(torch.int32), passed
        (tensor([ 7, 11, 12], dtype=torch.int32), tensor([7], dtype=torch.int32))
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
        raise ValueError("the addresses of slot and blob must be multiples of 16")


def admit_counts(number: torch.Tensor, expected: torch.Tensor, counts: torch.Tensor) -> None:
    """Set the counts of all rows to 0 (idle), in place, unless ``number == expected``.

    The counts belong to a round state: the data that the target sends for a round. If the numbers differ, the
    state is from an earlier round, because the state of this round did not arrive in time.

    Args:
        number: ``[1] int32``, number of the round that the state was made for.
        expected: ``[1] int32``, number of this round.
        counts: ``[bs] int32``, contiguous: the counts of all rows, changed in place.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.round_trade import admit_counts
        >>> counts = torch.tensor([3, 1], dtype=torch.int32)
        >>> admit_counts(torch.tensor([8]).int(), torch.tensor([8]).int(), counts)
        >>> counts.tolist()
        [3, 1]
        >>> admit_counts(torch.tensor([7]).int(), torch.tensor([8]).int(), counts)  # round 7, not 8
        >>> counts.tolist()
        [0, 0]
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
    """Copy draft trees to the buffers that are sent to the other process.

    Args:
        num_nodes: ``[bs] int32``, contiguous: number of nodes of each tree.
        tokens: ``[bs, N] int32``, contiguous: token of each node.
        parents: ``[bs, N] int32``, contiguous: index of each node's parent, -1 for the root.
        out_nodes: Receives `num_nodes`; same shape, contiguous.
        out_tokens: Receives `tokens`; same shape, contiguous.
        out_parents: Receives `parents`; same shape, contiguous.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.round_trade import pack_trees
        >>> nodes, tokens, parents = (torch.tensor(x).int() for x in ([3], [[5, 6, 7]], [[-1, 0, 0]]))
        >>> packed = torch.zeros(7, dtype=torch.int32)  # one buffer that is sent as a whole
        >>> pack_trees(nodes, tokens, parents, packed[:1], packed[1:4].view(1, 3), packed[4:].view(1, 3))
        >>> packed
        tensor([ 3,  5,  6,  7, -1,  0,  0], dtype=torch.int32)
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
