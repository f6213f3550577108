"""Runs a whole drafting pass in one CUDA graph launch, for rounds that the draft's host starts.

Such a round serves remote targets, which send their requests in frames. The pass first extends the sessions:
it computes the draft's K/V for their new tokens. It then grows their trees.

On a GPU, launching the roughly one hundred kernels of a pass takes longer than running them. Passes of a
recurring size are therefore recorded as CUDA graphs. The first few passes of each size run eagerly, with the
same code. `DraftGraphs` limits the batch sizes for which the draft records graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.services.draft.growth.draft_model import DraftModel
from outrider.services.draft.growth.extend_graph import ExtendGraph
from outrider.services.draft.growth.growth_memory import GrowthMemory
from outrider.services.draft.growth.page_tables import PageTable
from outrider.services.draft.growth.tree_grower import (
    GrownTrees,
    GrowthInputs,
    GrowthSize,
    TreeGrower,
)
from outrider.services.draft.sessions.chunks import RowChunk, take_features
from outrider.services.draft.sessions.session import RowSource, Session
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.engine.buckets import power_of_2
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.seeds import signed_seed
from outrider.shared.spec.tree import DraftBatch, DraftShape, mask_words

MAX_BS = 64
"""Largest recorded batch size, unless the settings change it."""


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Inputs of rounds of one size, at fixed addresses: views of one packed tensor, and the features.

    Attributes:
        packed: ``[n] int32``, the memory of all `inputs` except the features and the page table.
        places: ``[bs * rows] int64``, a view of `packed`: for each queued feature, the flat index of its row.
        inputs: Inputs of the round.
        table: The page table in `inputs`.
    """

    packed: torch.Tensor
    places: torch.Tensor
    inputs: GrowthInputs
    table: PageTable


