"""The in-process drafter: a draft engine in the target's process, called by the target's engine thread.

The launcher creates the drafter. It then passes the drafter to the target, because services do not import
each other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.services.draft.build import build_engine
from outrider.services.draft.engine import DraftEngine, ProposedTrees
from outrider.services.draft.sessions.session import (
    Ask,
    MessageResult,
    MessageVerdict,
    PeerId,
    RefusalReason,
)
from outrider.services.draft.settings import DraftSettings
from outrider.services.draft.target_info import TargetInfo
from outrider.services.draft.warmup import warm_up
from outrider.shared.kv.pool import CacheSizing
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.fused.trial import BUDGET_S
from outrider.shared.obs.logging import get_logger
from outrider.shared.spec.device_drafter import DeviceDrafter, SeatedGroup
from outrider.shared.spec.drafter import (
    WARMING,
    Commit,
    Commits,
    Drafter,
    DrafterState,
    DraftRoute,
    FeatureSpec,
    ProposalRequest,
    ProposalRow,
    SequenceOpen,
)
from outrider.shared.spec.tree import DraftBatch, DraftShape
from outrider.shared.spec.trees import root_trees, scatter_trees

HOST_PEER = PeerId(1)
FAILED = "draft_error"

log = get_logger("outrider.draft")


def drafter_beside(
    decoder: Decoder, settings: DraftSettings, sizing: CacheSizing | None = None
) -> InprocDrafter:
    """Make the in-process drafter of a target. The draft shares borrowed tensors with the target.

    Args:
        decoder: The target's model. The draft uses the same device and dtype.
        settings: The draft's settings, of which `draft`, `speculative_algorithm` and the sizes are used. The
            folder `target_weights` is read only for MTP layers and the tokenizer.
        sizing: Function that chooses the size of the draft's KV cache if `kv_tokens` is not set.

    Raises:
        CheckpointError: The draft cannot be loaded or does not fit the target. The message names the key and
            the fix.
    """
    target = TargetInfo.of("inproc", decoder.config, decoder.fingerprint)
    engine = build_engine(settings, decoder.device, decoder.dtype, target, sizing)
    spec = engine.strategy.feature_spec(target)
    for name in list(engine.strategy.missing()):
        engine.strategy.lend(name, decoder.weight(name))
    # Drop the further work, because the target itself records the rounds of other batch sizes.
    warm_up(engine, decoder.device, record=False, tiles=not settings.disable_tile_trial, tiles_s=BUDGET_S)
    return InprocDrafter(engine, spec, decoder.device)


class InprocDrafter(Drafter, DeviceDrafter):
    """A drafter that runs a draft engine in the target's process. For the target's engine thread only.

    Args:
        engine: The draft engine. It must already have all tensors that it borrows.
        spec: The hidden states that the target captures as features.
        device: Device on which trees are returned.
    """

    def __init__(self, engine: DraftEngine, spec: FeatureSpec, device: torch.device) -> None:
        self._engine = engine
        self._spec = spec
        self._device = device
        self._lost: set[int] = set()
        self._reasons: dict[int, str] = {}

    @property
    def on_device(self) -> DeviceDrafter | None:
        """Return this drafter if its strategy drafts on the device."""
        return None if self._engine.strategy.growth is None else self

    def route(self) -> DraftRoute:
        return DraftRoute("inproc")

    def feature_spec(self) -> FeatureSpec | None:
        return self._spec

    def state(self) -> DrafterState:
        return DrafterState.ON

    def open(self, sequences: Sequence[SequenceOpen]) -> None:
        for sequence in sequences:
            self._lost.discard(sequence.fence.session_id)
            self._note(sequence.fence.session_id, self._engine.open(HOST_PEER, sequence))

    def features(self, session_id: int, base: int, rows: torch.Tensor) -> None:
        session = self._engine.sessions.get(HOST_PEER, session_id)
        if session is not None:
            self._note(
                session_id, self._engine.add_features(HOST_PEER, session_id, session.epoch, base, rows)
            )

    def commit(self, result: Commits) -> None:
        for commit in result.commits:
            self._note(commit.fence.session_id, self._engine.commit(HOST_PEER, commit, None))

    def announce(self, request: ProposalRequest) -> None:
        """Do nothing, because drafting runs on the caller's thread and cannot start early."""

    def propose(self, request: ProposalRequest) -> DraftBatch:
        started = time.monotonic()
        for row in request.rows:
            if row.shape.drafts:
                ask = Ask(request.round, row.shape, asked_s=started)
                answer = self._engine.commit(
                    HOST_PEER, Commit(row.fence, row.fence.committed_len, (), None), ask
                )
                self._note(row.fence.session_id, answer)
        proposals = self._drafted(request.rows)
        # Drop the requests of sessions whose features are still incomplete.
        self._engine.cancel(HOST_PEER, request.round)
        for proposal in proposals:
            for origin in proposal.origins:
                self._reasons[origin.fence.session_id] = ""
        trees = _placed(proposals, request.rows, self._device)
        return replace(trees, draft_ms=(time.monotonic() - started) * 1000)

    def absorb(self, session_ids: Sequence[int]) -> None:
        try:
            self._engine.absorb(HOST_PEER, session_ids)
        except Exception:
            self._fail(session_ids)

    def lacking(self, session_id: int) -> range | None:
        return self._engine.lacking(HOST_PEER, session_id)

    def catch_up(self, session_ids: Sequence[int]) -> None:
        try:
            self._engine.catch_up(HOST_PEER, session_ids)
        except Exception:
            self._fail(session_ids)

    def seat(
        self,
        session_ids: Sequence[int],
        committed_upper: Sequence[int],
        shape: DraftShape,
        batch_size: int,
        columns: int,
    ) -> SeatedGroup:
        return self._engine.seat(HOST_PEER, session_ids, committed_upper, shape, batch_size, columns)

    def committed(self, session_id: int, tokens: Sequence[int], *, drafted: bool) -> None:
        self._engine.committed(HOST_PEER, session_id, tokens, drafted=drafted)

    def wants_reopen(self) -> Sequence[int]:
        lost = sorted(self._lost)
        self._lost.clear()
        return lost

    def fallback_reason(self, session_id: int) -> str:
        return self._reasons.get(session_id, "")

    def close(self, session_ids: Sequence[int]) -> None:
        for session_id in session_ids:
            self._engine.close(HOST_PEER, session_id)
            self._lost.discard(session_id)
            self._reasons.pop(session_id, None)

    def shutdown(self) -> None:
        self._engine.drop_peer(HOST_PEER)
        self._engine.check()

    def _drafted(self, rows: Sequence[ProposalRow]) -> Sequence[ProposedTrees]:
        """Grow the trees of ready sessions. A failure drops the sessions involved and is not raised."""
        if not self._engine.sessions.ready():
            return ()
        try:
            drafted = self._engine.step()
        except Exception:
            self._fail([row.fence.session_id for row in rows])
            return ()
        for refusal in drafted.refusals:
            self._reasons[refusal.session_id] = "kv_full"
        return drafted.proposals

    def _fail(self, session_ids: Sequence[int]) -> None:
        """Log the current exception, and record which of these sessions the exception has ended."""
        log.exception("drafting failed", sessions_lost=self._engine.give_up())
        for session_id in session_ids:
            if self._engine.sessions.get(HOST_PEER, session_id) is None:
                self._lost.add(session_id)
                self._reasons[session_id] = FAILED

    def _note(self, session_id: int, answer: MessageResult) -> None:
        """Record why a sequence has no tree, and whether the target must open it again."""
        if answer.verdict is MessageVerdict.ACCEPTED:
            self._reasons[session_id] = WARMING
        elif answer.verdict is MessageVerdict.REJECTED:
            self._reasons[session_id] = answer.reason.value
        elif answer.verdict is MessageVerdict.RESYNC:
            # Do not reopen a session in every round if it was refused permanently when it was opened.
            refused = self._reasons.get(session_id) in (
                RefusalReason.FULL.value,
                RefusalReason.TOO_LONG.value,
            )
            if not (refused and answer.reason is RefusalReason.UNKNOWN_SESSION):
                self._reasons[session_id] = answer.reason.value
                self._lost.add(session_id)


def _placed(
    proposals: Sequence[ProposedTrees], rows: Sequence[ProposalRow], device: torch.device
) -> DraftBatch:
    """Put the trees of all proposals at their rows. Every other row gets a tree that has only a root."""
    roots = [row.root_token for row in rows]
    if not proposals:
        return root_trees(roots, device)
    position = {row.fence: index for index, row in enumerate(rows)}
    parts = [(one.trees, [position[origin.fence] for origin in one.origins]) for one in proposals]
    return scatter_trees(parts, roots)
