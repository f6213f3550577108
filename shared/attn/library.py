"""Prepares cuDNN for the attention of prompts: checks the library, builds its plans, decides on its use.

cuDNN needs a compiled plan for each shape of its inputs. Building a plan takes long, occupies the host, and
must be repeated for each thread. Plans are therefore built while the engine has no request. Only shapes with
plans are used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.tree_attention import tree_attention
from outrider.shared.attn.base import AttentionBatch
from outrider.shared.attn.chunks import Attend, ChunkAttention
from outrider.shared.attn.tiles import SIZES, TileShape, shapes_of
from outrider.shared.obs.logging import get_logger

BUILD_S = 3.0
"""Maximum time for building plans at startup, in seconds. The most useful plans are built first."""
LARGEST_DIM = 128
"""Largest head dimension that is supported on Hopper by every cuDNN version in torch's packages."""
LARGEST_ERROR = 0.02
"""Largest accepted error relative to this project's kernel, in 16 bits. Rounding alone causes about 0.004."""
_CHECK_PAGE, _CHECK_SCALE = 16, 0.3
"""Page size and scale of the check.

The scale is well above dim ** -0.5, so that a few tokens have most of the weight, as in a real model.
"""

_log = get_logger("outrider.attention")


def cudnn_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of one tile with cuDNN (see `chunks.Attend`). Query heads may share K/V heads.

    torch's `scaled_dot_product_attention` does not return the log-sum-exp. This function therefore calls the
    operator that torch itself uses for cuDNN.
    """
    rows, heads, _ = q.shape
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(one.unsqueeze(0).transpose(1, 2) for one in (q, k, v)),  # [1, heads, rows, dim]
        None,  # no bias
        True,  # with the log-sum-exp
        0.0,  # no dropout
        causal,
        False,  # no mask for debugging
        scale=scale,
    )
    out: torch.Tensor = result[0]
    lse: torch.Tensor = result[1]  # [1, heads, rows] or [1, heads, rows, 1]
    return out[0].transpose(0, 1), lse.reshape(heads, rows).t()


class Library:
    """Prepares a library, such as cuDNN, for the attention of prompt chunks. Builds one plan at a time.

    A library may keep its compiled plans per thread. Use this object on the thread that runs the forward
    passes.

    Args:
        heads, kv_heads, head_dim: Shape of the queries, keys and values of one token in one layer.
        dtype: Dtype of queries, keys and values.
        device: Device of queries, keys and values.
        most_rows: Largest number of prompt tokens per pass.
        attend: Computes the attention of one tile. Defaults to cuDNN's attention if the device is a Hopper
            GPU.
        sizes: Possible numbers of rows or tokens of a tile; see `tiles.tiles_of`.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        most_rows: int,
        *,
        attend: Attend | None = None,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        self._heads = _Heads(heads, kv_heads, head_dim, dtype, device)
        self._most_rows = most_rows
        self._attend = attend
        self._sizes = sizes

    @torch.inference_mode()
    def prepare(self, use: Callable[[ChunkAttention | None], None]) -> Iterator[TileShape | None]:
        """Check the library, then build its plans. Each step of the returned iterator does one task.

        Args:
            use: Function that is called with a `ChunkAttention` after a successful check. Each plan adds a
                tile shape to this `ChunkAttention`. If the library fails later, `use` is called with None.

        Yields:
            None after the check, then the tile shape of each new plan. The most useful shapes come first. If
            the library cannot be used, the iterator yields nothing and the reason is logged.
        """
        heads, attend = self._heads, self._attend
        if attend is None:
            reason = _unsupported(heads.dim, heads.dtype, heads.device)
            if reason is not None:
                _log.info("prompts use this project's attention kernel", reason=reason)
                return
            attend = cudnn_attention
        wanted = shapes_of(self._most_rows, self._sizes)
        try:
            error = _error(attend, heads, self._sizes)
            if not error < LARGEST_ERROR:  # This is also true if the error is NaN.
                _log.error(
                    "prompts use this project's attention kernel: the library's results differ",
                    error=round(error, 4),
                )
                return
            chunks = ChunkAttention(attend, (), self._most_rows, heads.dtype, sizes=self._sizes)
            use(chunks)
            yield None
            for shape in wanted:
                _build(attend, shape, heads)
                chunks.allow(shape)
                yield shape
        except Exception:
            # The library may be missing or too old, or memory may be short. Serving works without it.
            _log.exception("prompts use this project's attention kernel: the library failed")
            use(None)
            return
        _log.info("long prompts use the attention of a library", plans=len(wanted), error=round(error, 4))


