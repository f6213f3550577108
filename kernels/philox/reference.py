"""Philox4x32-10 and the Gumbel noise in plain torch; the contract is in the package's docstring.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); vectors published with Random123 are in tests/law.
"""

from __future__ import annotations

import torch

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF


def philox_words(key: tuple[torch.Tensor, torch.Tensor], counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the four output words of Philox4x32-10.

    Args:
        key: Two int64 tensors holding 32-bit words.
        counter: Four int64 tensors holding 32-bit words; everything broadcasts.

    Returns:
        Four int64 tensors holding 32-bit words.
    """
    key_0, key_1 = key
    shape = torch.broadcast_shapes(key_0.shape, key_1.shape, *(word.shape for word in counter))
    device = counter[0].device
    # Words 0 and 2 are multiplied, words 1 and 3 are xored in; both pairs are handled as one tensor. int64 products wrap as u64 do, so
    # that the low half is right; the high half is cleaned by the mask, and what the carried pair has above 32 bits goes with it.
    factors = torch.tensor([MULTIPLIER_0, MULTIPLIER_1], device=device).view(2, *(1 for _ in shape))
    mixed = torch.stack((counter[0].expand(shape), counter[2].expand(shape)))
    carried = torch.stack((counter[3].expand(shape), counter[1].expand(shape)))
    product = torch.empty_like(mixed)
    for i in range(ROUNDS):
        torch.mul(mixed, factors, out=product)
        torch.bitwise_right_shift(product[1], 32, out=mixed[0])
        torch.bitwise_right_shift(product[0], 32, out=mixed[1])
        mixed[0] ^= carried[1] ^ ((key_0 + i * WEYL_0) & WORD)
        mixed[1] ^= carried[0] ^ ((key_1 + i * WEYL_1) & WORD)
        mixed &= WORD
        carried, product = product, carried
    return mixed[0], carried[1] & WORD, mixed[1], carried[0] & WORD


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor, tokens: torch.Tensor | int) -> torch.Tensor:
    """See `outrider.kernels.philox.gumbel_noise`. Rows that share (seed, position, choice), as siblings of a tree do, are computed once."""
    keys = list(zip(seeds.tolist(), positions.tolist(), choices.tolist(), strict=True))
    distinct = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    if len(distinct) == len(keys):
        return _noise(seeds, positions, choices, tokens)
    seeds, positions, choices = (torch.tensor(column, device=seeds.device) for column in zip(*distinct, strict=True))
    return _noise(seeds, positions, choices, tokens)[torch.tensor([distinct[key] for key in keys], device=seeds.device)]


def _noise(seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor, tokens: torch.Tensor | int) -> torch.Tensor:
    if isinstance(tokens, torch.Tensor):
        size = int(tokens.max()) + 1 if tokens.numel() else 0
        return _noise(seeds, positions, choices, size)[:, tokens]
    groups = torch.arange((tokens + 3) // 4, device=seeds.device)
    key = ((seeds & WORD)[:, None], ((seeds >> 32) & WORD)[:, None])
    counter = ((positions & WORD)[:, None], groups[None], choices.long()[:, None] & WORD, torch.zeros_like(positions)[:, None])
    words = torch.stack(philox_words(key, counter), dim=-1).flatten(1)[:, :tokens]  # [rows, V]
    uniform = ((words >> 9).float() + 0.5) * 2.0**-23
    return uniform.log_().neg_().log_().neg_()
