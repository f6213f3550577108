"""Data types of skinny_gemm: methods, epilogues, and the tile that determines how a product is computed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class Method(Enum):
    """Way to compute a product."""

    DOT = "dot"
    """Tensor cores, with the rows padded to 16, 32 or 64."""
    WIDE = "wide"
    """Tensor cores, with `Tile.block_m` rows and more outputs per program. For more than 64 rows."""
    SUM = "sum"
    """Multiply and add, with whole rows of the weight per program. For 1 to 4 rows."""
    STAY = "stay"
    """Like SUM, for a single row. `Tile.programs` persistent programs each compute several tiles in turn."""
    LIBRARY = "library"
    """torch's product (cuBLAS)."""
    HALVES = "halves"
    """torch's product, run separately for each half of the outputs of a gated product. Used at sizes for
    which torch's library is faster with half the outputs."""


class Epilogue(Enum):
    """Operation that follows a product. Tiles are tabulated per epilogue."""

    PLAIN = 0
    ADD = 1
    GATED = 2
    ROTATED = 3


class Overlap(Enum):
    """How far a product may overlap with the kernels before and after it (programmatic dependent launch).

    A kernel that starts early still waits for the end of the previous kernel. Its programs take whatever room
    is free, which spreads them unevenly over the multiprocessors. Only a measurement shows which value is
    fastest.
    """

    LATE = 0
    """The next kernel may start when all programs of this kernel are about to store their last results."""
    EARLY = 1
    """Every program of this kernel must run and have waited for all older kernels before the next kernel
    starts."""
    FETCH = 2
    """Like EARLY. In addition, programs of this kernel prefetch their first columns of the weight before they
    wait, because this kernel may have started early."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotation (RoPE) of Q and K in a q-k-v product, and the place of K and V in the KV cache.

    Attributes:
        cos: ``[rows, 1, dim]`` from `rope_angles`.
        sin: ``[rows, 1, dim]`` from `rope_angles`.
        k_plane: ``[pages, page_size, kv_heads, dim]``, contiguous.
        v_plane: ``[pages, page_size, kv_heads, dim]``, contiguous.
        slots: ``[rows] int64``. Rows with slot -1 are not stored. Slots >= 0 must be distinct.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    k_plane: torch.Tensor
    v_plane: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """One way to compute a matrix product.

    Attributes:
        method: Algorithm of the product.
        block_n: Outputs per program: rows of the weight, or pairs of rows if gated or rotated.
        block_k: Columns per step (DOT, WIDE).
        splits: Number of programs that share the columns of an output; 1 for SUM and for gated or rotated
            products. The next kernel adds the sums of the programs in order. With DOT and a residual, the
            program that finishes last adds them instead.
        warps: Warps per program.
        stages: Pipeline stages of a program.
        block_m: Rows per program (WIDE).
        overlap: Overlap with the kernels before and after (not WIDE). SUM and STAY always prefetch the
            weight, so FETCH and EARLY are the same for these methods.
        programs: Programs of the launch (STAY).
    """

    method: Method
    block_n: int = 64
    block_k: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 4
    block_m: int = 128
    overlap: Overlap = Overlap.LATE
    programs: int = 0


LIBRARY = Tile(Method.LIBRARY)
