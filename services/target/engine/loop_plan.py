"""Configures the decode loop: how far it runs ahead of the host, and the sizes of its buffers."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.step_runner import StepRunner

MAX_PACKED_ROWS = 2048


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """Configures the decode loop of one engine.

    Attributes:
        lookahead: Number of rounds that may be in flight when the host launches the next round: 0 or 1.
        drafts_on_device: True to draft on the target's device if the drafter can.
        max_depth: Depth of the deepest tree that a request may use.
        max_nodes: Largest number of nodes of a tree.
        max_packed_rows: Largest number of packed rows of a round, i.e. of nodes of all its trees together.
        prefill_budget_s: Seconds that the prompt chunks of one engine step may take while other sequences
            decode.
        recorded_entries: Largest number of sequences of a round that may be recorded as CUDA graphs. None
            sets no limit.
    """

    lookahead: int = 0
    drafts_on_device: bool = False
    max_depth: int = 16
    max_nodes: int = 128
    max_packed_rows: int = MAX_PACKED_ROWS
    prefill_budget_s: float = 0.02
    recorded_entries: int | None = None

    def make_step_runner(self, runner: ModelRunner, slots: int, max_model_len: int) -> StepRunner:
        """Make the object that enqueues and reads an engine's rounds (`StepRunner`).

        Args:
            runner: The target's model and its KV pool.
            slots: Largest number of sequences of a round.
            max_model_len: Largest number of tokens of a sequence.
        """
        pool = runner.pool
        return StepRunner(
            runner,
            slots=slots,
            columns=self.max_depth + 1,
            max_nodes=self.max_nodes,
            max_rows=max(slots, min(self.max_packed_rows, slots * self.max_nodes)),
            pages=min(pool.num_pages, pool.pages_for(max_model_len + self.max_nodes)),
            recorded_entries=self.recorded_entries,
        )
