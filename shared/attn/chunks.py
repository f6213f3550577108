"""Attention of prompt chunks over K/V in the KV pool, computed by the attention function of a library.

The attention of a chunk is divided into tiles (see `tiles`), and the library computes one tile at a time. A
row that belongs to several tiles has one result per tile. These results are merged exactly, by their
log-sum-exp. All work is enqueued without waiting for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from outrider.kernels.merge_attention import merge_attention
from outrider.shared.attn.base import AttentionBatch
from outrider.shared.attn.tiles import LEAST_GAIN_US, SIZES, AttentionTile, TileShape, gain_us, tiles_of

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]
"""A function that computes the attention of one tile.

The arguments are ``(q [rows, heads, dim], k [keys, kv_heads, dim], v [keys, kv_heads, dim], causal, scale)``.
The function returns ``(out [rows, heads, dim], lse [rows, heads] fp32)``.

Inputs are contiguous. Outputs may have any strides, but the last dimension of `out` is dense. `lse` is the
log-sum-exp of the scaled scores, with the natural logarithm.
"""

Others = Callable[[int, int, torch.Tensor], None]
"""A function that attends from the rows of sequences ``[first, last)``.

The third argument is the batch's result ``[rows, heads, dim]``, to which the function writes these rows.
"""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The rows of one sequence.

    Attributes:
        rows: The sequence's rows of the batch.
        start, stop: Token index of the first row, and one past the token index of the last row.
        tiles: The tiles of the rows. None if this project's kernel attends from the rows.
    """

    rows: slice
    start: int
    stop: int
    tiles: list[AttentionTile] | None


