"""One verify pass over packed rows, from trees and slots to accepted tokens, computed on the device.

If no output is constrained, the pass does not need the host. It can then be recorded as one CUDA graph. If
some outputs are constrained, the pass is recorded as two graphs. While the first graph runs, the host finds
the tokens that the constraints allow. On a CPU, the same code runs without graphs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from outrider.kernels.logit_rules import RuleRows, locate_rules, record_outputs
from outrider.kernels.packed_round import PackedTrees, PlacedEntries, accept_entries, place_entries
from outrider.kernels.token_logprobs import token_logprobs
from outrider.kernels.verify import SamplingTensors
from outrider.services.target.model.packed_batch import PackedBatch, SamplingMode
from outrider.services.target.model.slot_table import SlotTable
from outrider.services.target.model.synthetic_acceptance import SyntheticAcceptance
from outrider.shared.attn.base import AttentionBackend, AttentionBatch
from outrider.shared.engine.recorded_graph import until_next_run
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import Decoder, DecoderOutput
from outrider.shared.nn.feature_projector import FeatureProjector
from outrider.shared.nn.layers.routes import recording_routes


@dataclass(frozen=True, slots=True)
class StepModel:
    """The model and memory that a pass runs with. `projector` is None if no feature rows are wanted."""

    decoder: Decoder
    pool: KVPool
    attention: AttentionBackend
    projector: FeatureProjector | None
    synthetic: SyntheticAcceptance | None


@dataclass(frozen=True, slots=True)
class PassSize:
    """The properties of a verify pass that the host chooses. Passes with equal properties share a CUDA graph.

    Attributes:
        rows: M, the number of packed rows, including padding.
        width: Class of the entry with the most nodes; see `packed_batch.width_class`.
        mode: Sampling mode.
        capture: True if feature rows are computed and stored.
        masked: True if the outputs of some entries are constrained. The pass then pauses before the choice of
            tokens, until the host has found the allowed tokens. The sampling mode is `FULL`.
    """

    rows: int
    width: int
    mode: SamplingMode
    capture: bool
    masked: bool = False


@dataclass(frozen=True, slots=True)
class PassResult:
    """The result of a verify pass over M packed rows, for the host.

    B is the number of entries, without entries that are always padding. R is the largest number of tokens
    that a round may choose for an entry.

    Attributes:
        packed: ``[B, 2 + 2 R] int32``: the number of accepted nodes (-1 for an idle slot), the number of
            nodes, the indices of the accepted nodes, and the emitted tokens.
        logprobs: ``[M, token_logprobs.WORDS] int32``. Row ``starts[e] + c`` belongs to the token at column c
            of entry e. None unless the sampling mode is `FULL`.
        hidden: ``[M, hidden_size]``, the model's output for the packed rows.
        logits: ``[M, V]``, V logits per packed row. None unless the sampling mode is `FULL`.
        rows: ``[M] int64``. Element ``starts[e] + c`` is the packed row from which the token at column c of
            entry e was chosen. None unless the sampling mode is `FULL`.
        routes: The experts that the routers of the sparse layers have chosen, one tensor ``[M, top_k] int64``
            per layer. Empty unless the sampling mode is `FULL`.
    """

    packed: torch.Tensor
    logprobs: torch.Tensor | None
    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    routes: Seq[torch.Tensor] = ()

    def until_next_run(self) -> PassResult:
        """Return the result for a graph cache, which keeps no memory for it."""

        def kept(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else until_next_run(tensor)

        return PassResult(
            until_next_run(self.packed),
            kept(self.logprobs),
            until_next_run(self.hidden),
            kept(self.logits),
            kept(self.rows),
            [until_next_run(route) for route in self.routes],
        )


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The result of a round's forward pass, from which the round's tokens are chosen.

    Attributes:
        placed: The entries of the round, and the places of their packed rows.
        output: Hidden states after the final norm, and the captured hidden states of other layers.
        sampling: Sampling parameters of the packed rows.
        logits: ``[M, V]`` in the data type of the weights. None unless the sampling mode is `FULL`.
        routes: As in `PassResult`.
    """

    placed: PlacedEntries
    output: DecoderOutput
    sampling: SamplingTensors
    logits: torch.Tensor | None
    routes: Seq[torch.Tensor]


def verify_pass(model: StepModel, table: SlotTable, batch: PackedBatch, size: PassSize) -> PassResult:
    """Verify the trees of a round, compact the accepted K/V, store feature rows, and update the slots.

    Args:
        model: The target model, and the memory that the pass uses.
        table: The slots.
        batch: Entries and drafted trees of the round.
        size: Sizes and options of the pass.

    Returns:
        The result for the host.
    """
    return choose_pass(model, table, batch, size, forward_pass(model, table, batch, size))


