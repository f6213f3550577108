"""Attention by FlashInfer's paged prefill kernels, a second backend for GPUs.

Only this file imports FlashInfer.

FlashInfer's `plan` reads lengths on the host, so every pass waits for the device once. With this backend, the
engine therefore uses no CUDA graphs. It launches a round only after the previous round has finished (see
`create.waits_for_device`).

Trees are passed as custom masks in unpacked form. FlashInfer 0.6.11 interprets the bit offsets of packed
masks as byte offsets. Packed masks would therefore produce wrong results for batches of several sequences.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from outrider.kernels.kv_store import kv_store
from outrider.shared.attn.base import AttentionBatch, host_table_rows, visible_columns
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.kv.pool import KVPool

WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommended size


@dataclass(frozen=True, slots=True)
class _Layout:
    """The K/V of one step in FlashInfer's format.

    Attributes:
        query_start: ``[sequences + 1] int32``. The rows of sequence b are
            ``[query_start[b], query_start[b + 1])``.
        page_start: ``[sequences + 1] int32``. The pages of sequence b are
            ``pages[page_start[b]:page_start[b + 1]]``.
        pages: ``[pages in use] int32``.
        last_page_lens: ``[sequences] int32``, number of tokens in each sequence's last page.
        mask: ``[sum of rows * tokens] bool``, ordered by sequence and then by row. None for causal rows.
        rows: Number of rows of the layout's sequences.
        places: ``[rows] int64``, the indices of these rows in the step. None if they are the first rows.
    """

    query_start: torch.Tensor
    page_start: torch.Tensor
    pages: torch.Tensor
    last_page_lens: torch.Tensor
    mask: torch.Tensor | None
    rows: int
    places: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Variant:
    """Parameters that FlashInfer's kernels and plans depend on. Layers with equal parameters share a plan."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float
    window: int
    softcap: float


class FlashInferAttention:
    """Attention backend that runs FlashInfer's kernels, for bf16 and fp16.

    Not supported: multi-head latent attention, attention sinks, and draft trees in models with a sliding
    window.

    Args:
        device: The model's device.

    Raises:
        ConfigurationError: The device is not a GPU, or FlashInfer is not installed. The error's `field` names
            the setting.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        if self._device.type != "cuda":
            raise _refused(f"FlashInfer needs a CUDA device, but the model is on {self._device}")
        self._library = _library()
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._batch: AttentionBatch | None = None
        self._layout: _Layout | None = None
        self._wrappers: dict[_Variant, Any] = {}
        self._planned: set[_Variant] = set()

    @property
    def batch(self) -> AttentionBatch | None:
        """The batch planned last."""
        return self._batch

    def plan(self, batch: AttentionBatch) -> None:
        """Keep the batch. Its lengths are read in the first layer, when the pool is known."""
        self._batch = batch
        self._layout = None
        self._planned.clear()

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: KVPool,
        scale: float,
        window: int = 0,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Store K/V, then attend (see `AttentionBackend.run`).

        Raises:
            ConfigurationError: The model needs a feature that this backend lacks. The message names the
                feature.
        """
        assert self._batch is not None, "plan() comes before run()"
        self._check(q, pool, window, sinks)
        k_plane, v_plane = pool.k_planes[layer], pool.v_planes[layer]
        kv_store(k, v, k_plane, v_plane, self._batch.slots)
        if self._layout is None:
            self._layout = step_layout(self._batch, pool.page_size)
        variant = _Variant(
            q.shape[1], pool.kv_heads, pool.head_dim, q.dtype, k_plane.dtype, scale, window, softcap
        )
        layout = self._layout
        if layout.rows == 0:
            return q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
        wrapper = self._plan_variant(variant, layout, pool.page_size)
        queries = q[: layout.rows] if layout.places is None else q[layout.places]
        out: torch.Tensor = wrapper.run(queries.contiguous(), (k_plane, v_plane))
        if layout.places is not None:
            return out.new_zeros(q.shape[0], out[0].numel()).index_copy_(0, layout.places, out.flatten(1))
        padding = q.shape[0] - layout.rows
        return torch.nn.functional.pad(out.flatten(1), (0, 0, 0, padding)) if padding else out.flatten(1)

    def _plan_variant(self, variant: _Variant, layout: _Layout, page_size: int) -> Any:
        # Choose fa2, which works with and without a mask. FlashInfer's automatic choice would depend on the
        # mask, but a wrapper keeps its first choice.
        wrapper = self._wrappers.get(variant)
        if wrapper is None:
            wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")
            self._wrappers[variant] = wrapper
        if variant not in self._planned:
            wrapper.plan(
                layout.query_start,
                layout.page_start,
                layout.pages,
                layout.last_page_lens,
                variant.heads,
                variant.kv_heads,
                variant.head_dim,
                page_size,
                custom_mask=layout.mask,
                causal=layout.mask is None,
                sm_scale=variant.scale,
                window_left=variant.window - 1 if variant.window else -1,
                logits_soft_cap=variant.softcap or None,
                q_data_type=variant.dtype,
                kv_data_type=variant.kv_dtype,
            )
            self._planned.add(variant)
        return wrapper

    def _check(self, q: torch.Tensor, pool: KVPool, window: int, sinks: torch.Tensor | None) -> None:
        assert self._batch is not None
        if pool.latent:
            raise _refused("the model caches latents (MLA), which FlashInfer's paged prefill cannot read")
        if sinks is not None:
            raise _refused("the model has attention sinks")
        if window and self._batch.ancestors is not None:
            raise _refused(
                "the model has sliding windows, which FlashInfer measures in token indices; trees need depths"
            )
        if q.dtype not in (torch.bfloat16, torch.float16):
            raise _refused(
                f"FlashInfer has no kernels for {str(q.dtype).removeprefix('torch.')}; use --dtype bfloat16"
            )


