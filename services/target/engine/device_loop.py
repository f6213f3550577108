"""Overlap scheduling: while the device runs one round, the host delivers the one before and prepares the one after.

    device    | round n          | round n + 1      | round n + 2
    host      launch n + 1 · wait for n · deliver n · launch n + 2 · wait for n + 1 …

The loop is entered when every decoding sequence can have the same shape and the drafter (if there is drafting) lives on the device, and
left when anything else must be done: a sequence that comes, another shape, no page left, a prefill (which the engine enqueues before the
last round is read). What ends a sequence is seen one round late; the tokens of that round are dropped, so they are never emitted, billed
or cached. Its row stays idle until the others fit into the next smaller batch, to which they move in stream order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.services.target.engine.engine_parts import EngineParts
from outrider.services.target.engine.rounds import advance
from outrider.services.target.model.input_batch import SamplingMode
from outrider.services.target.model.outcome import FAILED_TOKEN, Outcome
from outrider.services.target.model.round_runner import FinishedRound, RoundRunner
from outrider.services.target.policy.controller import ExecutedRow, ExecutedStep
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.engine.buckets import bucket
from outrider.shared.spec.drafter import Commit, Commits, DrafterState
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

CATCH_UP_TOKENS = 128
"""Tokens of plain rounds after which a drafter that follows is told of them."""

_log = logging.getLogger("outrider.target")


@dataclass(frozen=True, slots=True)
class OverlapPlan:
    """Which rounds stay on the device.

    Attributes:
        batch_sizes: What batches are padded to, ascending; larger ones go the host's way.
        columns: The most tokens of a round that drafts by the usual shape: its depth + 1.
        recorded: The largest batch whose rounds are recorded; None for all.
    """

    batch_sizes: tuple[int, ...]
    columns: int
    recorded: int | None = None


class DeviceLoop:
    """The steady state of one engine. Engine thread only.

    Args:
        rounds: Enqueues and reads rounds.
        batch_sizes: Ascending; larger batches go the host's way.
        parts: The engine's.
    """

    def __init__(self, rounds: RoundRunner, batch_sizes: Seq[int], parts: EngineParts) -> None:
        self._rounds = rounds
        self._batch_sizes = tuple(batch_sizes)
        self._parts = parts
        self._sequences: list[Sequence | None] = []
        self._places: dict[int, int] = {}
        self._entered_len: dict[int, int] = {}
        self._shape = NO_DRAFT
        self._bs = 0

    @property
    def active(self) -> bool:
        """Whether rounds are kept on the device now."""
        return self._rounds.active

    @property
    def drafts(self) -> bool:
        """Whether the rounds are drafted, or those that were on the device last."""
        return self._shape.drafts

    @property
    def takes_prefilled(self) -> bool:
        """Whether a sequence can enter in the step that prefilled it: there is no draft, or its rounds are on the device too."""
        return self._parts.drafter.device_resident or self._parts.drafter.state() is DrafterState.NONE

    @property
    def undisturbed(self) -> bool:
        """Whether all that decodes is here, and nobody elsewhere takes part: other work may then be enqueued behind the rounds."""
        parts = self._parts
        return (
            self.takes_prefilled
            and not self._rounds.exchanges
            and parts.follower.settled
            and self._holds(parts.scheduler.decoding())
        )

    def takes(self, shape: DraftShape) -> bool:
        """Whether rounds of this shape can stay on the device."""
        return not shape.drafts or self._parts.drafter.device_resident

    def capture(self, bs: int, shape: DraftShape, mode: SamplingMode, capture: bool) -> None:
        """Record the round of one size before anybody is served."""
        self._rounds.capture(bs, shape, mode, capture)

    def enter(self, decodes: Seq[Sequence]) -> bool:
        """Start with these sequences, if they can stay on the device."""
        if not decodes or len(decodes) > self._batch_sizes[-1]:
            return False
        shape = self._parts.proposals.common_shape(decodes)
        if shape is None:
            return False
        self._bs = self._bucket(len(decodes))
        if not self._rounds.enter(decodes, self._bs, shape):
            return False
        self._sequences = list(decodes)
        self._places = {sequence.session_id: row for row, sequence in enumerate(decodes)}
        self._entered_len = {sequence.session_id: sequence.committed_len for sequence in decodes}
        self._shape = shape
        if not self._launch():
            self._leave()
            return False
        self._rounds.carry()
        return True

    def step(self) -> bool:
        """Launch the next round and finish the one before; False when that cannot be: `drain` then, with other work begun or not."""
        if not (self._stays() and self._launch()):
            return False
        self._finish(self._rounds.read())
        if not self._places:
            self._leave()
        else:
            self._rounds.carry()  # when what was read is on its way to who waits for it
        return True

    def drain(self) -> None:
        """Finish what is on its way and go back to the host's way."""
        while self._rounds.in_flight and self._places:
            self._finish(self._rounds.read())
        self._leave()

    def abandon(self) -> None:
        """Leave after a failure: results on their way are dropped, all sequences have ended."""
        if self._rounds.active:
            try:
                self._leave()
            except Exception:
                _log.exception("the drafter could not end its rounds")

    def retire(self, sequence: Sequence) -> None:
        """Take out a sequence that is about to end; it may be one that is not here."""
        row = self._places.pop(sequence.session_id, None)
        if row is not None:
            self._sequences[row] = None
            self._rounds.retire(row)

    def _stays(self) -> bool:
        """Whether the next round can be one more of the same."""
        if not self._places or not self._parts.follower.settled or self._parts.scheduler.has_other_work():
            return False
        decoding = self._parts.scheduler.decoding()
        if not self._holds(decoding):
            return False
        if self._drafter_falls_behind(decoding):
            return False
        return self._parts.proposals.common_shape(decoding) == self._shape

    def _holds(self, decoding: Seq[Sequence]) -> bool:
        """Whether exactly these sequences are here."""
        return len(decoding) == len(self._places) and all(
            sequence.session_id in self._places for sequence in decoding
        )

    def _drafter_falls_behind(self, decoding: Seq[Sequence]) -> bool:
        """Whether plain rounds have gone on for so long that the drafter should be told of them: `catch_up` is one message."""
        if self._shape.drafts:
            return False
        return any(
            one.drafted and one.committed_len - self._entered_len[one.session_id] >= CATCH_UP_TOKENS
            for one in decoding
        )

    def _worth_another(self) -> bool:
        """Whether some sequence is not certain to end with the rounds on their way: each brings at least one token."""
        return any(
            sequence is not None and sequence.remaining > self._rounds.in_flight
            for sequence in self._sequences
        )

    def _launch(self) -> bool:
        """Enqueue a round behind those on their way, unless those end every sequence; False when there is no room."""
        if not self._worth_another():
            return True
        if not self._fits_its_bucket():
            return False
        most = (self._shape.depth + 1) * self._rounds.in_flight
        upper = [0 if one is None else min(one.committed_len + most, one.end_len) for one in self._sequences]
        uppers = [
            (sequence, bound)
            for sequence, bound in zip(self._sequences, upper, strict=True)
            if sequence is not None
        ]
        if not self._parts.scheduler.reserve_all_ahead(uppers):
            return False
        return self._rounds.launch(upper, self._wait_limit_s)

    def _fits_its_bucket(self) -> bool:
        """Go on in a smaller batch where so many rows have ended that one holds the others; False when they have to enter anew."""
        bs = self._halved()
        if bs == self._bs:
            return True
        rows = [row for row, sequence in enumerate(self._sequences) if sequence is not None]
        if not self._rounds.move(rows, bs):
            return False
        self._sequences = [self._sequences[row] for row in rows]
        self._places = {
            sequence.session_id: row for row, sequence in enumerate(self._sequences) if sequence is not None
        }
        self._bs = bs
        return True

    def _wait_limit_s(self) -> float | None:
        return self._parts.proposals.wait_limit_s(
            [sequence for sequence in self._sequences if sequence is not None]
        )

    def _finish(self, finished: FinishedRound) -> None:
        """Advance, deliver and learn from a round that was read."""
        kept: list[list[int]] = [[] for _ in self._sequences]
        executed: list[ExecutedRow] = []
        before = list(self._sequences)
        for row, (sequence, outcome) in enumerate(zip(before, finished.rows, strict=True)):
            if sequence is None:
                continue
            assert outcome is not None, "a sequence that goes on was verified"
            chain = self._shape.topk == 1
            executed.append(
                ExecutedRow(
                    sequence.controller_row,
                    outcome.num_nodes,
                    self._shape.depth,
                    len(outcome.accepted),
                    chain,
                )
            )
            kept[row] = self._advance(sequence, outcome)
        if self._places:
            self._rounds.committed(
                [tokens if self._sequences[row] is not None else [] for row, tokens in enumerate(kept)]
            )
        self._parts.counter.value += 1
        self._parts.delivery.flush()
        if executed:
            step = ExecutedStep(
                executed, self._shape.depth, 0.0 if self._shape.drafts else None, 0.0, 0.0, finished.seconds
            )
            self._parts.controller.observe(step)
            self._parts.metrics.observe_device_round(step)

    def _advance(self, sequence: Sequence, outcome: Outcome) -> list[int]:
        if outcome.emitted[-1] == FAILED_TOKEN:
            self._parts.poisoned(sequence)
            return []
        had_features = sequence.has_features
        step = advance(sequence, outcome.emitted)
        if had_features:
            sequence.feature_len += len(step.kept)
        sequence.cached_len += len(step.kept)
        sequence.stats.record(outcome.num_nodes, len(outcome.accepted), step.num_cut)
        if self._parts.delivery.tokens(sequence, step, None):
            self._parts.forget(sequence)
        return step.kept

    def _leave(self) -> None:
        remaining = [sequence for sequence in self._sequences if sequence is not None]
        self._rounds.leave()
        if not self._shape.drafts:  # the drafter was told nothing of what was decoded plainly
            commits = [
                self._parts.follower.catch_up(sequence, self._entered_len[sequence.session_id])
                for sequence in remaining
            ]
            told: list[Commit] = [commit for commit in commits if commit is not None]
            if told:
                self._parts.drafter.commit(Commits(self._parts.counter.value, told))
        self._sequences, self._places, self._entered_len = [], {}, {}

    def _halved(self) -> int:
        """Return the smallest size that halving leads to and that holds the rows that go on: few sizes are met then, and few moves made."""
        bs = self._bs
        while len(self._places) <= (half := self._bucket(max(1, bs // 2))) < bs:
            bs = half
        return bs

    def _bucket(self, count: int) -> int:
        size = bucket(self._batch_sizes, count)
        assert size is not None, "`enter` refuses larger batches"
        return size
