"""Opens, closes and reopens the drafter's sessions, adopts its feature spec, sends features and commits."""

from __future__ import annotations

import logging

from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.scheduling.scheduler import PrefillChunk, Scheduler, StepPlan
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.errors import OutriderError
from outrider.shared.spec.drafter import (
    BACKING_OFF,
    Commit,
    Drafter,
    DrafterState,
    FeatureSpec,
    SequenceOpen,
)

_log = logging.getLogger("outrider.target")


class DraftSessions:
    """Opens and closes the drafter's sessions as sequences come and go. Engine thread only.

    The drafter follows a sequence (`Sequence.drafted`) from its admission until the sequence ends or the
    scheduler retracts it.

    Attributes:
        num_resyncs: Number of times that a session was opened again because the drafter had lost it.
        sends_stored: True to send the stored feature rows of a sequence when its session is opened. False if
            the drafter itself requests the feature rows that it lacks.
        misfit: The reason why the target's model cannot supply the features that the drafter needs. None if
            it can.
    """

    def __init__(self, drafter: Drafter, runner: ModelRunner, scheduler: Scheduler) -> None:
        self._drafter = drafter
        self._runner = runner
        self._scheduler = scheduler
        self._offered: FeatureSpec | None = None
        self._spec: FeatureSpec | None = None
        self._lost: set[int] = set()
        self.num_resyncs = 0
        self.sends_stored = True
        self.misfit: OutriderError | None = None

    def refresh(self) -> bool:
        """Adopt the drafter's feature spec when it becomes known or changes.

        The spec names the hidden states that the drafter needs. Running sequences whose requests
        draft are prefilled again, because their features were not captured under the new spec. Their tokens
        do not change. From then on, these sequences get drafts.

        Returns:
            True if the spec has changed.
        """
        spec = self._drafter.feature_spec()
        if spec is self._offered:
            return False
        changed = spec is None or self._offered is None or spec.fingerprint != self._offered.fingerprint
        self._offered = spec
        if not changed:
            return False
        self._spec = spec
        self.misfit = None
        try:
            self._runner.set_feature_spec(spec)
        except OutriderError as error:
            _log.error("the draft does not fit this target; decoding without drafts: %s", error.message)
            self.misfit = error
            self._spec = spec = None
        # Stored prefixes lack the feature rows of the new spec.
        self._scheduler.prefixes.flush()
        self._scheduler.finds_features = self._runner.captures
        for sequence in list(self._scheduler.active):
            if sequence.wants_drafts and spec is not None:
                if spec.feature_size:
                    self._scheduler.recompute(sequence)
                if sequence.lease is not None:  # Otherwise, the session is opened when it is admitted again.
                    self._open(sequence)
        return True

    @property
    def identity(self) -> str:
        """Identifier of the drafter, which a restart does not change. Empty before a drafter is known."""
        if self._offered is None:
            return ""
        return "/".join(filter(None, (*self._drafter.describe(), self._offered.fingerprint)))

    @property
    def outdated(self) -> bool:
        """True if `refresh` would find another spec."""
        return self._drafter.feature_spec() is not self._offered

    def follow(self, plan: StepPlan) -> list[Sequence]:
        """Close sessions of retracted sequences, open sessions of admitted ones, and reopen lost sessions.

        Returns:
            The sequences whose sessions were opened or reopened.
        """
        opened: list[Sequence] = []
        for sequence in plan.retracted:
            self.unfollow(sequence)
        for sequence in plan.admitted:
            if sequence.wants_drafts and self._spec is not None:
                self._open(sequence)
                opened.append(sequence)
        self._hear()
        if self._lost:
            lost, self._lost = self._lost, set()
            by_id = {sequence.session_id: sequence for sequence in self._scheduler.active}
            for session_id in sorted(lost):
                if session_id in by_id and by_id[session_id].drafted:
                    self._reopen(by_id[session_id])
                    opened.append(by_id[session_id])
        return opened

    def obstacle(self, sequence: Sequence) -> str:
        """Return the reason why a sequence cannot get drafts now, or an empty string."""
        if self.misfit is not None:
            return "misfit"
        state = self._drafter.state()
        if state is not DrafterState.ON and (
            state is not DrafterState.LATE or sequence.controller_state is not None
        ):
            return BACKING_OFF if self._drafter.backing_off else str(state.value)
        if not sequence.drafted or (self._wants_features and not sequence.has_features):
            return "no_features"
        return ""

    def send_prefill_features(self, chunk: PrefillChunk) -> None:
        """Send the feature rows of a finished chunk, except the last row of a prompt.

        The first commit contains that last row.
        """
        sequence, stop = chunk.sequence, chunk.stop - chunk.is_last
        if not sequence.drafted or sequence.feature_len != chunk.stop or not self._wants_features:
            return
        if stop > chunk.start:
            rows = self._runner.read_features(sequence, chunk.start, stop)
            self._drafter.features(sequence.session_id, chunk.start, rows)

    def unfollow(self, sequence: Sequence) -> None:
        """Close the drafter's session of a sequence."""
        if sequence.drafted:
            sequence.drafted = False
            self._drafter.close([sequence.session_id])

    def catch_up(self, sequence: Sequence, base_len: int) -> Commit | None:
        """Return a commit of a sequence's tokens from index `base_len` on, with their stored feature rows.

        Return None if there is nothing to send, or if the drafter does not follow the sequence.
        """
        if not sequence.drafted or sequence.committed_len == base_len:
            return None
        features = None
        if self._wants_features:
            if not sequence.has_features:
                return None
            features = self._runner.read_features(sequence, base_len - 1, sequence.committed_len - 1)
        return Commit(sequence.fence(), base_len, sequence.tokens[base_len:], features)

    def _hear(self) -> None:
        self._lost.update(self._drafter.wants_reopen())

    @property
    def _wants_features(self) -> bool:
        return self._spec is not None and self._spec.feature_size > 0

    def _open(self, sequence: Sequence) -> None:
        sequence.epoch += 1
        sequence.drafted = True
        request, sampling = sequence.request, sequence.request.sampling
        self._drafter.open(
            [
                SequenceOpen(
                    sequence.fence(),
                    tuple(sequence.tokens),
                    sampling.seed,
                    sampling.temperature,
                    sampling.choice_index,
                    request.traceparent,
                    request.cache_salt if self._scheduler.prefixes.enabled else None,
                    sequence.feature_len if self._wants_features else sequence.found_len,
                )
            ]
        )

        if self._wants_features and self.sends_stored and sequence.feature_len > 0:
            rows = self._runner.read_features(sequence, 0, sequence.feature_len)
            self._drafter.features(sequence.session_id, 0, rows)

    def _reopen(self, sequence: Sequence) -> None:
        self.num_resyncs += 1
        self._open(sequence)
