"""Runs rounds through the host: collects the trees, verifies, commits, and announces the next round early.

    target device   | verify n      |                       | verify n + 1
    host            wait for n · commit n, announce n + 1 · deliver n … wait for the trees · launch n + 1
    remote draft                           | extend by n, draft n + 1  |

The announcement is sent immediately after a verify pass, because a draft in another process idles until the
announcement arrives. Work that can wait, such as delivery, is done later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.services.target.drafting.proposals import Proposal
from outrider.services.target.engine.engine_parts import EngineParts
from outrider.services.target.engine.rounds import Advance, advance, executed_step, round_trace
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.outcome import FAILED_TOKEN
from outrider.services.target.scheduling.sequence import Sequence
from outrider.services.target.step_times import StepTimes
from outrider.shared.spec.drafter import Commit, Commits, DrafterState


@dataclass(frozen=True, slots=True)
class _Early:
    """An announcement for the sequences that are expected to decode next.

    `proposal` is None if none of these sequences wanted drafts.
    """

    session_ids: list[int]
    proposal: Proposal | None


class HostRounds:
    """Runs those rounds of one engine that go through the host. Engine thread only.

    Args:
        runner: Runs the forward passes.
        parts: The engine's parts.
    """

    def __init__(self, runner: ModelRunner, parts: EngineParts) -> None:
        self._runner = runner
        self._parts = parts
        self._drafts = parts.drafter.state() is not DrafterState.NONE
        self._early: _Early | None = None

    @property
    def announced(self) -> bool:
        """True if the drafter is already working on a round."""
        return self._early is not None and self._early.proposal is not None

    def drop(self) -> None:
        """Discard the early announcement. Call if its sequences continue on the device or have failed."""
        self._early = None

    def announce(self, decodes: Seq[Sequence]) -> Proposal | None:
        """Request trees for the sequences that decode now, unless an early announcement has done so."""
        early, self._early = self._early, None
        if not self._drafts:
            return None
        if early is not None:
            if early.proposal is not None:
                kept = early.proposal.among(decodes)
                if kept is not None:
                    return kept
            elif early.session_ids == [sequence.session_id for sequence in decodes]:
                return None
        return self._parts.proposals.announce(decodes, self._parts.counter.value)

    def run(self, decodes: Seq[Sequence], proposal: Proposal | None, times: StepTimes) -> None:
        """Wait for the proposal, verify it, and then commit and deliver the chosen tokens."""
        # 1. Propose: wait for the drafter's trees.
        drafts = self._parts.proposals.collect(proposal, decodes)
        times.proposed = time.monotonic()
        timed = self._parts.proposals.timed(proposal, decodes, drafts, times.draft_wait_s)
        # 2. Verify.
        outcomes, features = self._runner.verify(decodes, drafts)
        times.verified = time.monotonic()
        # 3. Commit: advance each sequence and send its commit to the drafter.
        base_lens = [sequence.committed_len for sequence in decodes]
        steps: list[Advance | None] = []
        commits: list[Commit | None] = []
        for index, (sequence, outcome) in enumerate(zip(decodes, outcomes, strict=True)):
            if outcome.emitted[-1] == FAILED_TOKEN:
                self._parts.poisoned(sequence)
                steps.append(None)
                continue
            step = advance(sequence, outcome.emitted)
            steps.append(step)
            if features[index] is not None:
                sequence.feature_len += len(step.kept)
            sequence.cached_len += len(step.kept)
            if step.finish is None:
                commits.append(
                    self._parts.follower.commit(sequence, base_lens[index], step.kept, features[index])
                )
        self.commit(commits)
        round_number = self._parts.counter.value
        self._parts.counter.value += 1
        # 4. Announce the next round, before anything that can wait.
        self._announce_early(
            {
                sequence.session_id
                for sequence, done in zip(decodes, steps, strict=True)
                if done and done.finish
            }
        )
        # 5. Deliver the tokens.
        for index, (sequence, outcome, done) in enumerate(zip(decodes, outcomes, steps, strict=True)):
            if done is None:
                continue
            sequence.stats.record(outcome.num_nodes, len(outcome.accepted), done.num_cut)
            trace = None
            if sequence.request.speculation.trace:
                trace = round_trace(drafts, index, base_lens[index], round_number, outcome, done.kept, times)
            if self._parts.delivery.tokens(sequence, done, trace):
                self._parts.forget(sequence)
        times.committed = time.monotonic()
        # 6. Feed the timings to the controller and the metrics.
        depth, chains = (timed.depth, timed.chains) if timed else (0, ())
        executed = executed_step(decodes, outcomes, drafts, depth, chains, times)
        if self._drafts:
            self._parts.controller.observe(executed)
            if timed is not None:
                # Without an answer, the draft would have needed longer than the measured time, so count that
                # time double.
                answered = max(outcome.num_nodes for outcome in outcomes) > 1
                self._parts.controller.costs.observe_answer(
                    (times.proposed - timed.announced_at) * (1.0 if answered else 2.0)
                )
        self._parts.metrics.observe_round(executed, times)

    def commit(self, commits: Seq[Commit | None]) -> None:
        """Send commits to the drafter; None stands for a sequence that the drafter does not follow."""
        followed = [commit for commit in commits if commit is not None]
        if followed:
            self._parts.drafter.commit(Commits(self._parts.counter.value, followed))

    def _announce_early(self, ended: set[int]) -> None:
        """Announce the next round of the sequences that continue, unless they may move to the device."""
        if not self._drafts:
            return
        expected = [
            sequence for sequence in self._parts.scheduler.decoding() if sequence.session_id not in ended
        ]
        if expected and not self._parts.proposals.may_stay_on_device(expected):
            proposal = self._parts.proposals.announce(expected, self._parts.counter.value)
            self._early = _Early([sequence.session_id for sequence in expected], proposal)
