"""Rank 0's decoder and KV pool, for use by the engine. Each call also runs on the other ranks.

When the engine records or replays a CUDA graph, `LeadDecoder` makes the other ranks record or replay a graph
of their own at the same point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from outrider.kernels.verify import SamplingTensors, choose_tokens
from outrider.shared.attn.base import AttentionBackend, AttentionBatch
from outrider.shared.base.errors import OutriderError
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import LM_HEAD, Decoder, DecoderOutput
from outrider.shared.parallel.collectives import missed
from outrider.shared.parallel.commands import (
    Compact,
    Drop,
    Forget,
    GraphRecorded,
    Logits,
    MakePool,
    Record,
    Replay,
    Scrub,
)
from outrider.shared.parallel.decoder import HeadReader, ShardedDecoder, best_of
from outrider.shared.parallel.lead import Lead
from outrider.shared.parallel.packing import StepInputs, pack

POOL_TIMEOUT_S = 120.0


class LeadDecoder(ShardedDecoder):
    """Rank 0's `ShardedDecoder`. Call `connect` first. Then use this object like any other `Decoder`.

    Only one thread at a time may use this decoder. The decoder is also a `GraphObserver`. When the engine
    records or replays a CUDA graph, the decoder makes the other ranks do the same with their own graphs.
    """

    _lead: Lead
    _read_head: HeadReader | None = None
    _last: tuple[torch.Tensor, AttentionBatch] | None = None

    def connect(self, lead: Lead, read_head: HeadReader) -> None:
        """Attach the other ranks. `read_head` reads the output head for drafts that borrow the head."""
        self._lead = lead
        self._read_head = read_head

    @property
    def failure(self) -> OutriderError | None:
        """The error that broke the group, if any."""
        return self._lead.failure

    def make_pool(self, num_pages: int, page_size: int, feature_size: int = 0) -> KVPool:
        """Create a KV pool on every rank. Feature rows are stored on rank 0 only.

        Raises:
            ConfigurationError: Rank 0 has too little memory.
            OutriderError: Another rank has too little memory.
        """
        pool = self._pool_of(SpreadPool, num_pages, page_size, feature_size)
        pool.lead_by(self)
        self._lead.send(MakePool(num_pages, page_size))
        self._lead.wait_done(POOL_TIMEOUT_S)
        return pool

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight. No rank stores the whole output head, so it is read from disk again."""
        if name == LM_HEAD and not self.config.tie_word_embeddings:
            assert self._read_head is not None
            return self._read_head()
        return self.embedding if name == LM_HEAD else super().weight(name)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        pool: KVPool,
        aux_layer_ids: Sequence[int] = (),
    ) -> DecoderOutput:
        """Broadcast the step's inputs, then run this rank's part of the pass."""
        batch = attention.batch
        assert batch is not None, "plan() comes before forward()"
        inputs = StepInputs(tokens, positions, batch)
        with self._lead.together(inputs.command()):
            self.collectives.broadcast(inputs.pack())
            output = super().forward(tokens, positions, attention, pool, aux_layer_ids)
        self._last = output.hidden, batch
        return output

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocab]`` for hidden rows after the final norm, gathered from all ranks."""
        with self._together_on(hidden, best_only=False):
            gathered = self.collectives.gather(self.sent_columns(hidden))
        assert gathered is not None
        return gathered.transpose(0, 1).reshape(hidden.shape[0], -1)[:, : self.config.vocab_size].contiguous()

    @torch.inference_mode()
    def choose(
        self, hidden: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor
    ) -> torch.Tensor:
        """Choose tokens. If all rows are greedy, each rank sends only its best logit and token id per row."""
        if not sampling.all_greedy:
            return choose_tokens(self.logits(hidden), sampling, positions)
        with self._together_on(hidden, best_only=True):
            gathered = self.collectives.gather(self.best(hidden))  # [ranks, rows, 2]
        assert gathered is not None
        return best_of(gathered)

    def spread_compact(
        self,
        page_table: torch.Tensor,
        cached_lens: torch.Tensor,
        path: torch.Tensor,
        num_accepted: torch.Tensor,
        table_rows: torch.Tensor | None = None,
    ) -> None:
        """Make the other ranks move the accepted rows in their pools (see `KVPool.compact`)."""
        batch = None if self._last is None else self._last[1]
        known = batch is not None and page_table is batch.page_table and cached_lens is batch.prefix_lens
        bs, width = path.shape
        parts = [path, num_accepted]
        if table_rows is not None:
            parts.append(table_rows[:bs])
        if not known:
            parts += [page_table, cached_lens[:bs]]
        tables, max_pages = (0, 0) if known else page_table.shape
        with self._lead.together(Compact(bs, width, tables, max_pages, int(table_rows is not None))):
            self.collectives.broadcast(pack(parts))

    def spread_scrub(self, pages: torch.Tensor) -> None:
        """Make the other ranks fill pages of their KV pools with zeros.

        The engine calls this method after invalid logits (NaN or infinite numbers). Logits are also invalid
        if rank 0 has missed another rank's data. In that case, this method fails the group of ranks instead.
        """
        if self.collectives.lost():
            raise self._lead.fail(missed(0))
        with self._lead.together(Scrub(pages.shape[0])):
            self.collectives.broadcast(pages.to(torch.int64, copy=True))

    def watched(self) -> AbstractContextManager[None]:
        """Fail the group if the `with` block does not finish in time (see `Lead.step`)."""
        return self._lead.step()

    # `GraphObserver`: the other ranks record, launch and drop their graphs with the same numbers.

    def recording(self, graph: int) -> None:
        self._lead.send(Record(graph))

    def recorded(self, graph: int) -> None:
        self._lead.send(GraphRecorded(graph))

    def replaying(self, graph: int) -> None:
        self._lead.send(Replay(graph))

    def dropped(self, graph: int) -> None:
        self._lead.send(Drop(graph))

    def forgotten(self) -> None:
        self._lead.send(Forget())

    @contextmanager
    def _together_on(self, hidden: torch.Tensor, best_only: bool) -> Iterator[None]:
        """Make the other ranks compute the logits of these rows.

        If the rows are exactly those of the last forward pass, every rank has them already. Otherwise,
        broadcast the rows.
        """
        known = self._last is not None and hidden is self._last[0]
        with self._lead.together(Logits(0 if known else hidden.shape[0], int(best_only))):
            if not known:
                self.collectives.broadcast(hidden.contiguous())
            yield


class SpreadPool(KVPool):
    """Rank 0's part of a pool whose planes are on all ranks. `compact` and `scrub` run on all ranks."""

    _decoder: LeadDecoder

    def lead_by(self, decoder: LeadDecoder) -> None:
        """Set the decoder that forwards the pool's operations to the other ranks."""
        self._decoder = decoder

    def compact(
        self,
        page_table: torch.Tensor,
        cached_lens: torch.Tensor,
        path: torch.Tensor,
        num_accepted: torch.Tensor,
        table_rows: torch.Tensor | None = None,
    ) -> None:
        """Move the accepted rows on all ranks."""
        self._decoder.spread_compact(page_table, cached_lens, path, num_accepted, table_rows)
        super().compact(page_table, cached_lens, path, num_accepted, table_rows)

    def scrub(self, pages: torch.Tensor) -> None:
        """Zero the pages on all ranks."""
        self._decoder.spread_scrub(pages)
        super().scrub(pages)


def graph_observer(decoder: Decoder) -> LeadDecoder | None:
    """Return the observer to notify of CUDA graphs that contain this decoder's calls, or None."""
    return decoder if isinstance(decoder, LeadDecoder) else None
