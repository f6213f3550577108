"""Products of all embeddings with a matrix, computed once, so that no pass has to.

What a first layer's q-k-v product makes of a token's embedding depends on the token alone. Where passes of few rows are bound by reading
weights, looking it up in a table ``[vocabulary, out]`` reads a row where the product reads a matrix.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from outrider.shared.nn.layers.blocks import RMSNorm

MEMORY_SHARE = 0.02
"""The most of a device's memory that a table may take (1.5 GiB for 128,256 tokens and 6,144 outputs in bf16) …"""
FREE_SHARE = 0.5
"""… and of what is free of it."""
CHUNK_ROWS = 8192


def fits(nbytes: int, free: int, total: int) -> bool:
    """Return whether a table may take so many bytes of a device."""
    return nbytes <= min(FREE_SHARE * free, MEMORY_SHARE * total)


def token_products(embedding: torch.Tensor, norm: RMSNorm, weight: torch.Tensor) -> torch.Tensor | None:
    """Return ``norm(embedding) @ weight.T``, ``[vocabulary, out]``, or None where it would take too much memory.

    Args:
        embedding: ``[vocabulary, hidden]``.
        norm: Of the embedding.
        weight: ``[out, hidden]``; its rows may be strided.
    """
    vocabulary, out = embedding.shape[0], weight.shape[0]
    if embedding.device.type == "cuda" and not fits(
        vocabulary * out * weight.element_size(), *torch.cuda.mem_get_info(embedding.device)
    ):
        return None
    table = torch.empty((vocabulary, out), dtype=weight.dtype, device=weight.device)
    for start in range(0, vocabulary, CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        table[rows] = functional.linear(norm(embedding[rows]), weight)
    return table