class DraftGraph:
    """Extends sessions by a few new tokens and grows their trees, in one CUDA graph launch.

    Args:
        memory: KV pool, page tables and model.
        graphs: Graph cache of the device. Without CUDA, every round runs eagerly.
        feature_size: Width of a feature row; 0 if the draft model reads no features.
        dtype: Dtype of the features.
        max_bs: Function that returns the largest batch size to record.
    """

    def __init__(
        self,
        memory: GrowthMemory,
        graphs: GraphCache,
        feature_size: int,
        dtype: torch.dtype,
        max_bs: Callable[[], int] = lambda: MAX_BS,
    ) -> None:
        self._memory = memory
        self._graphs = graphs
        self._max_bs = max_bs
        self._feature_size = feature_size
        self._dtype = dtype
        self._buffers: dict[tuple[int, int, int], _Buffers] = {}

    def draft(self, sessions: Sequence[Session]) -> DraftBatch:
        """Extend sessions by their newest tokens, and grow one tree per session.

        Args:
            sessions: Sessions with reserved memory that request trees of equal depth and topk. In each
                session, 1 to `pending_rows` committed tokens have no K/V in the draft's KV pool yet.
        """
        shapes = [session.ask.shape.bounded() for session in sessions if session.ask is not None]
        counts = [session.extendable_rows for session in sessions]
        nodes = power_of_2(max(shape.max_nodes for shape in shapes))
        rows = max(pending_rows(shape) for shape in shapes)
        size = GrowthSize(power_of_2(len(sessions)), rows, shapes[0].depth, shapes[0].topk, nodes)
        longest = max(
            self._memory.tokens_needed(session.committed_len, shape)
            for session, shape in zip(sessions, shapes, strict=True)
        )
        width = self._memory.tables.width_for(longest)
        assert width is not None, "the leases must hold the trees of the sessions"
        buffers = self._buffers_for(size, width)
        key = (size, width)
        recorded = self._record(key, size, buffers)
        self._load(sessions, counts, [shape.max_nodes for shape in shapes], buffers)
        drafted = (
            self._graphs.run(key, lambda: self._run(buffers, size)) if recorded else self._run(buffers, size)
        )
        # Copy the results, because the next round of this size overwrites them.
        trees, states = _copied(drafted, len(sessions), max(shape.max_nodes for shape in shapes))
        for session, count, state in zip(sessions, counts, states.unbind(0), strict=True):
            session.cached_rows += count
            session.last_state = state
        return trees

    def record(self, bs: int, shape: DraftShape) -> None:
        """Record the rounds of a batch size before any session is opened.

        Does nothing without CUDA, or for a shape without drafts.
        """
        if not shape.drafts:
            return
        shape = shape.bounded()
        size = GrowthSize(bs, pending_rows(shape), shape.depth, shape.topk, power_of_2(shape.max_nodes))
        width = self._memory.tables.width_for(1)
        assert width is not None, "one token must fit into the pool"
        self._graphs.expect(size)
        self._record((size, width), size, self._buffers_for(size, width))

    def _run(self, buffers: _Buffers, size: GrowthSize) -> GrownTrees:
        return self._memory.grower.draft(buffers.inputs, size)

    def _record(self, key: tuple[GrowthSize, int], size: GrowthSize, buffers: _Buffers) -> bool:
        """Return True if a graph of this size exists. Record it once the size has recurred often enough."""
        if not self._graphs.enabled or size.bs > power_of_2(self._max_bs()):
            return False
        if not self._graphs.due(key, counted_as=size):
            return False
        if not self._graphs.holds(key):
            buffers.packed.zero_()  # idle rows: recording runs the round for real
            self._graphs.capture(key, lambda: self._run(buffers, size))
        return True

    def _buffers_for(self, size: GrowthSize, width: int) -> _Buffers:
        key = (size.bs, size.rows, width)
        if key not in self._buffers:
            self._buffers[key] = self._make_buffers(size.bs, size.rows, width)
        return self._buffers[key]

    def _make_buffers(self, bs: int, rows: int, width: int) -> _Buffers:
        device = self._memory.pool.device
        # Use a separate table. If this code took a table from `PageTables`, rounds on the device would later
        # get another table than the one that their graphs were recorded with.
        table = PageTable(bs, width, device)
        with torch.inference_mode(False):
            packed = torch.zeros(_packed_size(bs, rows), dtype=torch.int32, device=device)
            features = torch.zeros((bs, rows, self._feature_size), dtype=self._dtype, device=device)
        places, seeds, *columns, tokens = packed.split_with_sizes(
            [2 * bs * rows, 2 * bs, bs, bs, bs, bs, bs, bs * rows]
        )
        committed_lens, counts, max_nodes, choices, temperature = columns
        inputs = GrowthInputs(
            committed_lens,
            counts,
            tokens.view(bs, rows),
            features,
            max_nodes,
            table.tensor,
            table.places,
            temperature.view(torch.float32),
            seeds.view(torch.int64),
            choices,
        )
        return _Buffers(packed, places.view(torch.int64), inputs, table)

    def _load(
        self, sessions: Sequence[Session], counts: Sequence[int], max_nodes: Sequence[int], buffers: _Buffers
    ) -> None:
        """Copy the inputs of a round to their fixed addresses. Rows after the sessions' rows are idle."""
        bs, rows = buffers.inputs.tokens.shape
        packed = np.zeros(buffers.packed.shape[0], dtype=np.int32)
        bounds = np.cumsum([2 * bs * rows, 2 * bs, bs, bs, bs, bs, bs])
        places, seeds, committed_lens, given, nodes, choices, temperature, tokens = np.split(packed, bounds)
        fresh = [row * rows + i for row, count in enumerate(counts) for i in range(count)]
        places.view(np.int64)[: len(fresh)] = fresh
        seeds.view(np.int64)[: len(sessions)] = [signed_seed(session.seed) for session in sessions]
        committed_lens[: len(sessions)] = [session.committed_len for session in sessions]
        given[: len(sessions)] = counts
        nodes[: len(sessions)] = max_nodes
        choices[: len(sessions)] = [session.choice_index for session in sessions]
        temperature.view(np.float32)[: len(sessions)] = [session.temperature for session in sessions]
        for row, (session, count) in enumerate(zip(sessions, counts, strict=True)):
            tokens[row * rows : row * rows + count] = session.tokens[session.committed_len - count :]
        host = torch.from_numpy(packed)
        buffers.packed.copy_(host.pin_memory() if buffers.packed.is_cuda else host, non_blocking=True)
        if sessions[0].row_source is RowSource.FEATURES:
            chunks = [
                RowChunk(session, session.cached_rows, count)
                for session, count in zip(sessions, counts, strict=True)
            ]
            features = take_features(chunks, buffers.packed.device, self._dtype)
            buffers.inputs.features.flatten(0, 1).index_copy_(0, buffers.places[: len(fresh)], features)
        buffers.table.update([session.lease for session in sessions])


