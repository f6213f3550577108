"""Prefills the prompts of a step: enqueues one target pass, feeds the drafter, then reads the first tokens.

The drafter's own work on the prompt is enqueued before the host waits for the tokens:

    device    | target prefill     | drafter extends its KV cache | round
    host      enqueue · features · drafter's part · wait for tokens · deliver, commit, enqueue the round
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from outrider.services.target.engine.engine_parts import EngineParts
from outrider.services.target.engine.host_rounds import HostRounds
from outrider.services.target.engine.rounds import advance
from outrider.services.target.model.model_runner import ChosenTokens, ModelRunner
from outrider.services.target.model.outcome import FAILED_TOKEN
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence, SequenceStatus
from outrider.shared.spec.drafter import Commit, EagerDrafter


@dataclass(frozen=True, slots=True)
class PrefillPass:
    """Prompt chunks in flight, and the first tokens after those prompts that the chunks complete."""

    chunks: Seq[PrefillChunk]
    chosen: ChosenTokens


class Prefill:
    """Prefills prompt chunks. Engine thread only.

    Args:
        runner: Runs the forward passes.
        parts: The engine's parts.
        host: Sends the first commits to the drafter.
        expects_drafts: Returns True if sequences in mode `auto` will probably use drafts in their first
            round.
    """

    def __init__(
        self, runner: ModelRunner, parts: EngineParts, host: HostRounds, expects_drafts: Callable[[], bool]
    ) -> None:
        self._runner = runner
        self._parts = parts
        self._host = host
        self._expects_drafts = expects_drafts

    def begin(self, chunks: Seq[PrefillChunk]) -> PrefillPass:
        """Enqueue prompt chunks without waiting for them."""
        return PrefillPass(chunks, self._runner.begin_prefill(chunks))

    def finish(self, prompts: PrefillPass) -> None:
        """Send the features, wait for the tokens, deliver them, and commit the sequences that continue."""
        parts = self._parts
        features = [self._captured(chunk) for chunk in prompts.chunks]
        self._absorb([chunk.sequence for chunk in prompts.chunks])
        tokens = iter(prompts.chosen.wait())
        commits: list[Commit | None] = []
        for chunk, row in zip(prompts.chunks, features, strict=True):
            if not chunk.is_last:
                continue
            sequence, token = chunk.sequence, next(tokens)
            if token == FAILED_TOKEN:
                parts.poisoned(sequence)
                continue
            base_len = sequence.committed_len
            step = advance(sequence, [token])
            sequence.status = SequenceStatus.RUNNING
            if parts.delivery.tokens(sequence, step, None):
                parts.forget(sequence)
            else:
                commits.append(parts.follower.commit(sequence, base_len, step.kept, row))
        self._host.commit(commits)

    def _captured(self, chunk: PrefillChunk) -> torch.Tensor | None:
        """Record what a chunk has stored and send its feature rows to the drafter.

        Returns:
            The last row of the prompt, for the first commit. None for earlier chunks.
        """
        sequence = chunk.sequence
        if self._runner.captures and sequence.wants_drafts and sequence.feature_len == chunk.start:
            sequence.feature_len = chunk.stop
        row = self._parts.follower.send_prefill_features(chunk)
        sequence.cached_len = chunk.stop
        return row

    def _absorb(self, sequences: Seq[Sequence]) -> None:
        drafter = self._parts.drafter
        if not isinstance(drafter, EagerDrafter):
            return
        going_on = [one for one in sequences if one.drafted and one.remaining > 1]
        likely = [one for one in going_on if one.controller_row is None or self._expects_drafts()]
        if likely:
            drafter.absorb([one.session_id for one in likely])
