"""The data of skinny_gemm."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class Method(Enum):
    """How a product is computed."""

    DOT = "dot"
    """Tensor cores, the rows padded to 16, 32 or 64."""
    WIDE = "wide"
    """Tensor cores, `Tile.block_m` rows and more outputs a program: more than 64 rows."""
    SUM = "sum"
    """Multiply and add, a whole row of the weight at once: 1 to 4 rows."""
    LIBRARY = "library"
    """torch's (cuBLAS)."""


class Epilogue(Enum):
    """What becomes of a product; a table has tiles for each."""

    PLAIN = 0
    ADD = 1
    GATED = 2
    ROTATED = 3


@dataclass(frozen=True, slots=True)
class Rotary:
    """Where a q-k-v product goes: queries and keys rotated, keys and values into the paged planes.

    Attributes:
        cos, sin: ``[rows, 1, dim]`` of `rope_angles`.
        k_plane, v_plane: ``[pages, page_size, kv_heads, dim]``, contiguous.
        slots: ``[rows] int64``; -1: do not store this row. Slots >= 0 must be distinct.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    k_plane: torch.Tensor
    v_plane: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """One way to compute a product.

    Attributes:
        method: See `Method`.
        block_n: Outputs that a program computes: rows of the weight, or pairs of them if gated or rotated.
        block_k: Columns that it takes at a time (DOT, WIDE).
        splits: Programs that share the columns; their sums are added by the next kernel, in order (of single outputs; not SUM).
        warps, stages: Of a program.
        block_m: Rows that a program computes (WIDE).
    """

    method: Method
    block_n: int = 64
    block_k: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 4
    block_m: int = 128


LIBRARY = Tile(Method.LIBRARY)
