"""Triton version of the Gumbel noise.

Verify and topk_expand use `gumbel`. `kernels.philox` documents the algorithm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels import _launch


@triton.jit
def gumbel(seed, position, choice, tokens):
    """Return the noise of a block of token ids (int32 or int64) for one row.

    `seed` and `position` are int64 scalars, `choice` is an int32 scalar.
    """
    zero = tokens.to(tl.uint32) * 0
    word_0 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    word_1 = (tokens // 4).to(tl.uint32)
    word_2 = zero + choice.to(tl.uint32)
    word_3 = zero
    key_0 = zero + (seed & 0xFFFFFFFF).to(tl.uint32)
    key_1 = zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    multiplier_0 = zero + 0xD2511F53
    multiplier_1 = zero + 0xCD9E8D57
    for _ in tl.static_range(10):  # the rounds of Philox4x32-10
        high_0, low_0 = tl.umulhi(multiplier_0, word_0), multiplier_0 * word_0
        high_1, low_1 = tl.umulhi(multiplier_1, word_2), multiplier_1 * word_2
        word_0 = high_1 ^ word_1 ^ key_0
        word_1 = low_1
        word_2 = high_0 ^ word_3 ^ key_1
        word_3 = low_0
        key_0 += 0x9E3779B9
        key_1 += 0xBB67AE85
    lane = (tokens % 4).to(tl.int32)
    word = tl.where(lane == 0, word_0, tl.where(lane == 1, word_1, tl.where(lane == 2, word_2, word_3)))
    uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2 ** -23
    return -tl.log(-tl.log(uniform))


@triton.jit
def _noise(seeds, positions, choices, tokens, out, size, HAS_TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    token = tl.load(tokens + column, mask=inside, other=0) if HAS_TOKENS else column
    noise = gumbel(tl.load(seeds + row), tl.load(positions + row), tl.load(choices + row), token)
    tl.store(out + row * size + column, noise, mask=inside)


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor, tokens: torch.Tensor | int
) -> torch.Tensor:
    listed = tokens.contiguous() if isinstance(tokens, torch.Tensor) else None
    size = tokens.shape[0] if isinstance(tokens, torch.Tensor) else tokens
    out = _launch.empty((seeds.shape[0], size), torch.float32, seeds.device)
    if out.numel():
        block = min(1024, _launch.next_power_of_2(size))
        with _launch.on_device_of(seeds):
            _noise[(seeds.shape[0], _launch.ceil_div(size, block))](
                seeds.contiguous(), positions.contiguous(), choices.contiguous(),
                seeds if listed is None else listed, out, size,
                HAS_TOKENS=listed is not None, BLOCK=block,
            )  # fmt: skip
    return out
