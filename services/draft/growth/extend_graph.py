"""Computes the draft model's K/V of a short prompt with one CUDA graph.

For a short prompt, launching the draft model's kernels one by one takes longer than running them on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from outrider.services.draft.growth.draft_model import DraftModel
from outrider.services.draft.growth.recurrent_head import Ends
from outrider.services.draft.sessions.chunks import RowChunk, take_features
from outrider.services.draft.sessions.session import RowSource
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.attn.padded import PaddedRows
from outrider.shared.engine.buckets import bucket, padded_size
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.kv.pool import KVPool

SIZES = (32, 64, 128, 256, 512)
"""Row counts of the recorded passes. Longer passes keep the device busy without a graph."""
LONGEST_CONTEXT = 1024
"""Number of tokens that the page table covers. Attention is planned for this number of tokens, even though
the actual context may be shorter."""


class ExtendGraph:
    """Computes the draft model's K/V for a single chunk of new rows, in one CUDA graph launch.

    The chunk is padded to one of a few sizes, so that few graphs are recorded. Engine thread only.

    Args:
        model: The draft model, which has one stage.
        attention: Attention backend of the model.
        pool: KV pool of the model.
        feature_size: Width of a feature row; 0 if the model reads no features.
        dtype: Dtype of the features.
        graphs: Cache in which the passes are recorded.
        sizes: Row counts of the recorded passes, ascending.
    """

    def __init__(
        self,
        model: DraftModel,
        attention: AttentionBackend,
        pool: KVPool,
        feature_size: int,
        dtype: torch.dtype,
        graphs: GraphCache,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        self._model = model
        self._attention = attention
        self._pool = pool
        self._feature_size = feature_size
        self._dtype = dtype
        self._graphs = graphs
        self._sizes = tuple(sizes)
        self._inputs: dict[int, _Inputs] = {}

    def takes(self, chunks: Sequence[RowChunk]) -> bool:
        """True if there is only one chunk, and a recorded graph can run it."""
        if len(chunks) != 1:
            return False
        size = bucket(self._sizes, chunks[0].count)
        return (
            size is not None
            and self._at(size).rows.fits(chunks[0].start, chunks[0].count)
            and self._graphs.replays(size)
        )

    @torch.inference_mode()
    def run(self, chunk: RowChunk) -> None:
        """Run a chunk that `takes` accepts, and update its session."""
        size = padded_size(self._sizes, chunk.count)
        session, inputs, ahead = chunk.session, self._at(size), 1 - self._model.lead
        assert session.lease is not None, "a session must be reserved before it is extended"
        # If the model's lead is 0, the row at position t pairs the feature of t with the token t + 1. The row
        # therefore reads the token one position ahead.
        inputs.rows.load(session.lease, session.tokens[chunk.start + ahead : chunk.stop + ahead], chunk.start)
        if session.row_source is RowSource.FEATURES:
            inputs.features[size - chunk.count :].copy_(
                take_features([chunk], inputs.features.device, self._dtype)
            )
        states = self._graphs.run(size, lambda: self._pass(inputs))
        session.cached_rows += chunk.count
        session.last_state = states[-1].clone()

    @torch.inference_mode()
    def record(self) -> None:
        """Record the passes of all sizes, before any session is opened. Does nothing without CUDA.

        All borrowed tensors of the model must be present.
        """
        if self._graphs.enabled:
            for size in reversed(self._sizes):
                inputs = self._at(size)
                inputs.rows.make_idle()
                self._graphs.capture(size, partial(self._pass, inputs))

    def _at(self, size: int) -> _Inputs:
        found = self._inputs.get(size)
        if found is None:
            found = _Inputs(size, self._pool, self._feature_size, self._dtype)
            self._inputs[size] = found
        return found

    def _pass(self, inputs: _Inputs) -> torch.Tensor:
        rows = inputs.rows
        (run,) = self._model.passes(rows.positions, [rows.size], [0], self._attention, self._pool)
        self._attention.plan(rows.batch)
        return run(rows.tokens, inputs.features, inputs.source, inputs.ends)  # [1, hidden]


class _Inputs:
    """Inputs of the pass of one size, at fixed addresses.

    Attributes:
        rows: Tokens and KV slots.
        features: ``[size, feature_size]``.
        source: ``[size] int32``, the index of each row's feature. This index equals the index of the row.
        ends: Selects the last row, whose state is wanted.
    """

    def __init__(self, size: int, pool: KVPool, feature_size: int, dtype: torch.dtype) -> None:
        self.rows = PaddedRows(size, -(-LONGEST_CONTEXT // pool.page_size), pool)
        with torch.inference_mode(False):
            self.features = torch.zeros((size, feature_size), dtype=dtype, device=pool.device)
            self.source = torch.arange(size, dtype=torch.int32).to(pool.device)
            one = torch.arange(2, dtype=torch.int32).to(pool.device)
        self.ends = Ends(replace(self.rows.batch, query_start=one, max_query_len=1))
