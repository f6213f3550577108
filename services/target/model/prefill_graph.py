"""Runs prompt chunks as CUDA graphs, because their many small kernels take longer to launch than to run.

Several chunks share a pass. Their rows are packed and padded at the end to one of a few sizes. One graph is
recorded for each size. It serves any number of chunks with contexts of any length. Attention plans its work
on the device, from the lengths and the slots' page tables.

    rows      | chunk of slot 3 | chunk of slot 0 | padding, which belongs to no slot |

A graph computes hidden states. Tokens are chosen after the graph from the chunks' last rows, and only for
complete prompts. All sampling modes therefore share the graphs. Logprobs and states of prompt tokens are also
computed after the graph, for the clients that want them.

Some attention libraries are faster than Outrider's own kernel for a pass over one whole prompt. Such passes
have additional graphs, which use the library.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch

from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.slot_table import SlotTable
from outrider.services.target.model.verify_pass import StepModel
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.shared.attn.base import AttentionBackend, AttentionBatch
from outrider.shared.attn.chunks import ChunkAttention
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.attn.whole_prompt import WholePromptAttention
from outrider.shared.engine.buckets import bucket, padded_size
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.engine.recorded_graph import until_next_run
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.layers.routes import recording_routes

_log = logging.getLogger("outrider.target")

PREFILL_SIZES = (16, 32, 64, 128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
"""Numbers of rows of the recorded passes over prompts.

Padding is at most a quarter of a pass of more than 384 rows. Passes over more than 2048 rows need no graphs,
because the device takes longer to run their kernels than the host takes to launch them.
"""
WHOLE_PROMPT_SIZES = tuple(size for size in PREFILL_SIZES if size >= 512)
"""Numbers of rows of the recorded passes over one whole prompt with a library's attention."""
_ALIGNED = 4
"""Alignment of tensors, in int32 words. Triton would compile further kernels for less aligned addresses."""


