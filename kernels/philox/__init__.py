"""philox: the counter-based Gumbel noise that target and draft share. A function of (seed, position, choice, token id) and of nothing else.

Philox4x32-10 with key = the seed's low and high 32 bits and counter = (position, id // 4, choice, 0); lane id % 4 gives the 32-bit word x;
u = ((x >> 9) + 0.5) * 2^-23 is exact in fp32 and in (0, 1); the noise is -ln(-ln u), in [-2.82, 16.64].
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.philox import reference

__all__ = ["gumbel_noise"]


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor, tokens: torch.Tensor | int
) -> torch.Tensor:
    """Return the noise of every row and token.

    Args:
        seeds: ``[rows] int64``, the bit pattern of the request's 64-bit seed.
        positions: ``[rows] int64``, absolute index of the token that is being chosen (the low 32 bits count).
        choices: ``[rows] int32``, which of the n choices of the request.
        tokens: The vocabulary size V (token ids 0..V-1), or the ids themselves, ``[K] int64`` (a draft vocabulary's target ids).

    Returns:
        ``[rows, V]`` or ``[rows, K]`` fp32.

    Raises:
        ValueError: A tensor's shape or dtype is wrong; the message names it.
    """
    rows = seeds.shape[0]
    expect("seeds", seeds, (rows,), torch.int64)
    expect("positions", positions, (rows,), torch.int64)
    expect("choices", choices, (rows,), torch.int32)
    if isinstance(tokens, torch.Tensor):
        expect("tokens", tokens, (None,), torch.int64)
    if use_triton(seeds):
        from outrider.kernels.philox import triton as compiled

        return compiled.gumbel_noise(seeds, positions, choices, tokens)
    return reference.gumbel_noise(seeds, positions, choices, tokens)
