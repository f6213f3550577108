"""Runs the target model over prompts: prefills chunks, samples first tokens, stores K/V and feature rows.

The engine exchanges only token ids, lengths, trees and feature rows with this module.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from outrider.kernels.token_logprobs import token_logprobs
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.prefill_graph import PrefillGraph, PromptRows, library_of
from outrider.services.target.model.sampling import SamplingBatches
from outrider.services.target.model.scores import ScoredPrompt, requested_logprobs, score_prompts
from outrider.services.target.model.slot_rules import SlotRules
from outrider.services.target.model.slot_table import SlotTable
from outrider.services.target.model.synthetic_acceptance import SyntheticAcceptance
from outrider.services.target.model.token_states import PromptStates, stacked, take_prompts, to_host
from outrider.services.target.model.verify_pass import StepModel
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.attn.base import AttentionBackend, AttentionBatch, build_batch
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.pool import KVPool
from outrider.shared.kv.upload import upload
from outrider.shared.nn.decoder import Decoder, DecoderOutput
from outrider.shared.nn.feature_projector import FeatureProjector
from outrider.shared.nn.layers.routes import recording_routes
from outrider.shared.spec.drafter import FeatureSpec

LIBRARY_ROWS = 1024
"""From this many rows on, a pass replays no graph of our attention kernel if a library's kernel is faster.

With this many rows, a large GPU needs as much time to run the kernels of a pass as the host needs to launch
them.
"""


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The chosen tokens and the logprobs of a forward pass, while they are copied to the host.

    `wait` waits for these copies only. It does not wait for work that was enqueued after them.

    Attributes:
        on_device: ``[n] int64``, the tokens on the device. Valid until the next recorded pass.
        logprobs: ``[n, WORDS] int32`` in host memory, the logprobs of the tokens, from `token_logprobs`. None
            if no client wants them. Valid after `wait`.
        prompts: Logprobs of prompt tokens in host memory, one item for each prompt chunk that has any, in
            order. Valid after `wait`.
        states: States of prompt tokens, for the prompt chunks whose clients want them. Valid after `wait`.
        requested: One item for each chosen token: the logprobs of the tokens that its client has named, ``[1,
            k] fp32``, or None. Valid after `wait`.
    """

    on_device: torch.Tensor
    logprobs: torch.Tensor | None
    prompts: Seq[ScoredPrompt]
    states: Seq[PromptStates]
    requested: Seq[torch.Tensor | None]
    _tokens: torch.Tensor
    _copied: torch.cuda.Event | None

    @classmethod
    def of(
        cls,
        chosen: torch.Tensor,
        logprobs: torch.Tensor | None = None,
        prompts: Seq[ScoredPrompt] = (),
        states: Seq[PromptStates] = (),
        requested: Seq[torch.Tensor | None] = (),
    ) -> ChosenTokens:
        """Enqueue the copies to the host. The copies of `states` and `requested` are enqueued already."""
        if not chosen.is_cuda:
            return cls(chosen, logprobs, prompts, states, requested, chosen, None)
        host = to_host(chosen)
        logprobs = None if logprobs is None else to_host(logprobs)
        prompts = [
            replace(
                one,
                logprobs=to_host(one.logprobs),
                requested=None if one.requested is None else to_host(one.requested),
            )
            for one in prompts
        ]
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return cls(chosen, logprobs, prompts, states, requested, host, copied)

    def wait(self) -> list[int]:
        """Wait for the copy and return the tokens."""
        if self._copied is not None:
            self._copied.synchronize()
        return [int(token) for token in self._tokens.tolist()]


