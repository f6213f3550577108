"""Attention over paged K/V: describes a step's batch, and contains backends that attend for each layer."""

from outrider.shared.attn.base import (
    AttentionBackend,
    AttentionBatch,
    build_batch,
    causal_ancestors,
    pack_rows,
)
from outrider.shared.attn.create import AttentionKind, create_backend

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionKind",
    "build_batch",
    "causal_ancestors",
    "create_backend",
    "pack_rows",
]
