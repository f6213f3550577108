"""Runs the target model: prefills prompt chunks, verifies trees, samples tokens, stores K/V and feature rows.

The engine passes and receives only token ids, lengths, trees and feature rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from outrider.kernels.verify import verify_tree
from outrider.services.target.model.bucketed_verify import BucketedVerify
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.input_batch import SamplingMode
from outrider.services.target.model.outcome import FAILED_TOKEN, Outcome
from outrider.services.target.model.prefill_graph import PrefillGraph
from outrider.services.target.model.sampling import SamplingBatches
from outrider.services.target.model.synthetic_acceptance import SyntheticAcceptance
from outrider.services.target.model.verify_step import StepModel
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.attn.base import AttentionBackend, AttentionBatch, build_batch
from outrider.shared.engine.buckets import Buckets
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.pool import KVPool
from outrider.shared.kv.upload import upload
from outrider.shared.nn.decoder import Decoder, DecoderOutput
from outrider.shared.nn.feature_projector import FeatureProjector
from outrider.shared.spec.drafter import FeatureSpec
from outrider.shared.spec.seeds import signed_seed
from outrider.shared.spec.tree import DraftBatch


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """Chosen tokens that are being copied to the host.

    `wait` waits for the copy only, not for work that was enqueued after the copy.
    """

    _tokens: torch.Tensor
    _copied: torch.cuda.Event | None

    @classmethod
    def of(cls, chosen: torch.Tensor) -> ChosenTokens:
        """Enqueue the copy of ``chosen [n] int64`` to the host."""
        if not chosen.is_cuda:
            return cls(chosen, None)
        host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
        host.copy_(chosen, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return cls(host, copied)

    def wait(self) -> list[int]:
        """Wait for the copy and return the tokens."""
        if self._copied is not None:
            self._copied.synchronize()
        return [int(token) for token in self._tokens.tolist()]


class ModelRunner:
    """Runs the decoder on the KV pool. Engine thread only, under inference mode.

    Args:
        decoder: The model.
        pool: Stores K/V and feature rows.
        attention: Computes attention.
        synthetic: Replaces the model's choice of how many drafts a round accepts. Only benchmarks with random
            weights pass this argument.
        graphs: Records and replays passes. By default, nothing is recorded.
        buckets: Sizes to which `verify` pads batches, so that their passes can be recorded. None disables
            padding.
        max_depth: Depth of the deepest tree that a request may ask for.
        prefill_sizes: Numbers of rows, ascending, of the passes over short prompts that may be recorded. By
            default, no such pass is recorded.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        attention: AttentionBackend,
        *,
        synthetic: SyntheticAcceptance | None = None,
        graphs: GraphCache | None = None,
        buckets: Buckets | None = None,
        max_depth: int = 16,
        prefill_sizes: Seq[int] = (),
    ) -> None:
        self.decoder = decoder
        self._synthetic = synthetic
        self.pool = pool
        self.attention = attention
        self.device = pool.device
        self.graphs = graphs or GraphCache(pool.device, enabled=False)
        self._bucketed = (
            None if buckets is None else BucketedVerify(self.step_model, self.graphs, buckets, max_depth)
        )
        self._recorded = PrefillGraph(self.step_model, self.graphs, prefill_sizes)
        self._sampling = SamplingBatches(pool.device)
        self._projector: FeatureProjector | None = None
        self._aux_layer_ids: tuple[int, ...] = ()

    @property
    def captures(self) -> bool:
        """True if feature rows are computed and stored for sequences that want them."""
        return self._projector is not None

    def set_feature_spec(self, spec: FeatureSpec | None) -> None:
        """Start, change or stop capturing features. The caller must discard rows that were stored before.

        Raises:
            CheckpointError: The spec does not fit this model. No features are captured then.
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
        """Return the model and memory for `verify_step`. `capture` also computes feature rows."""
        return StepModel(
            self.decoder, self.pool, self.attention, self._projector if capture else None, self._synthetic
        )

    def prefill(self, chunks: Seq[PrefillChunk]) -> list[int]:
        """Prefill prompt chunks like `begin_prefill`, and wait for their tokens."""
        return self.begin_prefill(chunks).wait()

    @torch.inference_mode()
    def begin_prefill(self, chunks: Seq[PrefillChunk]) -> ChosenTokens:
        """Enqueue prompt chunks in one pass without waiting for rounds in flight.

        Attention is causal within each chunk. The pass stores K/V, and feature rows for sequences that want
        them.

        Returns:
            The token at index committed_len for each chunk that completes its prompt, in order.
        """
        return ChosenTokens.of(self._prefilled(chunks))

    def _prefilled(self, chunks: Seq[PrefillChunk]) -> torch.Tensor:
        """Enqueue the pass of `begin_prefill` and return its tokens on the device, ``[n] int64``."""
        if self._recorded.takes(chunks):
            token = self._recorded.run(chunks[0], self.captures and chunks[0].sequence.wants_drafts)
            return token if chunks[0].is_last else token[:0]
        sequences = [chunk.sequence for chunk in chunks]
        starts = [chunk.start for chunk in chunks]
        counts = [chunk.stop - chunk.start for chunk in chunks]
        token_ids = [token for chunk in chunks for token in chunk.sequence.tokens[chunk.start : chunk.stop]]
        positions = [index for chunk in chunks for index in range(chunk.start, chunk.stop)]
        capture = self.captures and any(sequence.wants_drafts for sequence in sequences)
        batch = build_batch(self.pool, _leases(sequences), starts, counts)
        output = self._forward(self._int64(token_ids), self._int64(positions), batch, capture)
        if capture:
            self._store_prefill_features(output, chunks, batch.slots)
        last = [chunk.is_last for chunk in chunks]
        if not any(last):
            return self._int64([])
        ends = [end for end, keep in zip(_ends(counts), last, strict=True) if keep]
        finished = [chunk.sequence for chunk in chunks if chunk.is_last]
        hidden = output.hidden[self._int64([end - 1 for end in ends])]
        sampling = self._sampling.rows(finished, [1] * len(finished))
        return self.decoder.choose(
            hidden, sampling, self._int64([sequence.committed_len for sequence in finished])
        )

    @torch.inference_mode()
    def verify(
        self, sequences: Seq[Sequence], drafts: DraftBatch
    ) -> tuple[list[Outcome], list[torch.Tensor | None]]:
        """Verify one tree per sequence in one pass. For a single-node tree, this is a plain decoding step.

        Afterwards, the K/V of the root and the k accepted nodes is stored at token indices ``[cached_len,
        cached_len + k + 1)``. If the sequence wants feature rows, these are stored at the same indices.

        Returns:
            The outcome of each sequence, and the sequence's new feature rows ``[k + 1, feature_size]`` or
            None.
        """
        width = drafts.tokens.shape[1]
        counts = [1] * len(sequences) if width == 1 else drafts.num_nodes.tolist()
        capture = self.captures and any(sequence.has_features for sequence in sequences)
        if self._bucketed is not None and self._bucketed.fits(counts):
            return self._verify_bucketed(self._bucketed, sequences, drafts, capture)
        drafts = _moved(drafts, self.device)
        starts = [sequence.cached_len for sequence in sequences]
        rows = None if min(counts) == width else self._valid_rows(counts, width)
        roots = self._int64([sequence.committed_len - 1 for sequence in sequences])
        tokens = _select(drafts.tokens.view(-1), rows).long()
        positions = _select((roots[:, None] + drafts.depths).view(-1), rows)
        ancestors = (
            None if width == 1 else _select(drafts.ancestors.view(-1, drafts.ancestors.shape[2]), rows)
        )
        attention_batch = build_batch(self.pool, _leases(sequences), starts, counts, ancestors=ancestors)
        output = self._forward(tokens, positions, attention_batch, capture)
        chosen = self.decoder.choose(output.hidden, self._sampling.rows(sequences, counts), positions + 1)
        if width == 1:
            outcomes = [Outcome(1, [], [token]) for token in chosen.tolist()]
        else:
            outcomes = self._walk(sequences, drafts, counts, chosen, rows, attention_batch)
        if not capture:
            return outcomes, [None] * len(sequences)
        return outcomes, self._store_round_features(output, sequences, outcomes, counts)

    @torch.inference_mode()
    def capture_verify(self, bs: int, nodes: int, mode: SamplingMode) -> None:
        """Record the verify pass of one size before the first request."""
        if self._bucketed is not None:
            self._bucketed.capture(bs, nodes, mode, self.captures)

    @torch.inference_mode()
    def capture_prefill(self, size: int) -> None:
        """Record the pass over prompts of up to `size` tokens before the first request."""
        self._recorded.capture(size)

    @torch.inference_mode()
    def read_features(self, sequence: Sequence, start: int, stop: int) -> torch.Tensor:
        """Return a copy of the feature rows at token indices ``[start, stop)``: ``[stop - start, size]``."""
        assert sequence.lease is not None
        return self.pool.read_features(sequence.lease, start, stop)

    @torch.inference_mode()
    def scrub(self, sequence: Sequence) -> None:
        """Zero the pages of a sequence with NaN or infinity, so that their next owner cannot read them."""
        if sequence.lease is not None:
            self.pool.scrub(self._int64(sequence.lease.pages))

    def _verify_bucketed(
        self, bucketed: BucketedVerify, sequences: Seq[Sequence], drafts: DraftBatch, capture: bool
    ) -> tuple[list[Outcome], list[torch.Tensor | None]]:
        outcomes, features = bucketed.verify(sequences, drafts, capture)
        if features is None:
            return outcomes, [None] * len(sequences)
        return outcomes, [
            features[index, : len(outcome.emitted)] if sequence.has_features else None
            for index, (sequence, outcome) in enumerate(zip(sequences, outcomes, strict=True))
        ]

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, capture: bool
    ) -> DecoderOutput:
        self.attention.plan(batch)
        return self.decoder.forward(
            tokens, positions, self.attention, self.pool, self._aux_layer_ids if capture else ()
        )

    def _walk(
        self,
        sequences: Seq[Sequence],
        drafts: DraftBatch,
        counts: Seq[int],
        chosen: torch.Tensor,
        rows: torch.Tensor | None,
        batch: AttentionBatch,
    ) -> list[Outcome]:
        bs, width = drafts.tokens.shape
        if rows is not None:
            padded = torch.full((bs * width,), FAILED_TOKEN, dtype=chosen.dtype, device=self.device)
            chosen = padded.index_copy_(0, rows, chosen)
        chosen = chosen.view(bs, width)
        if self._synthetic is not None:
            seeds = self._int64([signed_seed(sequence.request.sampling.seed) for sequence in sequences])
            chosen = self._synthetic(
                chosen, drafts, self._int64([sequence.committed_len for sequence in sequences]), seeds
            )
        verified = verify_tree(drafts.tokens, drafts.parents, drafts.num_nodes, chosen)
        outcomes = []
        host = torch.cat((verified.num_accepted[:, None], verified.path, verified.emitted), dim=1).tolist()
        moved = False
        for count, row in zip(counts, host, strict=True):
            accepted = row[2 : 2 + row[0]]
            moved = moved or any(node != index for index, node in enumerate(accepted, 1))
            outcomes.append(Outcome(count, accepted, row[1 + width : 2 + width + row[0]]))
        if moved:  # The K/V of a path of first children is already in its final slots.
            self.pool.compact(batch.page_table, batch.prefix_lens, verified.path, verified.num_accepted)
        return outcomes

    def _store_prefill_features(
        self, output: DecoderOutput, chunks: Seq[PrefillChunk], slots: torch.Tensor
    ) -> None:
        assert self._projector is not None
        if not all(chunk.sequence.wants_drafts for chunk in chunks):
            wanted = [chunk.sequence.wants_drafts for chunk in chunks for _ in range(chunk.start, chunk.stop)]
            rows = self._int64([row for row, wants in enumerate(wanted) if wants])
            output, slots = _output_rows(output, rows), slots[rows]
        self.pool.store_features(self._projector(output), slots)

    def _store_round_features(
        self, output: DecoderOutput, sequences: Seq[Sequence], outcomes: Seq[Outcome], counts: Seq[int]
    ) -> list[torch.Tensor | None]:
        assert self._projector is not None
        rows: list[int] = []
        slots: list[int] = []
        for sequence, outcome, count, end in zip(sequences, outcomes, counts, _ends(counts), strict=True):
            if sequence.has_features:
                first = end - count
                rows.append(first)
                rows.extend([first + node for node in outcome.accepted])
                slots.extend(
                    self._token_slots(
                        sequence, sequence.cached_len, sequence.cached_len + len(outcome.emitted)
                    )
                )
        projected = self._projector(_output_rows(output, self._int64(rows)))
        self.pool.store_features(projected, self._int64(slots))
        features: list[torch.Tensor | None] = []
        taken = 0
        for sequence, outcome in zip(sequences, outcomes, strict=True):
            if sequence.has_features:
                features.append(projected[taken : taken + len(outcome.emitted)])
                taken += len(outcome.emitted)
            else:
                features.append(None)
        return features

    def _token_slots(self, sequence: Sequence, start: int, stop: int) -> list[int]:
        assert sequence.lease is not None
        return self.pool.token_slots(sequence.lease, start, stop)

    def _valid_rows(self, counts: Seq[int], width: int) -> torch.Tensor:
        return self._int64(
            [index * width + node for index, count in enumerate(counts) for node in range(count)]
        )

    def _int64(self, values: Seq[int]) -> torch.Tensor:
        return upload(values, torch.int64, self.device)


def _output_rows(output: DecoderOutput, rows: torch.Tensor) -> DecoderOutput:
    return DecoderOutput(output.hidden[rows], None if output.aux is None else output.aux[rows])


def _moved(drafts: DraftBatch, device: torch.device) -> DraftBatch:
    if drafts.tokens.device.type == device.type:
        return drafts
    tokens, parents, depths, num_nodes, ancestors = (
        part.to(device)
        for part in (drafts.tokens, drafts.parents, drafts.depths, drafts.num_nodes, drafts.ancestors)
    )
    return replace(
        drafts, tokens=tokens, parents=parents, depths=depths, num_nodes=num_nodes, ancestors=ancestors
    )


def _leases(sequences: Seq[Sequence]) -> list[PageLease]:
    return [sequence.lease for sequence in sequences if sequence.lease is not None]


def _select(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)


def _ends(counts: Seq[int]) -> list[int]:
    ends: list[int] = []
    total = 0
    for count in counts:
        total += count
        ends.append(total)
    return ends
