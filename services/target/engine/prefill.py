"""Enqueues prompt chunks between the rounds, and commits the first token after each prompt.

The last chunk of a prompt also chooses the first token after the prompt. The device writes this token into
the sequence's slot. The next round can therefore contain the sequence before the host has read the token:

    device    | round n | chunk of a prompt | round n + 1, with the new sequence
    host      enqueue the chunk and round n + 1 · read and deliver round n · read and deliver the first token
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.services.target.drafting.draft_source import DraftSource
from outrider.services.target.engine.committer import Committer
from outrider.services.target.model.model_runner import ChosenTokens, ModelRunner
from outrider.services.target.model.scores import ScoredPrompt, unpack_logprobs
from outrider.services.target.model.slot_rules import SlotRules
from outrider.services.target.model.slot_table import SlotTable
from outrider.services.target.model.token_states import PromptStates
from outrider.services.target.model.tree_forms import prompt_masks
from outrider.services.target.policy.prefill_budget import PrefillBudget
from outrider.services.target.scheduling.scheduler import PrefillChunk, Scheduler
from outrider.services.target.scheduling.sequence import Sequence, SequenceStatus
from outrider.shared.base.logit_rules import TokenLogprob

STATE_BYTES = 1 << 20
"""Largest size of a message with the states of several tokens."""


@dataclass(frozen=True, slots=True)
class PrefillPass:
    """A forward pass over prompt chunks that the host has enqueued and not read yet.

    Attributes:
        completed: The sequences whose prompts end with this pass, each with its `residence` (see `Sequence`).
        chosen: The first token after each of these prompts.
        tokens: Number of prompt tokens of the pass.
        longest: Largest context of a chunk, in tokens.
        enqueued_at: Time at which the pass was enqueued, from `time.monotonic()`.
    """

    completed: Seq[tuple[Sequence, int]]
    chosen: ChosenTokens
    tokens: int
    longest: int
    enqueued_at: float


class Prefill:
    """Enqueues and finishes the forward passes over prompt chunks. Engine thread only.

    Args:
        runner: Runs the forward passes.
        table: The slots.
        drafts: The draft source, which receives the features of prompts.
        committer: Commits and emits the first tokens.
        budget: Learns how long prompt tokens take.
    """

    def __init__(
        self,
        runner: ModelRunner,
        table: SlotTable,
        drafts: DraftSource,
        committer: Committer,
        budget: PrefillBudget,
    ) -> None:
        self._runner = runner
        self._table = table
        self._drafts = drafts
        self._committer = committer
        self._budget = budget

    def limit(self, scheduler: Scheduler) -> int | None:
        """Return the largest number of prompt tokens for the next engine step while sequences decode.

        Chunks that have the size of a recorded CUDA graph need no padding. The number is therefore the
        largest such size that fits into the time budget. Without such a size, the time budget alone sets the
        number. Return None if no prompt is left to compute.
        """
        stored = (one.cached_len for one in scheduler.active if one.status is SequenceStatus.PREFILLING)
        context = next(stored, 0 if scheduler.waiting else None)
        if context is None:
            return None
        tokens = self._budget.tokens(context)
        return self._runner.recorded_rows(tokens) or tokens

    def launch(self, chunks: Seq[PrefillChunk]) -> PrefillPass:
        """Enqueue prompt chunks without waiting for them. Completed sequences can take part in rounds."""
        enqueued_at = time.monotonic()
        completed = [chunk.sequence for chunk in chunks if chunk.is_last]
        formed = any(sequence.form is not None for sequence in completed)
        allowed = prompt_masks(completed, self._runner.device) if formed else None
        chosen = self._runner.begin_prefill(chunks, self._rules_of(completed), allowed)
        for chunk in chunks:
            self._stored(chunk)
        for sequence in completed:
            self._table.hold(sequence)
        self._table.seat(completed, chosen.on_device)
        for chunk in chunks:
            self._drafts.prefilled(chunk)
        for sequence in completed:
            sequence.status = SequenceStatus.RUNNING
            sequence.tokens_ahead = sequence.passes_ahead = sequence.fresh_columns = 1
        return PrefillPass(
            [(sequence, sequence.residence) for sequence in completed],
            chosen,
            sum(chunk.stop - chunk.start for chunk in chunks),
            max(chunk.stop for chunk in chunks),
            enqueued_at,
        )

    def finish(self, launched: PrefillPass, previous_end: float) -> None:
        """Wait for the first tokens that a pass over prompt chunks has chosen, then commit and emit them.

        Args:
            launched: The oldest pass in flight.
            previous_end: Time at which the host had read the previous pass, from `time.monotonic()`.
        """
        tokens = launched.chosen.wait()
        started = max(launched.enqueued_at, previous_end)
        self._budget.observe(launched.tokens, launched.longest, time.monotonic() - started)
        for scored in launched.chosen.prompts:
            if not scored.void:
                self._emit_prompt(scored)
        for states in launched.chosen.states:
            if not states.void:
                self._emit_states(states)
        for index, ((sequence, residence), token) in enumerate(zip(launched.completed, tokens, strict=True)):
            if sequence.has_left(residence):
                continue
            sequence.tokens_ahead -= 1
            sequence.passes_ahead -= 1
            step = self._committer.accept(sequence, [token])
            if step is None:
                continue
            if step.finish is None:
                self._drafts.first_token(sequence, token)
            self._committer.emit(sequence, step, logprobs=_first_logprob(launched.chosen, index, sequence))

    def _rules_of(self, completed: Seq[Sequence]) -> SlotRules | None:
        """Write the rules of completed sequences to their slots. Return None if no sequence has rules."""
        ruled = [sequence for sequence in completed if sequence.ruled]
        if not ruled:
            return None
        for sequence in ruled:
            self._table.rules.hold(sequence)
        self._table.rules.flush()
        return self._table.rules

    def _emit_prompt(self, scored: ScoredPrompt) -> None:
        """Emit the logprobs of prompt tokens that the client has not received."""
        sequence = scored.sequence
        top, known = sequence.request.logprobs.prompt_top, sequence.prompt_scored - scored.first
        rows = scored.logprobs[max(0, known) :]
        if top is None or not rows.shape[0]:
            return
        requested = None if scored.requested is None else scored.requested[max(0, known) :]
        sequence.prompt_scored += rows.shape[0]
        self._committer.emit_prompt(sequence, unpack_logprobs(rows, top, requested))

    def _emit_states(self, states: PromptStates) -> None:
        """Emit the states of prompt tokens that the client has not received, in messages of limited size."""
        sequence = states.sequence
        first = max(states.first, sequence.states_len)
        for part in states.parts(first, STATE_BYTES):
            self._committer.emit_states(sequence, part)

    def _stored(self, chunk: PrefillChunk) -> None:
        """Update a sequence's lengths for the K/V and the feature rows that a chunk stores."""
        sequence = chunk.sequence
        if self._runner.captures and sequence.stores_features and sequence.feature_len == chunk.start:
            sequence.feature_len = chunk.stop
        sequence.cached_len = chunk.stop


def _first_logprob(chosen: ChosenTokens, index: int, sequence: Sequence) -> list[TokenLogprob]:
    """Return the logprob of the first token after a prompt, if the client wants it."""
    top = sequence.request.logprobs.top
    if top is None or chosen.logprobs is None:
        return []
    return unpack_logprobs(chosen.logprobs[index : index + 1], top, chosen.requested[index])