def step_layout(batch: AttentionBatch, page_size: int) -> _Layout:
    """Return the lengths and pages of one forward pass in FlashInfer's form. Waits for the device.

    Idle sequences and sequences without rows are left out, because FlashInfer cannot represent them.
    """
    starts, prefix_lens, kv_lens = (
        batch.query_start.tolist(),
        batch.prefix_lens.tolist(),
        batch.kv_lens.tolist(),
    )
    query_start, page_start, last, pages, masks, places = [0], [0], [], [], [], list[int]()
    owners = host_table_rows(batch)
    for b, (prefix_len, kv_len) in enumerate(zip(prefix_lens, kv_lens, strict=True)):
        count = starts[b + 1] - starts[b]
        if count == 0 or kv_len <= 0 or owners[b] < 0:
            continue
        places += range(starts[b], starts[b + 1])
        used = -(-kv_len // page_size)
        query_start.append(query_start[-1] + count)
        page_start.append(page_start[-1] + used)
        last.append(kv_len - (used - 1) * page_size)
        pages.append(batch.page_table[owners[b], :used])
        if batch.ancestors is not None:
            masks.append(_tree_mask(batch.ancestors[starts[b] : starts[b + 1]], prefix_len, kv_len))
    device = batch.page_table.device
    return _Layout(
        query_start=torch.tensor(query_start, dtype=torch.int32).to(device),
        page_start=torch.tensor(page_start, dtype=torch.int32).to(device),
        pages=torch.cat(pages) if pages else batch.page_table.new_empty(0),
        last_page_lens=torch.tensor(last, dtype=torch.int32).to(device),
        mask=torch.cat(masks) if masks else None,
        rows=query_start[-1],
        places=None if places == list(range(len(places))) else torch.tensor(places).to(device),
    )


def _tree_mask(ancestors: torch.Tensor, prefix_len: int, kv_len: int) -> torch.Tensor:
    """Return a mask ``[rows * kv_len] bool`` of the tokens that each row of one sequence sees."""
    behind = visible_columns(ancestors, kv_len - prefix_len)
    return torch.cat([behind.new_ones(behind.shape[0], prefix_len), behind], dim=-1).flatten()


def _library() -> ModuleType:
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError) as error:
        raise _refused(
            f"FlashInfer cannot be imported ({error}); install it with: pip install 'outrider[flashinfer]'"
        ) from error


def _refused(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"attention_backend flashinfer: {why}; or use --attention-backend triton.", field="attention_backend"
    )
