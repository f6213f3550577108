"""Replays CUDA graphs for the verify pass of host rounds: pads batches and trees to a few recorded sizes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.input_batch import InputBatch, SamplingMode
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.verify_step import StepModel, VerifiedStep, unpack, verify_step
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.engine.buckets import Buckets, power_of_2
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.spec.tree import DraftBatch

LEAST_CONTEXT = 1024
"""Number of context tokens that the narrowest page table covers. Shorter contexts share the same graph."""
MAX_PADDING = 2.0
"""Largest factor by which padding may multiply the number of nodes of a pass that uses a graph."""
FREE_ROWS = 64
"""Number of rows up to which padding is free, because a pass costs about as much as a single row."""


def table_pages(sequences: Seq[Sequence], page_size: int, nodes: int) -> int:
    """Return the number of columns of a page table for the leases of these sequences, with room to grow.

    The number is a power of two, so that few graphs serve all contexts.
    """
    most = max((len(sequence.lease.pages) for sequence in sequences if sequence.lease is not None), default=0)
    least = -(-max(LEAST_CONTEXT, nodes) // page_size)
    return power_of_2(max(most, least))


class BucketedVerify:
    """Runs `verify_step` on trees from the host. Engine thread only, under inference mode.

    Args:
        model: Returns the model to run, with or without feature rows.
        graphs: Records and replays the passes.
        buckets: Sizes to pad batches and trees to.
        max_depth: Depth of the deepest tree whose accepted path is never cut.
    """

    def __init__(
        self, model: Callable[[bool], StepModel], graphs: GraphCache, buckets: Buckets, max_depth: int
    ) -> None:
        self._model = model
        self._graphs = graphs
        self._buckets = buckets
        self._max_depth = max_depth
        self._tables: dict[tuple[int, int, int], InputBatch] = {}
        self._results: dict[tuple[int, int], torch.Tensor] = {}

    def fits(self, counts: Seq[int]) -> bool:
        """Return True if trees of these sizes go through a graph without too much padding."""
        bs, nodes = self._buckets.batch_size(len(counts)), self._buckets.num_nodes(max(counts))
        return (
            bs is not None and nodes is not None and bs * nodes <= max(FREE_ROWS, MAX_PADDING * sum(counts))
        )

    def verify(
        self, sequences: Seq[Sequence], drafts: DraftBatch, capture: bool
    ) -> tuple[list[Outcome], torch.Tensor | None]:
        """Verify one tree per sequence.

        Returns:
            The outcome of each sequence, and a copy of the accepted nodes' feature rows, ``[bs, R,
            feature_size]``. None in place of the copy if no features are captured.
        """
        bs, nodes = self._buckets.batch_size(len(sequences)), self._buckets.num_nodes(drafts.tokens.shape[1])
        assert bs is not None
        assert nodes is not None
        tables = self._at(*self._key(bs, nodes, sequences))
        mode = SamplingMode.of(sequences)
        due = self._graphs.due(self._graph_key(tables, mode, capture))
        if due:
            self._prepare(tables, mode, capture)
        tables.load(sequences, drafts)
        step = (self._run if due else self._step)(tables, mode, capture)
        rows = unpack(self._on_host(step.packed)[: len(sequences)].tolist())
        assert all(row is not None for row in rows), "no sequence in a verify pass has ended"
        features = None if step.features is None else step.features[: len(sequences)].clone()
        return [row for row in rows if row is not None], features

    def capture(self, bs: int, nodes: int, mode: SamplingMode, capture: bool) -> None:
        """Record the pass of one size before the pass is needed."""
        self._prepare(self._at(*self._key(bs, nodes, ())), mode, capture)

    def _on_host(self, packed: torch.Tensor) -> torch.Tensor:
        """Copy the result of a pass to pinned host memory, which avoids a staging copy, and wait."""
        if not packed.is_cuda:
            return packed
        size = (packed.shape[0], packed.shape[1])
        place = self._results.get(size)
        if place is None:
            place = self._results[size] = torch.empty(size, dtype=torch.int32, pin_memory=True)
        place.copy_(packed, non_blocking=True)
        torch.cuda.current_stream(packed.device).synchronize()
        return place

    def _key(self, bs: int, nodes: int, sequences: Seq[Sequence]) -> tuple[int, int, int]:
        return bs, nodes, table_pages(sequences, self._model(False).pool.page_size, nodes)

    def _at(self, bs: int, nodes: int, pages: int) -> InputBatch:
        found = self._tables.get((bs, nodes, pages))
        if found is None:
            pool = self._model(False).pool
            found = self._tables[bs, nodes, pages] = InputBatch(bs, nodes, pages, pool.page_size, pool.device)
        return found

    def _prepare(self, tables: InputBatch, mode: SamplingMode, capture: bool) -> None:
        key = self._graph_key(tables, mode, capture)
        if not self._graphs.holds(key):
            tables.make_idle()
            self._graphs.capture(key, lambda: self._step(tables, mode, capture))

    def _run(self, tables: InputBatch, mode: SamplingMode, capture: bool) -> VerifiedStep:
        return self._graphs.run(
            self._graph_key(tables, mode, capture), lambda: self._step(tables, mode, capture)
        )

    def _step(self, tables: InputBatch, mode: SamplingMode, capture: bool) -> VerifiedStep:
        columns = min(tables.nodes, self._max_depth + 1)
        return verify_step(
            self._model(capture), tables, mode, tables.limits, tables.committed_lens, tables.trees, columns
        )

    def _graph_key(self, tables: InputBatch, mode: SamplingMode, capture: bool) -> GraphKey:
        return GraphKey(
            "verify",
            tables.bs,
            nodes=tables.nodes,
            pages=tables.pages,
            mode=mode,
            capture=capture,
            draft_dependent=capture,
        )
