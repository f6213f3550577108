"""Checks whether sums and messages through peer memory are correct, because a machine may be faulty."""

from __future__ import annotations

import torch

from outrider.kernels.stream import FEW_ROWS
from outrider.shared.parallel.collectives import Collectives
from outrider.shared.parallel.reduce import Reduce

TRIALS = (1, FEW_ROWS, 1, 5, FEW_ROWS)
"""Number of rows of each trial sum."""
MESSAGES = (1, 700, 3, 5000, 1)
"""Number of words of each trial message."""
_EPS = 1e-6
_CLOSE = 1.6e-2  # Twice the largest rounding error of bf16, which has 8 significant bits.


def sums_agree(
    reduce: Reduce, collectives: Collectives, width: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return True if new sums agree with the group's all-reduce and have the same bits on every rank.

    Every rank must call this function.

    Args:
        reduce: The sums on trial.
        collectives: Trusted collectives over all ranks.
        width, dtype: Width and dtype of the rows.
        device: This rank's device.

    Returns:
        The same value on all ranks.
    """
    numbers = torch.Generator(device).manual_seed(collectives.rank + 1)
    norm = torch.ones(width, dtype=dtype, device=device)
    wrong = torch.zeros(1, dtype=torch.int32, device=device)
    for rows in TRIALS:
        parts = torch.randn(rows, width, device=device, generator=numbers).to(dtype)
        stream = reduce.add(parts.clone(), torch.zeros_like(parts), norm, _EPS)
        want, got = collectives.all_reduce(parts.float()), stream.residual.float()
        wrong += ~torch.isclose(got, want, rtol=_CLOSE, atol=_CLOSE).all()
        everyone = collectives.gather(got.contiguous().view(torch.int32))
        if everyone is not None:
            wrong += (everyone != everyone[:1]).any()
    return not int(collectives.all_reduce(wrong))


def messages_arrive(messages: Collectives, collectives: Collectives, device: torch.device) -> bool:
    """Return True if messages arrive unchanged, from rank 0 to every rank and back. Call this on all ranks.

    Args:
        messages: The collectives on trial.
        collectives: Trusted collectives over all ranks.
        device: This rank's device.

    Returns:
        The same value on all ranks.
    """
    ranks = torch.arange(collectives.size, dtype=torch.int32, device=device)
    wrong = torch.zeros(1, dtype=torch.int32, device=device)
    for nth, words in enumerate(MESSAGES, 1):
        want = torch.arange(words, dtype=torch.int32, device=device) * 7919 - nth
        got = want.clone() if collectives.rank == 0 else torch.zeros_like(want)
        messages.broadcast(got)
        wrong += (got != want).any()
        everyone = messages.gather(want + collectives.rank)
        if everyone is not None:
            wrong += (everyone != want + ranks[:, None]).any()
    return not int(collectives.all_reduce(wrong))
