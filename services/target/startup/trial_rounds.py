"""Runs the passes that the parity check compares: prompt chunks of any size, and verify passes of rounds.

The verify passes use the engine's own slots, packed rows and forward pass (`model/verify_pass`), so the check
plans and computes attention exactly as rounds of requests do. Only the choice of tokens is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from itertools import count

import torch

from outrider.services.target.drafting.shape_groups import pack_drafts
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.outcome import FAILED_TOKEN
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.model.step_runner import StepRunner
from outrider.services.target.model.verify_pass import forward_pass
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence
from outrider.services.target.startup.rounding_bounds import Stages
from outrider.services.target.startup.trial_sequences import release, trial_sequence
from outrider.shared.attn.base import build_batch
from outrider.shared.base.errors import UnavailableError
from outrider.shared.engine.buckets import padded_size
from outrider.shared.kv.upload import upload
from outrider.shared.nn.decoder import DecoderOutput
from outrider.shared.spec.tree import NO_DRAFT, DraftBatch, DraftShape
from outrider.shared.spec.trees import HostTree, pad_trees


class TrialRounds:
    """Passes over trial sequences of one engine. Call only while no request is live, under inference mode.

    Args:
        runner: The model and its memory.
        step_runner: The slots and packed rows of the engine.
    """

    def __init__(self, runner: ModelRunner, step_runner: StepRunner) -> None:
        self._runner = runner
        self._step_runner = step_runner
        self._residences = count(1)

    @contextmanager
    def prefilled(self, prompt: int, length: int, slot: int) -> Iterator[Sequence]:
        """Prefill a prompt and give it a slot. Zero its pages afterwards, to reveal later reads of stale K/V.

        Args:
            prompt: Number of the prompt, which selects its tokens.
            length: Number of tokens of the prompt.
            slot: The slot.
        """
        sequence = trial_sequence(self._runner, prompt, length)
        try:
            if FAILED_TOKEN in self._runner.prefill([PrefillChunk(sequence, 0, length)]):
                raise damaged()
            # The slot table writes the pages of a slot again only for another residence.
            sequence.slot, sequence.residence = slot, next(self._residences)
            yield sequence
            self._step_runner.table.state.counts[slot] = 0
            self._runner.scrub(sequence)
        finally:
            release(sequence)

    def chunk(self, sequence: Sequence, start: int, tokens: Seq[int]) -> Stages:
        """Run tokens as a causal chunk of a prompt that starts at token index `start`. Return all rows."""
        runner, device = self._runner, self._runner.device
        assert sequence.lease is not None
        runner.attention.plan(build_batch(runner.pool, [sequence.lease], [start], [len(tokens)]))
        output = runner.decoder.forward(
            upload(tokens, torch.int64, device),
            upload(range(start, start + len(tokens)), torch.int64, device),
            runner.attention,
            runner.pool,
            range(runner.decoder.config.num_layers),
        )
        return self._stages(output, list(range(len(tokens))))

    def round(self, members: Seq[tuple[Sequence, HostTree]]) -> Stages:
        """Run the forward pass of a round that verifies one tree per sequence. Return the rows of all nodes.

        Args:
            members: Sequences with slots, and their trees. A tree of one node is plain decoding. The tokens
                of a sequence are those before the root.
        """
        step_runner = self._step_runner
        table, batch = step_runner.table, step_runner.batch
        entries = [
            Entry(sequence, sequence.residence, _shape_of(tree), sequence.epoch) for sequence, tree in members
        ]
        # 1. Write the state that earlier rounds would have left.
        for sequence, _ in members:
            table.hold(sequence)
        table.flush()
        roots = upload([tree.tokens[0] for _, tree in members], torch.int64, self._runner.device)
        table.seat([sequence for sequence, _ in members], roots)
        # 2. Pack the trees, and run the pass.
        size = step_runner.size_of(entries)
        batch.load(entries, size.rows)
        for index, (_, tree) in enumerate(members):
            if len(tree.tokens) > 1:
                drafts = _aligned(pad_trees([tree], self._runner.device))
                pack_drafts(step_runner, drafts, upload([index], torch.int32, self._runner.device))
        layers = range(self._runner.decoder.config.num_layers)
        forward = forward_pass(self._runner.step_model(False), table, batch, size, layers)
        return self._stages(forward.output, list(range(sum(entry.rows for entry in entries))))

    def padded_rows(self, rows: int) -> int:
        """Return the number of rows of the pass of a round with `rows` nodes, including padding."""
        return padded_size(self._step_runner.buckets, rows)

    def _stages(self, output: DecoderOutput, rows: list[int]) -> Stages:
        """Return copies of some rows of the results of a pass."""
        decoder = self._runner.decoder
        logits = decoder.logits(output.hidden)[rows].float()
        if not bool(logits.isfinite().all()):
            raise damaged()
        assert output.aux is not None
        layers = output.aux[rows].float()
        return Stages(layers.view(len(rows), decoder.config.num_layers, -1), logits)


def damaged() -> UnavailableError:
    """Return the error for a model whose logits are invalid."""
    return UnavailableError(
        "The model's logits are NaN or infinite: the checkpoint is damaged.", reason="nan_logits"
    )


def _shape_of(tree: HostTree) -> DraftShape:
    nodes = len(tree.tokens)
    if nodes == 1:
        return NO_DRAFT
    return DraftShape(max(tree.depths), max(tree.parents.count(one) for one in range(nodes)), nodes)


def _aligned(drafts: DraftBatch) -> DraftBatch:
    """Copy the tensors. For a tensor at an unaligned address, Triton would compile another kernel."""
    assert drafts.logprobs is not None, "`pad_trees` sets them"
    return DraftBatch(
        drafts.tokens.clone(),
        drafts.parents.clone(),
        drafts.depths.clone(),
        drafts.num_nodes.clone(),
        drafts.ancestors.clone(),
        drafts.logprobs.clone(),
    )
