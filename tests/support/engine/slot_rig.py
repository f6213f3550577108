"""A small model with sequences in its slots, whose packed rounds a test launches and reads one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.kernels.packed_round import pack_trees
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.model.rounds import Round
from outrider.services.target.model.step_runner import StepRunner
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.attn.create import create_backend
from outrider.shared.base.logit_rules import NO_LOGPROBS, LogprobParams
from outrider.shared.base.token_states import NO_STATES, StateParams
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import FeatureSpec
from outrider.shared.spec.tree import NO_DRAFT, DraftShape
from support.engine.slot_sequences import TREE, seated_sequence
from support.engine.target_harness import trees_to_batch
from support.suite.compute_device import DEVICE

PROMPTS = [[5, 9, 2, 33, 7], [4, 4, 1], [8, 60, 3, 2, 1, 17, 6]]


class SlotRig:
    """A model with three slots, and one sequence of `PROMPTS` in each slot, in reverse order.

    Args:
        decoder: The model.
        graphs: Records the passes. By default, nothing is recorded.
        recorded_entries: Largest number of entries of a round that is recorded.
        features: Whether feature rows are stored.
        trace: Whether the clients want traces.
        states: The states of tokens that the first client wants.
        logprobs: The logprobs that the first client wants.
    """

    def __init__(
        self,
        decoder: Decoder,
        graphs: GraphCache | None = None,
        recorded_entries: int | None = None,
        *,
        features: bool = False,
        trace: bool = False,
        states: StateParams = NO_STATES,
        logprobs: LogprobParams = NO_LOGPROBS,
    ) -> None:
        pool = decoder.make_pool(64, 4)
        self.runner = ModelRunner(decoder, pool, create_backend("auto", decoder.device), graphs=graphs)
        if features:
            size = 2 * decoder.config.hidden_size
            self.runner.set_feature_spec(
                FeatureSpec(aux_layer_ids=(0, 2), feature_size=size, fingerprint="raw")
            )
        self.step_runner = StepRunner(
            self.runner,
            slots=3,
            columns=TREE.depth + 1,
            max_nodes=8,
            max_rows=24,
            pages=16,
            recorded_entries=recorded_entries,
        )
        self.sequences = [
            seated_sequence(
                pool,
                index,
                2 - index,
                prompt=prompt,
                room=24,
                trace=trace,
                states=NO_STATES if index else states,
                logprobs=NO_LOGPROBS if index else logprobs,
            )
            for index, prompt in enumerate(PROMPTS)
        ]
        self.prefill()

    def prefill(self) -> None:
        chunks = [PrefillChunk(one, 0, one.committed_len) for one in self.sequences]
        chosen = self.runner.begin_prefill(chunks)
        for sequence in self.sequences:
            if self.runner.captures:
                sequence.feature_len = sequence.cached_len
            self.step_runner.table.hold(sequence)
        with torch.inference_mode():
            self.step_runner.table.seat(self.sequences, chosen.on_device)
        for sequence, token in zip(self.sequences, chosen.wait(), strict=True):
            sequence.tokens.append(token)

    def launch(
        self, *shapes: DraftShape, draft: Callable[[], None] | None = None, count: int | None = None
    ) -> Round:
        sequences = self.sequences[: count or len(self.sequences)]
        wanted = shapes or [NO_DRAFT] * len(sequences)
        entries = [Entry(one, one.residence, shape) for one, shape in zip(sequences, wanted, strict=True)]
        for sequence in sequences:
            self.step_runner.table.hold(sequence)
        return self.step_runner.launch(entries, draft)

    def read(self, launched: Round) -> list[Outcome | None]:
        """Read a round and append its tokens to the sequences."""
        outcomes = self.step_runner.read(launched).outcomes
        for entry, outcome in zip(launched.entries, outcomes, strict=True):
            if outcome is not None:
                entry.sequence.tokens.extend(outcome.emitted)
        return outcomes

    def drafting(self, index: int, nodes: list[tuple[int, int]]) -> Callable[[], None]:
        """Return a function that packs one tree for an entry."""
        batch = self.step_runner.batch
        trees = trees_to_batch([(self.sequences[index].tokens[-1], nodes)])
        logprobs = torch.tensor([[0.0] + [-0.5 * node for node in range(1, len(nodes) + 1)]])

        def draft() -> None:
            parts = (trees.tokens, trees.parents, trees.depths, trees.ancestors, trees.num_nodes, logprobs)
            pack_trees(
                *(part.to(DEVICE) for part in parts),
                torch.tensor([index], dtype=torch.int32, device=DEVICE),
                batch.entries(batch.rows),
                batch.trees(batch.rows),
            )

        return draft


def produced(sequence: Sequence) -> list[int]:
    return sequence.tokens[sequence.prompt_len :]