class ModelRunner:
    """Runs the target model on the KV pool. Engine thread only, under inference mode.

    Args:
        decoder: The target model.
        pool: The KV pool, which stores K/V and feature rows.
        attention: Computes attention.
        synthetic: Decides how many drafts a round accepts, in place of the model. Only benchmarks with random
            weights pass this argument.
        graphs: Records and replays passes. By default, nothing is recorded.
        prefill_sizes: Numbers of rows, ascending, of the passes over prompts that may be recorded. Recording
            requires a call of `use_slots` first. By default, no such pass is recorded.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        attention: AttentionBackend,
        *,
        synthetic: SyntheticAcceptance | None = None,
        graphs: GraphCache | None = None,
        prefill_sizes: Seq[int] = (),
    ) -> None:
        self.decoder = decoder
        self._synthetic = synthetic
        self.pool = pool
        self.attention = attention
        self.device = pool.device
        self.graphs = graphs or GraphCache(pool.device, enabled=False)
        self._prefill_sizes = prefill_sizes
        self._recorded: PrefillGraph | None = None
        self._sampling = SamplingBatches(pool.device)
        self._projector: FeatureProjector | None = None
        self._aux_layer_ids: tuple[int, ...] = ()

    @property
    def captures(self) -> bool:
        """True if feature rows are computed and stored for sequences that want them."""
        return self._projector is not None

    def set_feature_spec(self, spec: FeatureSpec | None) -> None:
        """Start, change or stop the capture of the hidden states that a drafter needs.

        The caller must discard all feature rows that were stored before.

        Raises:
            CheckpointError: The drafter's feature spec does not fit this model. No features are captured
                then.
        """
        # The dropped graphs read the projector or the feature plane. Graphs of plain decoding do not, so they
        # stay.
        self.graphs.drop(
            [key for key in self.graphs.keys if isinstance(key, GraphKey) and key.draft_dependent]
        )
        self._projector = None
        self._aux_layer_ids = ()
        if spec is None or spec.feature_size == 0:
            return
        config = self.decoder.config
        self._projector = FeatureProjector(
            spec,
            self.device,
            self.decoder.dtype,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
        )
        self._aux_layer_ids = tuple(spec.aux_layer_ids)
        self.pool.resize_features(spec.feature_size)

    def step_model(self, capture: bool) -> StepModel:
        """Return the model and memory for `verify_pass`. With `capture`, the pass computes feature rows."""
        return StepModel(
            self.decoder, self.pool, self.attention, self._projector if capture else None, self._synthetic
        )

    def prefill(self, chunks: Seq[PrefillChunk]) -> list[int]:
        """Prefill prompt chunks like `begin_prefill`, and wait for their tokens."""
        return self.begin_prefill(chunks).wait()

    @torch.inference_mode()
    def begin_prefill(
        self,
        chunks: Seq[PrefillChunk],
        rules: SlotRules | None = None,
        allowed: torch.Tensor | None = None,
    ) -> ChosenTokens:
        """Enqueue prompt chunks in one forward pass, without waiting for rounds in flight.

        Attention is causal within each chunk. The pass stores K/V. It also stores feature rows for sequences
        that want them.

        Args:
            chunks: The prompt chunks, at most one per sequence.
            rules: The penalties, biases and forbidden tokens of all slots. The rules of all sequences whose
                prompts end with these chunks must have been written. None if no sequence has such rules.
            allowed: The tokens that may be chosen after each prompt that ends, as in `SamplingTensors`.

        Returns:
            The first token after each prompt that ends with these chunks, in order. Its index in the sequence
            is committed_len.
        """
        finished = [chunk.sequence for chunk in chunks if chunk.is_last]
        capture = self.captures and any(chunk.sequence.stores_features for chunk in chunks)
        wants_experts = any(one.sequence.request.states.routed_experts for one in chunks)
        if self._recorded is not None and self._replays(self._recorded, chunks):
            rows = self._recorded.run(chunks, capture)
        else:
            with recording_routes(wants_experts) as routes:
                output, ends = self._unrecorded(chunks, capture)
            rows = PromptRows(output.hidden[ends], output.hidden, routes)
        prompts = score_prompts(self.decoder, rows.hidden, chunks)
        experts = stacked(self.decoder, rows.routes) if wants_experts else None
        states = take_prompts(rows.hidden, experts, chunks)
        if not finished:
            return ChosenTokens.of(self._int64([]), None, prompts, states)
        return self._choose(rows.last, finished, rules, allowed, prompts, states)

    def _choose(
        self,
        hidden: torch.Tensor,
        finished: list[Sequence],
        rules: SlotRules | None,
        allowed: torch.Tensor | None,
        prompts: Seq[ScoredPrompt],
        states: Seq[PromptStates],
    ) -> ChosenTokens:
        """Choose the first token after each prompt, from ``hidden [n, hidden_size]``."""
        sampling = self._sampling.rows(finished, [1] * len(finished))
        positions = self._int64([sequence.committed_len for sequence in finished])
        if rules is None or not any(sequence.ruled for sequence in finished):
            return ChosenTokens.of(self.decoder.choose(hidden, sampling, positions), None, prompts, states)
        sampling = replace(sampling, all_greedy=False, rules=rules.prompt_rows(finished), allowed=allowed)
        logits = self.decoder.logits(hidden)
        chosen = self.decoder.choose_from(logits, sampling, positions)
        tops = [-1 if one.request.logprobs.top is None else one.request.logprobs.top for one in finished]
        wanted = upload(tops, torch.int32, self.device)
        rows = torch.arange(len(finished), device=self.device)
        logprobs = token_logprobs(logits, rows, chosen, wanted)
        named = [one.request.logprobs.token_ids for one in finished]
        requested = [
            to_host(requested_logprobs(logits[row : row + 1], ids)) if ids else None
            for row, ids in enumerate(named)
        ]
        return ChosenTokens.of(chosen, logprobs, prompts, states, requested)

    def _replays(self, recorded: PrefillGraph, chunks: Seq[PrefillChunk]) -> bool:
        """Return True if these chunks have a recorded pass and no unrecorded pass would be faster.

        A long pass takes longer on the device than its launch takes on the host. It therefore needs no graph,
        and uses a library's attention if this is faster than our kernel. Such a pass cannot be recorded,
        because the library's shapes depend on the chunks.
        """
        if recorded.takes_whole(chunks):
            return recorded.takes(chunks)
        rows = sum(chunk.stop - chunk.start for chunk in chunks)
        return recorded.takes(chunks) and (rows < LIBRARY_ROWS or not self._by_library(chunks))

    def _by_library(self, chunks: Seq[PrefillChunk]) -> bool:
        """Return True if an unrecorded pass would use a library's attention for some of these chunks."""
        library, kept = library_of(self.attention), self.decoder.cached
        return library is not None and library.takes(
            [(chunk.start, chunk.stop - chunk.start) for chunk in chunks], kept.num_heads * kept.head_dim
        )

    def _unrecorded(
        self, chunks: Seq[PrefillChunk], capture: bool
    ) -> tuple[DecoderOutput, torch.Tensor | slice]:
        """Enqueue one pass over chunks of any size.

        Returns:
            The output of all rows, one chunk after the other, and the index of the last rows of those chunks
            that complete their prompts.
        """
        starts = [chunk.start for chunk in chunks]
        counts = [chunk.stop - chunk.start for chunk in chunks]
        # The device waits for these arrays, and numpy makes them faster than Python.
        token_ids = np.concatenate(
            [np.array(chunk.sequence.tokens[chunk.start : chunk.stop], dtype=np.int64) for chunk in chunks]
        )
        positions = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
        batch = build_batch(self.pool, _leases([chunk.sequence for chunk in chunks]), starts, counts)
        output = self._forward(self._int64(token_ids), self._int64(positions), batch, capture)
        if capture:
            self._store_prefill_features(output, chunks, batch.slots)
        ends = [end - 1 for end, chunk in zip(accumulate(counts), chunks, strict=True) if chunk.is_last]
        return output, self._int64(ends) if ends else slice(0)

    def use_slots(self, table: SlotTable) -> None:
        """Enable recorded passes over prompts of sequences with slots. These passes read the page table."""
        self._recorded = PrefillGraph(self.step_model, self.graphs, self._prefill_sizes, table)

    def recorded_rows(self, most: int) -> int | None:
        """Return the largest recorded size of at most `most` rows, or None if there is none."""
        return None if self._recorded is None else self._recorded.largest(most)

    @torch.inference_mode()
    def capture_prefill(self, size: int, whole: bool = False) -> None:
        """Record a CUDA graph of the pass over prompt chunks of up to `size` tokens. Requires `use_slots`.

        Args:
            size: Number of rows.
            whole: True to record a pass over one whole prompt instead. This pass uses the attention of a
                library. If there is no such library, nothing is recorded.
        """
        assert self._recorded is not None, "there are no slots yet"
        if whole:
            self._recorded.capture_whole(size)
        else:
            self._recorded.capture(size)

    @torch.inference_mode()
    def read_features(self, sequence: Sequence, start: int, stop: int) -> torch.Tensor:
        """Return a copy of the feature rows at token indices ``[start, stop)``: ``[stop - start, size]``."""
        assert sequence.lease is not None
        return self.pool.read_features(sequence.lease, start, stop)

    @torch.inference_mode()
    def scrub(self, sequence: Sequence) -> None:
        """Zero the pages that only this sequence uses, because they may contain NaN or infinite values.

        Otherwise, later sequences that get these pages could read the values.
        """
        if sequence.lease is not None:
            self.pool.scrub(self._int64(sequence.lease.own_pages))

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, capture: bool
    ) -> DecoderOutput:
        self.attention.plan(batch)
        return self.decoder.forward(
            tokens, positions, self.attention, self.pool, self._aux_layer_ids if capture else ()
        )

    def _store_prefill_features(
        self, output: DecoderOutput, chunks: Seq[PrefillChunk], slots: torch.Tensor
    ) -> None:
        assert self._projector is not None
        if not all(chunk.sequence.stores_features for chunk in chunks):
            wanted = [one.sequence.stores_features for one in chunks for _ in range(one.start, one.stop)]
            rows = self._int64([row for row, wants in enumerate(wanted) if wants])
            output, slots = _output_rows(output, rows), slots[rows]
        self.pool.store_features(self._projector(output), slots)

    def _int64(self, values: Seq[int] | np.ndarray) -> torch.Tensor:
        return upload(values, torch.int64, self.device)


def _output_rows(output: DecoderOutput, rows: torch.Tensor) -> DecoderOutput:
    return DecoderOutput(output.hidden[rows], None if output.aux is None else output.aux[rows])


def _leases(sequences: Seq[Sequence]) -> list[PageLease]:
    return [sequence.lease for sequence in sequences if sequence.lease is not None]
