"""Attention that computes a row from only the tokens that the row sees, regardless of other rows or slots."""

from __future__ import annotations

import torch

from outrider.kernels.kv_store import kv_store
from outrider.kernels.path_attention import RowPaths, path_attention, row_paths
from outrider.shared.attn.base import AttentionBatch
from outrider.shared.kv.pool import KVPool


class DeterministicAttention:
    """`AttentionBackend` on `kernels.path_attention`. Never waits for a GPU.

    Sliding windows, sinks and caps are supported.
    """

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._paths: RowPaths | None = None
        self._slots: torch.Tensor | None = None

    @property
    def batch(self) -> AttentionBatch | None:
        """The batch planned last."""
        return self._batch

    def plan(self, batch: AttentionBatch) -> None:
        """Find the tokens that each row sees."""
        self._batch = batch
        self._slots = batch.slots
        self._paths = row_paths(
            batch.prefix_lens,
            batch.kv_lens,
            batch.query_start,
            batch.ancestors,
            batch.slots.shape[0],
            batch.table_rows,
        )

    def select(self, row: int) -> OneRow:
        """Return a backend for one row of the planned step, to run a pass of this row alone."""
        assert self._batch is not None, "plan() comes before select()"
        assert self._paths is not None
        rows = slice(row, row + 1)
        paths = self._paths
        one = RowPaths(
            paths.sequences[rows], paths.prefix_lens[rows], paths.lengths[rows], paths.columns[rows]
        )
        return OneRow(self._batch, one, self._batch.slots[rows])

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
        """Store K/V, then attend (see `AttentionBackend.run`)."""
        assert self._batch is not None, "plan() comes before run()"
        assert self._paths is not None
        assert self._slots is not None
        k_plane = pool.k_planes[layer]
        v_plane = k_plane if pool.latent else pool.v_planes[layer]
        kv_store(k, v, k_plane, v_plane, self._slots)  # In a latent pool, both planes are the same.
        batch = self._batch
        out = path_attention(
            q,
            k_plane,
            v_plane,
            batch.page_table,
            self._paths,
            scale=scale,
            max_kv_len=batch.max_kv_len,
            window=window,
            sinks=sinks,
            softcap=softcap,
        )
        return out.flatten(1)


class OneRow(DeterministicAttention):
    """Attention for a single row of a step that another backend has planned."""

    def __init__(self, batch: AttentionBatch, paths: RowPaths, slots: torch.Tensor) -> None:
        super().__init__()
        self._batch, self._paths, self._slots = batch, paths, slots
