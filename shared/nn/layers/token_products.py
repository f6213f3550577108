"""Precomputes the first layer's q-k-v product for every token of the vocabulary, if the device has room.

The first layer's input is the embedding of the token, so the layer's q-k-v product depends only on the token.
A forward pass over few tokens spends most of its time on reading weights. A product reads the whole weight,
but a lookup in a table ``[vocabulary, out]`` reads only one row per token.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from outrider.shared.nn.layers.modules import RMSNorm

MEMORY_SHARE = 0.02
"""Largest fraction of a device's memory for a table. In bf16, 128,256 × 6,144 numbers take 1.5 GiB."""
FREE_SHARE = 0.5
"""Largest fraction of the device's free memory for a table."""
CHUNK_ROWS = 8192


def table_fits(nbytes: int, free: int, total: int) -> bool:
    """Return True if a table of `nbytes` may be allocated on a device with `free` of `total` bytes free."""
    return nbytes <= min(FREE_SHARE * free, MEMORY_SHARE * total)


def token_products(embedding: torch.Tensor, norm: RMSNorm, weight: torch.Tensor) -> torch.Tensor | None:
    """Return the table ``norm(embedding) @ weight.T``, or None if the table would be too large.

    Args:
        embedding: ``[vocabulary, hidden]``. The table has the shape ``[vocabulary, out]``.
        norm: Norm of the embedding.
        weight: ``[out, hidden]``, the q-k-v weight of the first layer. The rows may be strided.
    """
    vocabulary, out = embedding.shape[0], weight.shape[0]
    if embedding.device.type == "cuda" and not table_fits(
        vocabulary * out * weight.element_size(), *torch.cuda.mem_get_info(embedding.device)
    ):
        return None
    table = torch.empty((vocabulary, out), dtype=weight.dtype, device=weight.device)
    for start in range(0, vocabulary, CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        table[rows] = functional.linear(norm(embedding[rows]), weight)
    return table
