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
    STAY = "stay"
    """As SUM, of one row, by `Tile.programs` programs that take tile after tile."""
    LIBRARY = "library"
    """torch's (cuBLAS)."""
    HALVES = "halves"
    """torch's, the two outputs of a gated product one after the other: for sizes where the library is better at half the outputs."""


class Epilogue(Enum):
    """What becomes of a product; a table has tiles for each."""

    PLAIN = 0
    ADD = 1
    GATED = 2
    ROTATED = 3


class Overlap(Enum):
    """How a product shares the device with the kernel behind it, whose programs wait for its end, and with the one before it.

    What starts early takes registers and shared memory from nobody who has not started, but its programs settle where there is room then,
    unevenly: which is best is measured.
    """

    LATE = 0
    """The programs of the next kernel may start when those of this one are about to store their last results."""
    EARLY = 1
    """They may start when all programs of this one run, and know what older kernels wrote."""
    FETCH = 2
    """As EARLY; and programs of this one, which may be early themselves, ask for their first columns of the weight before they wait."""


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
        splits: Programs that share the columns (of single outputs; not SUM). Their sums are added in order: by the next kernel or, of DOT
            where they are added to a residual, by the program that ends last.
        warps, stages: Of a program.
        block_m: Rows that a program computes (WIDE).
        overlap: See `Overlap` (not WIDE; of SUM and STAY, which always fetch, FETCH is EARLY).
        programs: Of the launch (STAY).
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
