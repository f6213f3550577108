"""Reference of Philox4x32-10 and the Gumbel noise, on the host. `kernels.philox` documents the algorithm.

Integers are computed with numpy, because torch has no unsigned arithmetic. Logarithms are computed with
torch.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The test vectors published
with Random123 are checked in tests/law.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import torch

MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
ROUNDS = 10

Words = npt.NDArray[np.uint32]
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)


def philox_words(key: Words, counter: Words) -> Words:
    """Return the output of Philox4x32-10.

    Args:
        key: ``[2, rows] uint32``.
        counter: ``[4, rows, n] uint32``.

    Returns:
        ``[4, rows, n] uint32``.
    """
    # Words 0 and 2 form one array, which is multiplied. Words 1 and 3 form another array, which is xored in.
    # The halves of a product are views of the product, so a round is one product and two xors. Products
    # alternate between two buffers, because the low halves are still read one round later.
    multiplied, carried = counter[0::2].copy(), counter[1::2]
    steps = np.arange(ROUNDS, dtype=np.uint64)[:, None]
    # [rounds, 2, rows], modulo 2^32.
    keys = (key[None].astype(np.uint64) + (steps * WEYL)[:, :, None]).astype(np.uint32)
    buffers = [np.empty(multiplied.shape, dtype=np.uint64) for _ in range(2)]
    for i in range(ROUNDS):
        product = buffers[i % 2]
        np.multiply(multiplied, MULTIPLIERS[:, None, None], out=product)
        halves = product.view(np.uint32)[::-1]
        np.bitwise_xor(halves[..., _HIGH::2], carried, out=multiplied)
        multiplied ^= keys[i, :, :, None]
        carried = halves[..., _LOW::2]
    return np.stack((multiplied[0], carried[0], multiplied[1], carried[1]))


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor, tokens: torch.Tensor | int
) -> torch.Tensor:
    """Compute `outrider.kernels.philox.gumbel_noise`.

    Rows with the same (seed, position, choice), such as siblings in a tree, are computed once.
    """
    keys = list(zip(seeds.tolist(), positions.tolist(), choices.tolist(), strict=True))
    distinct = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    rows = np.array(list(distinct), dtype=np.int64).reshape(-1, 3)
    if isinstance(tokens, torch.Tensor):
        noise = _noise(rows, int(tokens.max()) + 1 if tokens.numel() else 0)[:, tokens.cpu()]
    else:
        noise = _noise(rows, tokens)
    if len(distinct) < len(keys):
        noise = noise[[distinct[key] for key in keys]]
    return noise.to(seeds.device)


def _noise(rows: npt.NDArray[np.int64], vocab: int) -> torch.Tensor:
    """Return noise ``[rows, vocab] fp32`` for ``[rows, 3]`` of (seed, position, choice)."""
    seeds = rows[:, 0].view(np.uint64)
    counter = np.zeros((4, len(rows), (vocab + 3) // 4), dtype=np.uint32)
    counter[0] = rows[:, 1, None].astype(np.uint32)
    counter[1] = np.arange(counter.shape[2], dtype=np.uint32)
    counter[2] = rows[:, 2, None].astype(np.uint32)
    words = philox_words(
        np.stack((seeds.astype(np.uint32), (seeds >> np.uint64(32)).astype(np.uint32))), counter
    )
    uniform = np.empty((len(rows), counter.shape[2], 4), dtype=np.float32)
    uniform[...] = np.moveaxis(words >> np.uint32(9), 0, 2)
    noise = torch.from_numpy(uniform).flatten(1)[:, :vocab]
    return noise.add_(0.5).mul_(2.0**-23).log_().neg_().log_().neg_()