class DraftGraphs:
    """The CUDA graph cache of a draft, and the largest batch size that the draft records.

    Args:
        device: Device of the draft.

    Attributes:
        cache: Graphs of all rounds and short prompts of the draft. These graphs can share memory, because
            they all run on one stream.
        max_bs: The largest recorded batch size. Larger batches run without graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self.cache = GraphCache(device)
        self.max_bs = MAX_BS

    def limit(self, *, disabled: bool, max_bs: int) -> None:
        """Apply the settings. Call this before anything is recorded."""
        self.cache.enabled = self.cache.enabled and not disabled
        self.max_bs = max_bs


@dataclass(frozen=True, slots=True)
class DeviceGrowth:
    """The parts of drafting that run in a single launch: device rounds, host rounds and short prompts.

    Attributes:
        memory: The resources that all rounds of the draft model share.
        host: Runs the rounds that the host starts. None on a CPU, where two separate steps extend the
            sessions and grow the trees.
        extension: Extends sessions by short prompts. None on a CPU, or if the model has several stages.
        graphs: The graph cache that the rounds and the short prompts share.
    """

    memory: GrowthMemory
    host: DraftGraph | None
    extension: ExtendGraph | None = None
    graphs: DraftGraphs = field(default_factory=lambda: DraftGraphs(torch.device("cpu")))

    @classmethod
    def make(
        cls,
        model: DraftModel,
        attention: AttentionBackend,
        pool: KVPool,
        feature_size: int,
    ) -> DeviceGrowth:
        """Create these parts for a model.

        On a CPU, `host` and `extension` are None. A model with several stages has no `extension`.
        """
        memory = GrowthMemory(TreeGrower(model, attention, pool), pool, model.lead)
        graphs = DraftGraphs(pool.device)
        if pool.device.type != "cuda":
            return cls(memory, None, graphs=graphs)
        host = DraftGraph(memory, graphs.cache, feature_size, model.dtype, lambda: graphs.max_bs)
        if model.stages > 1:
            return cls(memory, host, graphs=graphs)
        extension = ExtendGraph(model, attention, pool, feature_size, model.dtype, graphs.cache)
        return cls(memory, host, extension, graphs)


def pending_rows(shape: DraftShape) -> int:
    """Return how many rows a session may have pending when one launch extends it and grows its tree."""
    return shape.bounded().columns if shape.drafts else 0


def _packed_size(bs: int, rows: int) -> int:
    return 2 * bs * rows + 2 * bs + 5 * bs + bs * rows


def _copied(drafted: GrownTrees, count: int, nodes: int) -> tuple[DraftBatch, torch.Tensor]:
    """Return copies of the first `count` trees, cut to `nodes` columns, and copies of their states."""
    trees = drafted.trees
    assert trees.logprobs is not None, "rounds must return log-probs"
    columns = [part[:count, :nodes] for part in (trees.tokens, trees.parents, trees.depths)]
    masks = trees.ancestors[:count, :nodes, : mask_words(nodes)]
    parts = [*columns, trees.num_nodes[:count], masks, trees.logprobs[:count, :nodes].view(torch.int32)]
    packed = torch.cat([part.reshape(-1) for part in parts])
    views = [
        view.view(part.shape)
        for view, part in zip(packed.split_with_sizes([part.numel() for part in parts]), parts, strict=True)
    ]
    tokens, parents, depths, num_nodes, ancestors, logprobs = views
    return DraftBatch(
        tokens, parents, depths, num_nodes, ancestors, logprobs=logprobs.view(torch.float32)
    ), drafted.states[:count].clone()
