"""The engine's state of one request: its tokens, lengths, status and page lease.

The named lengths are always in this order, which `Sequence.check` asserts:

    tokens   |-- prompt --|-- emitted ------------- root |
    index    0            prompt_len        committed_len - 1
    K/V      |======== cached_len rows =====|            .            .
    KV slots |------------------------------|-- tree nodes of a round --|--- spare --|
             0                      cached_len         cached_len + N          reserved_len <= max_len

- Pages belong to the sequence's lease from admission until the sequence ends or is retracted. Only
  `Scheduler` frees pages.
- The first pages of a lease may be shared with other sequences. Shared pages are full. The tokens of a shared
  page are below `cached_len`, or this sequence is computing them.
- KV slots from `cached_len` on have no valid contents between rounds.
- Between rounds of a running sequence, `cached_len == committed_len - 1`. During prefill, `cached_len` grows
  to `committed_len`. The two lengths stay equal until the host has read the first token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum

from outrider.services.target.grammar.form import OutputForm
from outrider.services.target.policy.controller import SequenceState
from outrider.services.target.policy.speculation_stats import SpeculationStats
from outrider.services.target.request import EngineRequest, EventSink, TokensEvent
from outrider.shared.base.generation import FinishReason, SpeculationMode
from outrider.shared.kv.pages import PageLease
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash

RESUMED_EARLIER = 1 << 48
"""Subtracted from the arrival number of a resumed request, so that it counts as older than all new requests.

The client of a resumed request has already received tokens."""


USER = "user"
"""Fallback reason of a request whose mode is `off`, or whose tree has room for its root only."""
NO_DRAFT_REASON = "no_draft"
"""Fallback reason on a target without a draft."""


class SequenceStatus(Enum):
    """Status of a sequence: queued, computing its prompt, decoding, or ended."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Advance:
    """Progress of one sequence in one forward pass.

    Attributes:
        kept: The tokens that are kept and emitted.
        num_cut: Number of tokens that were dropped after a stop token or the length limit.
        finish: The reason why the sequence ends with these tokens. None if the sequence continues.
        matched_token: The stop token that ended the sequence. None if no stop token ended it.
    """

    kept: list[int]
    num_cut: int
    finish: FinishReason | None
    matched_token: int | None