def prepare_within(
    library: Library,
    use: Callable[[ChunkAttention | None], None],
    limit_s: float = BUILD_S,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Prepare a library for the attention of prompts, but begin no further plan after `limit_s` seconds.

    Args:
        library: The library to prepare.
        use: See `Library.prepare`.
        limit_s: Number of seconds after which no further plan is begun. A plan that is being built then is
            finished.
        clock: Returns the time in seconds.
    """
    started = clock()
    for _ in library.prepare(use):
        if clock() - started > limit_s:
            return


@dataclass(frozen=True, slots=True)
class _Heads:
    """The shape of queries, keys and values, their dtype and their device."""

    q: int
    kv: int
    dim: int
    dtype: torch.dtype
    device: torch.device


def _unsupported(head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the reason why cuDNN's attention cannot be used, or None if it can be used."""
    if device.type != "cuda":
        return "there is no GPU"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "the library is faster on Hopper GPUs only, as far as measured"
    if dtype not in (torch.bfloat16, torch.float16):
        return "the library needs 16-bit numbers"
    if head_dim > LARGEST_DIM or head_dim % 8:
        return f"the library does not support heads of {head_dim} elements"
    return None


def _build(attend: Attend, shape: TileShape, heads: _Heads) -> None:
    """Call the library once with inputs of a shape, so that it builds the plan of this shape."""
    q, k, v = (
        torch.zeros(count, width, heads.dim, dtype=heads.dtype, device=heads.device)
        for count, width in ((shape.rows, heads.q), (shape.keys, heads.kv), (shape.keys, heads.kv))
    )
    attend(q, k, v, shape.causal, 1.0)


def _error(attend: Attend, heads: _Heads, sizes: Sequence[int]) -> float:
    """Return the largest error of the library for random chunks, relative to this project's kernel.

    The chunks follow prefixes of different lengths, so that the check uses all kinds of merges and compiles
    their kernels.
    """
    device, dtype, least = heads.device, heads.dtype, sizes[-1]
    longest = min(8 * least, sizes[0])
    tokens = longest + least
    pages = -(-tokens // _CHECK_PAGE)
    generator = torch.Generator().manual_seed(0)
    k_plane, v_plane = (
        torch.randn(pages, _CHECK_PAGE, heads.kv, heads.dim, generator=generator).to(device, dtype)
        for _ in range(2)
    )
    table = torch.randperm(pages, generator=generator).to(device, torch.int32)[None]
    q = torch.randn(least, heads.q, heads.dim, generator=generator).to(device, dtype)
    largest = 0.0
    # Use one merge, two merges, and the largest number. The second chunk is not aligned to tiles.
    for start in (least, 2 * least + least // 2, longest - least):
        batch = _check_batch(table, start, least, device)
        chunks = ChunkAttention(
            attend, shapes_of(least, sizes), least, dtype, sizes=sizes, least_gain_us=float("-inf")
        )
        found = chunks.attend(batch, q, k_plane, v_plane, _CHECK_SCALE, _no_others)
        assert found is not None
        expected = tree_attention(
            q,
            k_plane,
            v_plane,
            batch.page_table,
            batch.prefix_lens,
            batch.kv_lens,
            batch.query_start,
            None,
            scale=_CHECK_SCALE,
            max_query_len=batch.max_query_len,
            max_kv_len=batch.max_kv_len,
        )
        error = float((found.float() - expected.float()).norm() / expected.float().norm())
        if math.isnan(error):
            return error
        largest = max(largest, error)
    return largest


def _check_batch(table: torch.Tensor, start: int, count: int, device: torch.device) -> AttentionBatch:
    """Return a batch of one sequence with `count` rows, which begin at token index `start`."""
    prefix, kv, rows = (
        torch.tensor(numbers, dtype=torch.int32).to(device)
        for numbers in ([start], [start + count], [0, count])
    )
    return AttentionBatch(
        page_table=table,
        prefix_lens=prefix,
        kv_lens=kv,
        query_start=rows,
        ancestors=None,
        slots=torch.full((count,), -1, device=device),
        max_query_len=count,
        max_kv_len=start + count,
        host_lens=((start, count),),
    )


def _no_others(first: int, last: int, out: torch.Tensor) -> None:
    """Do nothing, because the only sequence of the check is accepted by the library."""
