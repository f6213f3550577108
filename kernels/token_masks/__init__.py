"""token_masks: forbids the tokens whose bit is not set in a row's mask, before a token is chosen.

A grammar allows different tokens after each node of a tree. For each node, the host determines the allowed
tokens, and uploads one bit per token of the vocabulary.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.token_masks import reference

__all__ = ["mask_tokens"]


def mask_tokens(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return the logits in fp32, with -inf for every token that is not allowed.

    Args:
        logits: ``[M, V]`` fp32/bf16/fp16; not changed.
        allowed: ``[M, W] int32`` with ``W = ceil(V / 32)``. Bit j of word w allows token ``32 w + j``.

    Returns:
        ``[M, V] fp32``.

    Raises:
        ValueError: A tensor's shape or dtype is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.token_masks import mask_tokens
        >>> mask_tokens(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0b101]], dtype=torch.int32))
        tensor([[1., -inf, 3.]])
    """
    rows, vocab = logits.shape
    expect("allowed", allowed, (rows, -(-vocab // 32)), torch.int32)
    expect_contiguous("allowed", allowed)
    expect_contiguous("logits", logits)
    if use_triton(logits):
        from outrider.kernels.token_masks import triton as compiled

        return compiled.mask_tokens(logits, allowed)
    return reference.mask_tokens(logits, allowed)