def fitting(sizes: Seq[int], most: int) -> tuple[int, ...]:
    """Return those of the ascending `sizes` that suffice for passes over at most `most` rows."""
    return tuple(size for index, size in enumerate(sizes) if not index or sizes[index - 1] < most)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The result of one pass over prompt chunks.

    Attributes:
        last: ``[n, hidden_size]``, the last hidden states of the n chunks that complete their prompts, in
            order.
        hidden: ``[rows, hidden_size]``, the hidden states of all rows, one chunk after the other. Padding
            rows may follow.
        routes: The experts that the routers of the sparse layers have chosen, one tensor ``[rows, top_k]
            int64`` per layer. May be empty if no client wants them.
    """

    last: torch.Tensor
    hidden: torch.Tensor
    routes: Seq[torch.Tensor]


class PrefillGraph:
    """Runs packed prompt chunks through CUDA graphs. Engine thread only, under inference mode.

    Args:
        model: Function that returns the model to run, with or without feature rows.
        graphs: Records and replays the passes.
        sizes: Numbers of rows of the recorded passes, ascending.
        table: The slots, whose page tables the passes read.
    """

    def __init__(
        self, model: Callable[[bool], StepModel], graphs: GraphCache, sizes: Seq[int], table: SlotTable
    ) -> None:
        self._model = model
        self._graphs = graphs
        self._sizes = tuple(sizes)
        self._table = table
        self._inputs: dict[int, _Inputs] = {}

    def takes(self, chunks: Seq[PrefillChunk]) -> bool:
        """Return True if a recorded graph can run one pass over these chunks."""
        size = bucket(self._sizes, sum(chunk.stop - chunk.start for chunk in chunks))
        return (
            size is not None
            and self._graphs.replays(self._key(size))
            and all(chunk.sequence.slot >= 0 for chunk in chunks)
        )

    def takes_whole(self, chunks: Seq[PrefillChunk]) -> bool:
        """Return True if `chunks` is a single chunk from token 0 on that has a graph with a library's
        attention."""
        if len(chunks) != 1 or chunks[0].start:
            return False
        size = bucket(self._sizes, chunks[0].stop)
        return size is not None and self._graphs.replays(self._key(size, whole=True))

    def largest(self, rows: int) -> int | None:
        """Return the largest size of at most `rows` rows with a graph, or None if there is none."""
        for size in reversed(self._sizes[: bisect_right(self._sizes, rows)]):
            if self._graphs.replays(self._key(size)):
                return size
        return None

    def run(self, chunks: Seq[PrefillChunk], captures: bool) -> PromptRows:
        """Enqueue prompt chunks that `takes` accepts. Store their K/V, and feature rows if wanted.

        Args:
            chunks: The prompt chunks of one pass. Each chunk belongs to a different sequence, which has a
                slot.
            captures: True to store the feature rows of sequences whose requests draft.

        Returns:
            The rows of the chunks, valid until the next recorded pass.
        """
        size = padded_size(self._sizes, sum(chunk.stop - chunk.start for chunk in chunks))
        for chunk in chunks:
            self._table.hold(chunk.sequence)
        self._table.flush()
        inputs, whole = self._at(size), self.takes_whole(chunks)
        complete = inputs.load(chunks, captures)
        found = self._graphs.run(self._key(size, whole), lambda: self._pass(inputs, whole))
        return replace(found, last=found.last[:complete])

    def capture(self, size: int) -> None:
        """Record the pass of one size over padding rows, which store nothing."""
        self._record(size, whole=False)

    def capture_whole(self, size: int) -> None:
        """Record the pass over one whole prompt of up to `size` tokens. Without a library, do nothing."""
        if library_of(self._model(False).attention) is None:
            return
        try:
            self._record(size, whole=True)
        except RuntimeError:  # for example too little memory
            _log.exception("prompts of %d tokens have no graph with the library's attention", size)

    def _record(self, size: int, whole: bool) -> None:
        inputs = self._at(size)
        inputs.load((), False)
        self._graphs.capture(self._key(size, whole), lambda: self._pass(inputs, whole))

    def _pass(self, inputs: _Inputs, whole: bool) -> PromptRows:
        model = self._model(True)
        if whole:
            library = library_of(model.attention)
            assert library is not None, "the library was there when the pass was recorded"
            model = replace(model, attention=WholePromptAttention(library.tile, inputs.pages, inputs.length))
        return inputs.step(model)

    def _key(self, size: int, whole: bool = False) -> GraphKey:
        dependent = self._model(True).projector is not None
        return GraphKey("prompt" if whole else "prefill", size, draft_dependent=dependent)

    def _at(self, size: int) -> _Inputs:
        found = self._inputs.get(size)
        if found is None:
            found = self._inputs[size] = _Inputs(size, self._table, self._model(False).pool)
        return found


def library_of(attention: AttentionBackend) -> ChunkAttention | None:
    """Return the library that computes attention over long prompts for this backend, or None."""
    return attention.chunks if isinstance(attention, KernelAttention) else None


class _Inputs:
    """The inputs of the pass of one size, at fixed addresses. One copy from the host fills them.

    Args:
        size: Rows of the pass.
        table: The slots.
        pool: The pool that stores the rows' K/V.
    """

    def __init__(self, size: int, table: SlotTable, pool: KVPool) -> None:
        self._size = size
        self._pool = pool
        most = min(size, table.slots)  # chunks
        # The padding rows form a sequence of their own, without a slot.
        pages = -(-size // pool.page_size)
        words = [2 * size, 2 * size, size, size, most, most + 1, most + 1, most + 1, most + 2, pages]
        places = [-(-count // _ALIGNED) * _ALIGNED for count in words]
        bounds = np.cumsum(places[:-1]).tolist()
        self._host = np.zeros(sum(places), dtype=np.int32)
        host = [part[:count] for part, count in zip(np.split(self._host, bounds), words, strict=True)]
        self._slots, self._feature_slots = (part.view(np.int64) for part in host[:2])
        self._columns = host[2:]
        with torch.inference_mode(False):
            self._buffer = torch.zeros(len(self._host), dtype=torch.int32, device=pool.device)
        parts = [part[:count] for part, count in zip(self._buffer.tensor_split(bounds), words, strict=True)]
        self.feature_slots = parts[1].view(torch.int64)
        self.tokens, self.positions, self.last, prefixes, lengths, owners, starts, self.pages = parts[2:]
        self.length = lengths[:1]
        self.batch = AttentionBatch(
            page_table=table.page_table,
            prefix_lens=prefixes,
            kv_lens=lengths,
            query_start=starts,
            ancestors=None,
            slots=parts[0].view(torch.int64),
            max_query_len=size,
            max_kv_len=table.page_table.shape[1] * pool.page_size,
            table_rows=owners,
            ragged=True,
        )

    def load(self, chunks: Seq[PrefillChunk], captures: bool) -> int:
        """Upload the inputs of some chunks, and return how many of them complete their prompts."""
        tokens, positions, last, prefixes, lengths, owners, starts, pages = self._columns
        self._host[:] = 0
        self._slots[:] = self._feature_slots[:] = -1
        owners[:] = -1
        row = complete = 0
        for index, chunk in enumerate(chunks):
            sequence, stop = chunk.sequence, row + chunk.stop - chunk.start
            assert sequence.lease is not None, "a sequence with a slot has a lease"
            self._slots[row:stop] = self._pool.slot_array(sequence.lease, chunk.start, chunk.stop)
            if captures and sequence.stores_features:
                self._feature_slots[row:stop] = self._slots[row:stop]
            tokens[row:stop] = sequence.tokens[chunk.start : chunk.stop]
            positions[row:stop] = np.arange(chunk.start, chunk.stop)
            prefixes[index], lengths[index], owners[index] = chunk.start, chunk.stop, sequence.slot
            row = stop
            starts[index + 1] = row
            if chunk.is_last:
                last[complete] = row - 1
                complete += 1
        starts[len(chunks) + 1 :] = self._size
        if chunks and chunks[0].sequence.lease is not None:
            first = chunks[0].sequence.lease.pages[: len(pages)]
            pages[: len(first)] = first
        source = torch.from_numpy(self._host)
        # The host does not wait for a copy from pinned memory, and torch keeps that memory until the copy is
        # done. pin_memory() has copied the array, so the array itself may change right away.
        self._buffer.copy_(source.pin_memory() if self._buffer.is_cuda else source, non_blocking=True)
        return complete

    def step(self, model: StepModel) -> PromptRows:
        """Run the pass and return its rows. `last` also contains rows of idle chunks."""
        projector = model.projector
        model.attention.plan(self.batch)
        aux_layer_ids = tuple(projector.spec.aux_layer_ids) if projector else ()
        with recording_routes() as routes:
            output = model.decoder.forward(
                self.tokens, self.positions, model.attention, model.pool, aux_layer_ids
            )
        if projector is not None:
            model.pool.store_some_features(projector(output), self.feature_slots)
        last = output.hidden.index_select(0, self.last)
        return PromptRows(last, until_next_run(output.hidden), [until_next_run(route) for route in routes])
