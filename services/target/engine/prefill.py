"""Prompts of a step: one pass of the target is enqueued, the drafter takes in what it can of it, and only then are its tokens waited for.

device    | prompts                        | rows into the drafter's K/V | round
host      enqueue · features, drafter's rows · wait for the tokens · deliver, commit, enqueue the round
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
    """Prompt chunks on their way, and the tokens behind those that are the last of their prompt."""

    chunks: Seq[PrefillChunk]
    chosen: ChosenTokens


class Prefill:
    """Engine thread only.

    Args:
        runner: The model.
        parts: The engine's.
        host: Tells the drafter of commits.
        expects_drafts: Whether a sequence that leaves it to the controller is likely to be drafted from its first round on.
    """

    def __init__(
        self, runner: ModelRunner, parts: EngineParts, host: HostRounds, expects_drafts: Callable[[], bool]
    ) -> None:
        self._runner = runner
        self._parts = parts
        self._host = host
        self._expects_drafts = expects_drafts

    def begin(self, chunks: Seq[PrefillChunk]) -> PrefillPass:
        """Enqueue prompt chunks; nothing is waited for."""
        return PrefillPass(chunks, self._runner.begin_prefill(chunks))

    def finish(self, prompts: PrefillPass) -> None:
        """Hand the drafter the features, wait for the tokens, deliver them, and tell the drafter of those that go on."""
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
        """Note what a chunk stores, and hand its features over but for the row that belongs to the first commit, which is returned."""
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
