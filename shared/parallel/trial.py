"""Trials of the ranks' sums and messages before anybody relies on them: memory that GPUs share is the machine's, and so are its faults."""

from __future__ import annotations

import torch

from outrider.kernels.stream import FEW_ROWS
from outrider.shared.parallel.collectives import Collectives
from outrider.shared.parallel.reduce import Reduce

TRIALS = (1, FEW_ROWS, 1, 5, FEW_ROWS)
"""Rows of each sum."""
MESSAGES = (1, 700, 3, 5000, 1)
"""Words of each."""
_EPS = 1e-6
_CLOSE = 1.6e-2  # twice what a number of 8 bits is rounded by, of bf16's


def sums_agree(
    reduce: Reduce, collectives: Collectives, width: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether sums come out as the group's own all-reduce has them, and on every rank to the same bits. Every rank calls it.

    Args:
        reduce: On trial.
        collectives: Of all ranks; trusted.
        width, dtype: Of the rows.
        device: Of this rank.

    Returns:
        The same on all ranks.
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
    """Whether messages of words come as they were sent, down to every rank and up to rank 0. Every rank calls it.

    Args:
        messages: On trial.
        collectives: Of all ranks; trusted.
        device: Of this rank.

    Returns:
        The same on all ranks.
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
