"""The paged KV pool: K and V (or a latent) of every layer, and a feature row per token for the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch

from outrider.kernels.feature_rows import scatter_rows
from outrider.kernels.kv_compact import kv_compact
from outrider.kernels.kv_store import kv_store
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.kv.pages import PageAllocator, PageLease
from outrider.shared.kv.upload import upload

FEW_TOKENS = 16
"""Number of tokens up to which plain Python computes slots faster than NumPy."""

CacheSizing = Callable[[int], int]
"""A function that returns the number of tokens to cache, given the number of bytes that one token takes."""


class KVPool:
    """Paged K/V storage of one model, and the allocator of its pages.

    A *plane* is a tensor with the K or the V of one layer, for all pages. A *slot* is the place of one token
    in every plane. Slots are numbered ``page * page_size + offset``. The token at index i of a sequence has
    the slot ``pages[i // page_size] * page_size + i % page_size``.

    Planes start as zeros and are written in place. The address of a plane never changes, so CUDA graphs may
    contain the address. The exception is the plane of feature rows, which `resize_features` replaces.

    Args:
        num_pages: Number of pages of the pool.
        page_size: Number of tokens per page, ≥ 1.
        layers: Number of layers that cache K/V.
        kv_heads, head_dim: Shape of one token's K (and V) in one layer.
        dtype: Element type of feature rows. If `kv_dtype` is None, also the element type of K and V.
        device: Device of the planes.
        feature_size: Width of a feature row. 0 means that there is no feature plane.
        latent: True for multi-head latent attention, in which a layer has one plane of latents instead of two
            planes. `k_planes` then contains the latents, `v_planes` is empty, and values are read from the
            keys.
        kv_dtype: Element type of K and V. With None, it is `dtype`. FP8 halves the memory of K and V. The
            kernels `tree_attention` and `path_attention` can read FP8.

    Raises:
        ConfigurationError: The device has too little memory.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        feature_size: int = 0,
        *,
        latent: bool = False,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size
        self.num_layers = layers
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.device = torch.device(device)
        self.latent = latent
        self.allocator = PageAllocator(num_pages)
        self.allocator.prefers_runs = self.device.type == "cpu"
        # [layers, 2, num_pages, page_size, kv_heads, head_dim]. With a latent, each layer has one plane.
        self._storage = self._allocate(
            self.kv_dtype, layers, 1 if latent else 2, num_pages, page_size, kv_heads, head_dim
        )
        self.k_planes: list[torch.Tensor] = [
            layer[0] for layer in self._storage
        ]  # each [num_pages, page_size, kv_heads, head_dim]
        self.v_planes: list[torch.Tensor] = [] if latent else [layer[1] for layer in self._storage]
        self.features: torch.Tensor | None = None  # [num_pages, page_size, feature_size]
        self.resize_features(feature_size)

    @property
    def num_pages(self) -> int:
        """Total number of pages of the pool."""
        return self.allocator.num_pages

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens that fit if every page is full."""
        return self.num_pages * self.page_size

    @property
    def feature_size(self) -> int:
        """Width of a feature row, or 0 if there is no feature plane."""
        return 0 if self.features is None else self.features.shape[-1]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all planes together."""
        return token_bytes(
            self.num_layers,
            self.kv_heads,
            self.head_dim,
            self.dtype,
            self.feature_size,
            latent=self.latent,
            kv_dtype=self.kv_dtype,
        )

    def resize_features(self, feature_size: int) -> None:
        """Replace the plane of feature rows by a plane of this width. All stored feature rows are lost.

        With a width of 0, the pool has no feature plane afterwards.
        """
        self.features = None  # Free its memory before allocating the next plane.
        if feature_size:
            self.features = self._allocate(self.dtype, self.num_pages, self.page_size, feature_size)

    def _allocate(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Return zeros that can be written outside inference mode, even if this call is in inference mode."""
        try:
            with torch.inference_mode(False):
                return torch.zeros(shape, dtype=dtype, device=self.device)
        except RuntimeError as error:  # torch.OutOfMemoryError is a subclass.
            size = prod(shape) * dtype.itemsize / 2**30
            raise ConfigurationError(
                f"the KV pool of {self.capacity_tokens} tokens needs {size:.1f} GiB, more than is free on "
                f"{self.device}; lower kv_tokens.",
                field="kv_tokens",
            ) from error

    def planes(self) -> list[torch.Tensor]:
        """Return every plane in a form for `kv_compact`: K and V of all layers, then the feature plane."""
        planes = [plane for layer in self._storage.unbind(0) for plane in layer.unbind(0)]
        return planes if self.features is None else [*planes, self.features]

    def compact(
        self,
        page_table: torch.Tensor,
        cached_lens: torch.Tensor,
        path: torch.Tensor,
        num_accepted: torch.Tensor,
        table_rows: torch.Tensor | None = None,
    ) -> None:
        """In every layer, move K and V of the accepted tree nodes to the KV slots of the committed tokens.

        The kernel is `kv_compact`. Feature rows are not moved.
        """
        planes = [*self.k_planes, *self.v_planes]
        kv_compact(planes, page_table, cached_lens, path, num_accepted, table_rows)

    def scrub(self, pages: torch.Tensor) -> None:
        """Zero ``pages [n] int64`` in every plane, so that the next owner cannot read a leftover NaN."""
        for plane in self.planes():
            plane[pages] = 0

    def slot_views(self, first_slot: int, count: int) -> tuple[torch.Tensor, ...]:
        """Return views ``[1, kv_heads, count, head_dim]`` of consecutive KV slots, for all layers.

        The views share the pool's memory. The order of the views is K of layer 0, V of layer 0, K of layer 1,
        and so on. In a pool of latents, there is one view per layer. To save time, call this method once per
        forward pass instead of once per layer.
        """
        token = self.kv_heads * self.head_dim
        plane = self.num_pages * self.page_size * token
        size = (self._storage.shape[1] * self.num_layers, 1, self.kv_heads, count, self.head_dim)
        return self._storage.as_strided(size, (plane, 0, self.head_dim, token, 1), first_slot * token).unbind(
            0
        )

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def lease(self, num_tokens: int) -> PageLease | None:
        """Lease pages for `num_tokens` tokens, or return None if too few pages are available."""
        return self.allocator.allocate(self.pages_for(num_tokens))

    def reserve(self, lease: PageLease, num_tokens: int) -> bool:
        """Extend a lease so that at least `num_tokens` tokens fit.

        Return False and change nothing if too few pages are available.
        """
        return lease.extend(max(0, self.pages_for(num_tokens) - len(lease.pages)))

    def page_table(self, leases: Sequence[PageLease]) -> torch.Tensor:
        """Return the page table of these leases, ``[bs, max_pages] int32``, on the pool's device.

        Rows are padded with page 0. The padding is never read, because it lies after the end of the sequence.
        """
        width = max((len(lease.pages) for lease in leases), default=0)
        rows = [lease.pages + [0] * (width - len(lease.pages)) for lease in leases]
        return upload(rows, torch.int32, self.device).view(len(leases), width)

    def slots(self, page_table: torch.Tensor, start: torch.Tensor, n: int) -> torch.Tensor:
        """Return the KV slots of the token indices ``[start[b], start[b] + n)`` of each sequence b.

        The shape is ``[bs, n]``, and the dtype is int64.

        Args:
            page_table: ``[bs, max_pages] int32``.
            start: ``[bs]``, any integer type.
            n: Number of tokens per sequence.
        """
        index = start.to(torch.int64)[:, None] + torch.arange(n, device=page_table.device)  # [bs, n]
        pages = page_table.to(torch.int64).gather(1, index // self.page_size)
        return pages * self.page_size + index % self.page_size

    def token_slots(self, lease: PageLease, start: int, stop: int) -> list[int]:
        """Return the slots of token indices ``[start, stop)`` of one lease, on the host."""
        size, pages = self.page_size, lease.pages
        if stop - start <= FEW_TOKENS:
            return [pages[index // size] * size + index % size for index in range(start, stop)]
        slots: list[int] = self.slot_array(lease, start, stop).tolist()
        return slots

    def slot_array(self, lease: PageLease, start: int, stop: int) -> np.ndarray:
        """Return the slots of `token_slots` as ``[stop - start] int64``. This is faster for many tokens."""
        index = np.arange(start, stop)
        return (
            np.asarray(lease.pages, dtype=np.int64)[index // self.page_size] * self.page_size
            + index % self.page_size
        )

    def store_features(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write feature rows ``[n, feature_size]`` to slots ``[n] int64`` of the feature plane."""
        assert self.features is not None, "the pool has no feature plane; call resize_features first"
        self.features.view(-1, self.feature_size).index_copy_(0, slots, rows.to(self.dtype))

    def store_some_features(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write feature rows like `store_features`, but skip rows with slot -1. Never waits for a GPU."""
        assert self.features is not None, "the pool has no feature plane; call resize_features first"
        plane = self.features[:, :, None]  # one head per token
        rows = rows[:, None]
        kv_store(rows, rows, plane, plane, slots)  # The kernel stores K and V, so pass the rows twice.

    def scatter_features(
        self, rows: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write feature rows to the pool, like `store_some_features`, and also to rows of `out`.

        Args:
            rows: ``[n, feature_size]``, or partial sums ``[splits, n, feature_size] fp32``.
            slots: ``[n] int64``. For each row, the KV slot of its token, or -1 if the row is not to be
                stored.
            places: ``[n] int64``. For each row, its index among the rows of `out`, or -1 if it is not to be
                written there.
            out: ``[..., feature_size]``, contiguous.
        """
        assert self.features is not None, "the pool has no feature plane; call resize_features first"
        scatter_rows(rows, slots, self.features, places, out)

    def feature_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return a copy of the feature rows at slots ``[n] int64``, with the shape ``[n, feature_size]``."""
        assert self.features is not None, "the pool has no feature plane; call resize_features first"
        return self.features.view(-1, self.feature_size).index_select(0, slots)

    def read_features(self, lease: PageLease, start: int, stop: int) -> torch.Tensor:
        """Return a copy of the feature rows of token indices ``[start, stop)`` of one lease.

        The shape of the copy is ``[stop - start, feature_size]``.
        """
        assert self.features is not None, "the pool has no feature plane; call resize_features first"
        rows = self.features.view(-1, self.feature_size)
        pages = lease.pages[start // self.page_size : self.pages_for(stop)]
        if pages and pages == list(
            range(pages[0], pages[0] + len(pages))
        ):  # In the usual case, the rows are one slice, so no indices are sent to the device.
            first = pages[0] * self.page_size + start % self.page_size
            return rows[first : first + stop - start].clone()
        slots = upload(self.slot_array(lease, start, stop), torch.int64, self.device)
        return rows.index_select(0, slots)


def token_bytes(
    layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    feature_size: int = 0,
    *,
    latent: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> int:
    """Return the number of bytes per token of a pool of this shape, to size a pool before it is made."""
    return (1 if latent else 2) * layers * kv_heads * head_dim * (
        kv_dtype or dtype
    ).itemsize + feature_size * dtype.itemsize