class Sequence:
    """One request while the engine processes it. Engine thread only.

    Attributes:
        session_id: Identifier of the sequence for the drafter, unique within this process.
        tokens: All committed tokens: the prompt and the emitted tokens, including those that another target
            has emitted. ``len(tokens)`` is committed_len.
        arrival: Order of arrival. A smaller number is served first.
        cached_len: Number of tokens whose K/V (and feature row, if wanted) is in the KV pool.
        max_len: Maximum number of KV slots that the sequence can need, limited by the size of the KV pool.
        node_bound: Maximum number of tree nodes of one round, including the root. KV slots are reserved for
            these nodes.
        wants_drafts: True if the drafter should follow the sequence when possible. Feature rows are then
            captured if the drafter needs them.
        feature_len: Number of leading tokens whose stored feature rows the current drafter can use.
        shares_features: True if feature rows of the prompt are captured even if the sequence wants no drafts.
            Later sequences with the same prefix can then use them.
        found_len: Number of leading tokens that were in the prefix cache at the last admission.
        cached_prompt: Number of prompt tokens that were in the prefix cache at the first admission.
        drafted: True if the drafter follows the sequence now.
        slot: Slot of the sequence in the `SlotTable`, from its admission until it ends or is retracted.
            Otherwise -1.
        residence: Number of admissions so far. A result with a smaller number belongs to an earlier
            admission.
        tokens_ahead: Largest number of tokens that passes in flight may still add.
        passes_ahead: Number of passes in flight that add at least one token.
        fresh_columns: Largest number of tokens that the last enqueued pass may have chosen.
        charged_len: Number of committed tokens that were charged to the tenant (`TokenShares`).
        ruled: True if the sequence has rules for its logits or a constraint on its output, or if the client
            wants logprobs or states of tokens. Rounds of the sequence then need the sampling mode `FULL`.
        form: The form that the output must have, i.e. the constraint on its tokens. None without a
            constraint.
        prompt_scored: Index of the next prompt token whose logprob the client has not received.
        tapped: True if the client wants data that are copied for it after each pass: states of tokens, or
            logprobs of named tokens.
        states_len: Index of the next token whose states the client has not received, if it wants states.
        unsent: Events with tokens that wait for the request's `message_interval_s` to pass.
        send_at: Time from which new tokens no longer wait, from `time.monotonic()`.
    """

    __slots__ = (
        "_hashed_len",
        "admitted_at",
        "arrival",
        "cached_len",
        "cached_prompt",
        "charged_len",
        "controller_state",
        "drafted",
        "epoch",
        "feature_len",
        "first_token_at",
        "form",
        "found_len",
        "fresh_columns",
        "last_emit_at",
        "lease",
        "max_len",
        "node_bound",
        "page_size",
        "passes_ahead",
        "paused_at",
        "prefix_hash",
        "prompt_len",
        "prompt_scored",
        "request",
        "residence",
        "resumptions",
        "ruled",
        "send_at",
        "session_id",
        "shares_features",
        "sink",
        "slot",
        "states_len",
        "stats",
        "status",
        "stop_ids",
        "submitted_at",
        "tapped",
        "tokens",
        "tokens_ahead",
        "unsent",
        "wants_drafts",
    )

    def __init__(
        self,
        request: EngineRequest,
        sink: EventSink,
        *,
        session_id: int,
        page_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        follow: bool = False,
        share_features: bool = False,
    ) -> None:
        self.request = request
        self.sink = sink
        self.session_id = session_id
        self.arrival = session_id - (RESUMED_EARLIER if request.resume_ids else 0)
        self.epoch = 0
        self.status = SequenceStatus.WAITING
        self.tokens = [*request.prompt_ids, *request.resume_ids]
        self.prompt_len = len(request.prompt_ids)
        self.cached_len = 0
        self.charged_len = self.prompt_len
        self.page_size = page_size
        self.lease: PageLease | None = None
        self.wants_drafts = follow and self.speculates
        self.shares_features = share_features
        self.feature_len = 0
        self.found_len = self.cached_prompt = 0
        self.controller_state: SequenceState | None = None
        self.drafted = False
        self.slot = -1
        self.residence = 0
        self.tokens_ahead = 0
        self.passes_ahead = 0
        self.fresh_columns = 1
        self.node_bound = request.speculation.most_nodes if self.wants_drafts else 1
        self.max_len = self.prompt_len + request.max_new_tokens + self.node_bound
        self.form: OutputForm | None = None
        self.stop_ids = (
            request.stop_token_ids if request.ignore_eos else request.stop_token_ids | eos_token_ids
        )
        if request.grammar is not None:
            self.form = OutputForm(request.grammar, request.constraint, request.prompt_ids)
            # The end of a form ends the output even with `ignore_eos`.
            self.stop_ids |= frozenset(request.grammar.ends())
        self.ruled = (
            not request.sampling.rules.neutral
            or request.logprobs.top is not None
            or request.states.wanted
            or self.form is not None
        )
        self.tapped = request.states.wanted or bool(request.logprobs.token_ids and self.ruled)
        self.states_len = request.states.start
        self.prompt_scored = max(1, request.logprobs.prompt_start)
        self.stats = SpeculationStats()
        self.resumptions = 0
        self.submitted_at = time.monotonic()
        self.admitted_at = 0.0
        self.first_token_at = 0.0
        self.last_emit_at = 0.0
        self.send_at = 0.0
        self.unsent: list[TokensEvent] = []
        self.paused_at: float | None = None
        self.prefix_hash = FNV_OFFSET
        self._hashed_len = 0

    @property
    def committed_len(self) -> int:
        """Number of committed tokens, including the root."""
        return len(self.tokens)

    @property
    def reserved_len(self) -> int:
        """Number of KV slots of the lease. Other threads may read this property for statistics."""
        lease = self.lease
        return 0 if lease is None else len(lease.pages) * self.page_size

    @property
    def end_len(self) -> int:
        """Upper bound of committed_len."""
        return self.prompt_len + self.request.max_new_tokens

    @property
    def committed_upper(self) -> int:
        """Upper bound of committed_len once the passes in flight have ended."""
        return min(self.committed_len + self.tokens_ahead, self.end_len)

    @property
    def remaining(self) -> int:
        """Number of tokens that the sequence may still emit."""
        return self.end_len - len(self.tokens)

    @property
    def stores_features(self) -> bool:
        """True if the feature rows of the prompt are captured when a drafter needs feature rows."""
        return self.wants_drafts or self.shares_features

    @property
    def sharable_len(self) -> int:
        """Largest number of leading tokens of the sequence that may come from the prefix cache.

        The last token is always computed. Prompt tokens are also computed if the client wants their logprobs
        or states, and has not received them yet. To get the logprob of a token, the token before it must be
        computed.
        """
        last = len(self.tokens) - 1
        if self.request.states.wanted:
            last = min(last, self.states_len)
        if self.request.logprobs.prompt_top is None or self.prompt_scored >= self.prompt_len:
            return last
        return min(last, self.prompt_scored - 1)

    @property
    def has_features(self) -> bool:
        """True if the sequence wants drafts and every cached token has its feature row."""
        return self.wants_drafts and self.feature_len == self.cached_len

    @property
    def speculates(self) -> bool:
        """True if the request allows draft nodes at all."""
        return (
            self.request.speculation.mode is not SpeculationMode.OFF and self.request.speculation.shape.drafts
        )

    @property
    def never_drafts(self) -> str:
        """Fallback reason of every round if `wants_drafts` is False. Otherwise an empty string."""
        if self.wants_drafts:
            return ""
        return NO_DRAFT_REASON if self.speculates else USER

    @property
    def plain_by(self) -> str:
        """The party that chose plain decoding.

        Valid only if no round had draft nodes although drafting was possible.
        """
        if not self.speculates:
            return USER
        # Prefill emits the first token, and a round emits at least one. A limit of two tokens thus leaves
        # nothing to draft.
        return "length" if self.request.max_new_tokens <= 2 else "controller"

    def advance(self, emitted: list[int]) -> Advance:
        """Append the tokens that a pass has chosen, up to the first stop token or the length limit.

        All later tokens are dropped. Lengths, usage and noise positions do not include dropped tokens.
        """
        kept, finish, matched = emitted, None, None
        stop_ids, remaining = self.stop_ids, self.remaining
        for index, token in enumerate(emitted):
            if token in stop_ids:
                kept, finish, matched = emitted[: index + 1], FinishReason.STOP, token
                break
            if index + 1 == remaining:
                kept, finish = emitted[: index + 1], FinishReason.LENGTH
                break
        self.tokens.extend(kept)
        return Advance(kept, len(emitted) - len(kept), finish, matched)

    def fence(self) -> Fence:
        """Return a fence that identifies the current state. Only tokens since the last call are hashed."""
        if self._hashed_len < len(self.tokens):
            self.prefix_hash = extend_prefix_hash(self.prefix_hash, self.tokens[self._hashed_len :])
            self._hashed_len = len(self.tokens)
        return Fence(self.session_id, self.epoch, len(self.tokens), self.prefix_hash)

    def has_left(self, residence: int) -> bool:
        """Return True if the sequence has left the slot that it had during this residence."""
        return self.residence != residence or self.slot < 0

    def check(self) -> None:
        """Assert that the lengths are in the order of the module docstring."""
        reserved = self.reserved_len
        assert 0 <= self.cached_len <= len(self.tokens), (self.cached_len, len(self.tokens))
        if self.lease is not None:
            assert len(self.tokens) <= reserved <= self.max_len + self.page_size - 1, (
                len(self.tokens),
                reserved,
                self.max_len,
            )