class ChunkAttention:
    """Computes the attention of prompt chunks with a library, for chunks where this is probably faster.

    The library may keep its compiled plans per thread. The object therefore accepts chunks only on the thread
    that created the object.

    Args:
        attend: Computes the attention of one tile.
        shapes: The tile shapes with which `attend` may be called. A chunk that needs another shape is not
            accepted.
        most_rows: Largest number of rows of a tile.
        dtype: Dtype of queries, keys and values.
        sizes: Possible numbers of rows or tokens of a tile; see `tiles.tiles_of`.
        least_gain_us: Smallest estimated gain, in microseconds per layer, for which a chunk is accepted.
    """

    def __init__(
        self,
        attend: Attend,
        shapes: Collection[TileShape],
        most_rows: int,
        dtype: torch.dtype,
        *,
        sizes: Sequence[int] = SIZES,
        least_gain_us: float = LEAST_GAIN_US,
    ) -> None:
        self._attend = attend
        self._shapes = set(shapes)
        self._most_rows = most_rows
        self._dtype = dtype
        self._sizes = sizes
        self._least_gain_us = least_gain_us
        self._thread = threading.get_ident()
        self._divided: tuple[object, int, list[_Chunk]] | None = None

    def attend(
        self,
        batch: AttentionBatch,
        q: torch.Tensor,
        k_plane: torch.Tensor,
        v_plane: torch.Tensor,
        scale: float,
        others: Others,
    ) -> torch.Tensor | None:
        """Compute the attention of all rows of a causal batch. Return None if no sequence is accepted.

        A sequence is accepted if the library is estimated to be faster for its rows.

        Args:
            batch: The planned batch. Its K/V is stored already.
            q: ``[rows, heads, dim]``.
            k_plane, v_plane: The layer's K and V in the KV pool, ``[pages, page_size, kv_heads, dim]``.
            scale: Factor on the scores.
            others: Function that computes the attention of all sequences that this object does not accept.

        Returns:
            ``[rows, heads, dim]`` in q's dtype. Only the last dimension is certain to be contiguous.
        """
        chunks = self._chunks(batch, q, k_plane)
        if all(chunk.tiles is None for chunk in chunks):
            return None
        if len(chunks) == 1 and len(chunks[0].tiles or ()) == 1:  # Without a merge, no copy is needed.
            return self._parts(chunks[0], batch.page_table[0], q, k_plane, v_plane, scale, None)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        first = 0  # First sequence whose rows have no results yet.
        for b, chunk in enumerate(chunks):
            if chunk.tiles is None:
                continue
            if first < b:
                others(first, b, out)
            first = b + 1
            self._parts(chunk, batch.page_table[b], q[chunk.rows], k_plane, v_plane, scale, out[chunk.rows])
        if first < len(chunks):
            others(first, len(chunks), out)
        return out

    @property
    def tile(self) -> Attend:
        """The library's function that computes the attention of one tile."""
        return self._attend

    def allow(self, shape: TileShape) -> None:
        """Add a shape that the library may be called with, because its plan has been built."""
        self._shapes.add(shape)

    def takes(self, lens: Sequence[tuple[int, int]], width: int) -> bool:
        """Return True if this object, on this thread, would accept at least one of these chunks.

        Args:
            lens: For each chunk, the token index of its first row and its number of rows.
            width: Number of heads times elements per head.
        """
        return threading.get_ident() == self._thread and any(
            self._tiles(start, start + count, width) is not None for start, count in lens
        )

    def _chunks(self, batch: AttentionBatch, q: torch.Tensor, k_plane: torch.Tensor) -> list[_Chunk]:
        """Return the chunks of a batch, one per sequence. Return no chunks if the batch is not supported."""
        lens = batch.host_lens
        if (
            lens is None
            or batch.ancestors is not None
            or not q.dtype == k_plane.dtype == self._dtype
            or threading.get_ident() != self._thread
        ):
            return []
        width = q.shape[1] * q.shape[2]
        # All layers of a pass have the same lengths, so divide the lengths only once.
        if self._divided is not None and self._divided[0] is lens and self._divided[1] == width:
            chunks = self._divided[2]
        else:
            chunks, row = [], 0
            for start, count in lens:
                tiles = self._tiles(start, start + count, width)
                chunks.append(_Chunk(slice(row, row + count), start, start + count, tiles))
                row += count
            self._divided = lens, width, chunks
        # A draft head may attend from only some of the planned rows. Such a call is not supported.
        return chunks if chunks and chunks[-1].rows.stop == q.shape[0] else []

    def _tiles(self, start: int, stop: int, width: int) -> list[AttentionTile] | None:
        if stop - start < self._sizes[-1]:
            return None
        tiles = tiles_of(start, stop, self._most_rows, self._sizes)
        if any(tile.shape not in self._shapes for tile in tiles):
            return None
        return tiles if gain_us(tiles, start, stop, width) >= self._least_gain_us else None

    def _parts(
        self,
        chunk: _Chunk,
        pages: torch.Tensor,
        q: torch.Tensor,
        k_plane: torch.Tensor,
        v_plane: torch.Tensor,
        scale: float,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from one sequence's rows and return ``[rows, heads, dim]``.

        Args:
            chunk: The rows and their tiles.
            pages: ``[max_pages] int32``, the sequence's pages.
            q: ``[rows, heads, dim]``.
            k_plane, v_plane: The planes of the layer.
            scale: Factor on the scores.
            out: Contiguous tensor to write the result to. May be None if there is a single tile.
        """
        assert chunk.tiles is not None
        start, stop = chunk.start, chunk.stop
        origin = min(tile.row for tile in chunk.tiles)
        last = max(tile.row + tile.shape.rows for tile in chunk.tiles)
        if origin < start or stop < last:
            # Pad the blocks at both ends with rows of zeros. The results of these rows are dropped.
            q = functional.pad(q, (0, 0, 0, 0, start - origin, last - stop))
        q = q.contiguous()
        left: dict[int, int] = {}
        for tile in chunk.tiles:
            left[tile.row] = left.get(tile.row, 0) + 1
        merged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        loaded, k, v = (-1, 0), q, q
        part = q
        for tile in chunk.tiles:
            rows, keys, causal = tile.shape
            if loaded != (tile.key, keys):
                loaded = tile.key, keys
                k, v = (_tokens(plane, pages, tile.key, keys, stop) for plane in (k_plane, v_plane))
            part, lse = self._attend(q[tile.row - origin : tile.row - origin + rows], k, v, causal, scale)
            begin, end = max(tile.row, start), min(tile.row + rows, stop)
            part, lse = (one[begin - tile.row : end - tile.row] for one in (part, lse))
            left[tile.row] -= 1
            target = None if out is None or left[tile.row] else out[begin - start : end - start]
            before = merged.pop(tile.row, None)
            if before is not None:
                # Intermediate results stay in fp32. From the second merge on, they are overwritten in place.
                kept = before if before[0].dtype is torch.float32 else (None, None)
                part, lse = merge_attention(
                    *before, part, lse, out=kept[0] if target is None else target, out_lse=kept[1]
                )
            elif target is not None:
                target.copy_(part)
            if left[tile.row]:
                merged[tile.row] = part, lse
        return part if out is None else out


def _tokens(plane: torch.Tensor, pages: torch.Tensor, first: int, count: int, stop: int) -> torch.Tensor:
    """Return a contiguous copy ``[count, kv_heads, dim]`` of a sequence's tokens ``[first, first + count)``.

    Tokens from `stop` on are replaced by zeros. Only padding rows, whose results are dropped, see these
    tokens. A leftover NaN would nevertheless spread to other rows.
    """
    size, end = plane.shape[1], min(first + count, stop)
    skipped = first // size
    whole = plane.index_select(0, pages[skipped : -(-end // size)]).flatten(0, 1)
    tokens = whole[first - skipped * size : end - skipped * size]
    return functional.pad(tokens, (0, 0, 0, 0, 0, first + count - end)) if end < first + count else tokens
