"""philox: counter-based Gumbel noise shared by target and draft.

The noise is a function of (seed, position, choice, token id) and nothing else:

- Philox4x32-10 (Salmon et al., SC 2011) runs with key = (low 32 bits, high 32 bits) of the seed and
  counter = (position, id // 4, choice, 0). Its output has four 32-bit words. Word number `id % 4` is x.
- u = ((x >> 9) + 0.5) * 2^-23 is exact in fp32 and lies in (0, 1).
- The noise is -ln(-ln u), in [-2.82, 16.64].
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
    """Return the Gumbel noise of every row and token.

    Args:
        seeds: ``[rows] int64``, bit pattern of the request's 64-bit seed.
        positions: ``[rows] int64``, absolute index of the token being chosen; only the low 32 bits are used.
        choices: ``[rows] int32``, index among the n choices of the request.
        tokens: Vocabulary size V (token ids 0..V-1), or the ids themselves, ``[K] int64``, such as the target
            ids of a draft vocabulary.

    Returns:
        ``[rows, V]`` or ``[rows, K]`` fp32.

    Raises:
        ValueError: A tensor's shape or dtype is wrong. The message names the tensor.

    Example:
        Target and draft draw the same noise for the same seed and position, in any batch.

        >>> import torch
        >>> from outrider.kernels.philox import gumbel_noise
        >>> seeds, choices = torch.tensor([1234, 1234]), torch.zeros(2, dtype=torch.int32)
        >>> noise = gumbel_noise(seeds, torch.tensor([5, 6]), choices, 4)
        >>> noise
        tensor([[ 1.4434, -0.4751,  1.0115,  0.6266],
                [ 4.4574,  0.8946,  1.4907,  0.9840]])
        >>> some = gumbel_noise(seeds[:1], torch.tensor([6]), choices[:1], torch.tensor([3, 0]))
        >>> torch.equal(some[0], noise[1, [3, 0]])
        True
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