def forward_pass(
    model: StepModel,
    table: SlotTable,
    batch: PackedBatch,
    size: PassSize,
    layers: Seq[int] | None = None,
) -> ForwardResult:
    """Run the first half of `verify_pass`, which does not depend on the tokens that forms allow.

    Args:
        model, table, batch, size: As in `verify_pass`.
        layers: Layers whose hidden states are captured. By default, these are the layers from which feature
            rows are computed.
    """
    # 1. Locate the rows.
    entries, trees, pool = batch.entries(size.rows), batch.trees(size.rows), model.pool
    state, page_table = table.state, table.page_table
    placed = place_entries(state, entries, trees, page_table, pool.page_size, table.sampling)
    attention_batch = AttentionBatch(
        page_table=page_table,
        prefix_lens=placed.cached_lens,
        kv_lens=placed.kv_lens,
        query_start=entries.starts,
        ancestors=None if size.width == 1 else trees.ancestors,
        slots=placed.kv_slots,
        max_query_len=size.width,
        max_kv_len=page_table.shape[1] * pool.page_size,
        table_rows=placed.table_rows,
        ragged=True,
    )

    # 2. Forward.
    if layers is None:
        layers = model.projector.spec.aux_layer_ids if size.capture and model.projector else ()
    model.attention.plan(attention_batch)
    with recording_routes(size.mode is SamplingMode.FULL) as routes:
        output = model.decoder.forward(trees.tokens, placed.positions, model.attention, pool, tuple(layers))
    sampling, logits = _sampling(placed.sampling, size.mode), None
    if size.mode is SamplingMode.FULL:
        sampling = replace(sampling, rules=_rules(table, entries.starts, trees, placed))
        logits = model.decoder.logits(output.hidden)
    return ForwardResult(placed, output, sampling, logits, routes)


def choose_pass(
    model: StepModel,
    table: SlotTable,
    batch: PackedBatch,
    size: PassSize,
    forward: ForwardResult,
    allowed: torch.Tensor | None = None,
) -> PassResult:
    """Run the second half of `verify_pass`, from the logits on: choose tokens and update the slots.

    Args:
        model, table, batch, size: As in `verify_pass`.
        forward: The result of the first half.
        allowed: Masks of the tokens that may be chosen after each row, ``[M, ceil(V / 32)] int32``
            (`kernels/token_masks`). None allows all tokens. Masks require the sampling mode `FULL`.
    """
    entries, trees, pool = batch.entries(size.rows), batch.trees(size.rows), model.pool
    state, page_table = table.state, table.page_table
    placed, logits = forward.placed, forward.logits

    # 3. Sample a token after every row.
    if logits is not None:
        sampling = replace(forward.sampling, allowed=allowed)
        chosen = model.decoder.choose_from(logits, sampling, placed.next_positions)
    else:
        chosen = model.decoder.choose(forward.output.hidden, forward.sampling, placed.next_positions)
    if size.width > 1 and model.synthetic is not None:
        chosen = model.synthetic.packed(
            chosen, trees, entries.starts, placed.next_positions, placed.sampling.seeds
        )

    # 4. Accept: walk the trees, then move the K/V of the accepted nodes to their final KV slots.
    results = batch.results(size.rows)
    accepted = accept_entries(state, entries, trees, placed, chosen, page_table, pool.page_size, results)
    if size.width > 1:
        pool.compact(
            page_table,
            placed.cached_lens,
            accepted.path,
            accepted.num_accepted,
            placed.table_rows,
        )

    # 5. Count the chosen tokens for the rules of later rounds, and compute the logprobs that clients want.
    logprobs = rows = None
    if logits is not None:
        outputs = record_outputs(
            table.rules.state,
            entries.starts,
            placed.table_rows,
            placed.cached_lens,
            accepted.packed,
            size.rows,
        )
        rows = outputs.rows
        logprobs = token_logprobs(logits, rows, chosen[rows], outputs.tops)

    # 6. Compute and store the feature rows of the accepted nodes.
    projector = model.projector if size.capture else None
    if projector is not None:
        picked = _picked(forward.output, accepted.feature_rows, projector.spec.final_hidden)
        pool.scatter_features(
            projector.parts(picked), accepted.feature_slots, accepted.feature_places, table.features
        )
    return PassResult(accepted.packed, logprobs, forward.output.hidden, logits, rows, forward.routes)


def _sampling(rows: SamplingTensors, mode: SamplingMode) -> SamplingTensors:
    filters = mode in (SamplingMode.FILTERED, SamplingMode.FULL)
    return replace(rows, all_greedy=mode is SamplingMode.GREEDY, any_filter=filters)


def _rules(table: SlotTable, starts: torch.Tensor, trees: PackedTrees, placed: PlacedEntries) -> RuleRows:
    return locate_rules(
        table.rules.state,
        starts,
        placed.table_rows,
        placed.cached_lens,
        trees.tokens,
        trees.parents,
        trees.depths,
        trees.num_nodes,
        table.columns,
    )


def _picked(output: DecoderOutput, rows: torch.Tensor, final_hidden: bool) -> DecoderOutput:
    """Return only those output rows from which features are computed."""
    if final_hidden or output.aux is None:
        return DecoderOutput(output.hidden[rows], None)
    return DecoderOutput(output.hidden[:0], output.aux[rows])
