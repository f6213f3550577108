"""Triton version of token_masks: one program per row and block of tokens.

`kernels.token_masks` documents the op.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels import _launch

BLOCK = 4096


@triton.jit
def _mask(logits, allowed, out, vocab, words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    word = tl.load(allowed + row * words + token // 32, mask=inside, other=0)
    value = tl.load(logits + row * vocab + token, mask=inside, other=0.0).to(tl.float32)
    kept = ((word >> (token % 32)) & 1) != 0
    tl.store(out + row * vocab + token, tl.where(kept, value, float("-inf")), mask=inside)


def mask_tokens(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    rows, vocab = logits.shape
    out = _launch.empty((rows, vocab), torch.float32, logits.device)
    if rows:
        with _launch.on_device_of(logits):
            _mask[(rows, _launch.ceil_div(vocab, BLOCK))](
                logits, allowed, out, vocab, allowed.shape[1], BLOCK=BLOCK
            )
    return out
