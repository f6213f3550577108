"""A parsed request, the limits of its speculation, and the events that answer it. All types are immutable.

`SpeculationLimits.resolve` fills in the defaults of speculation. A request without a `speculation` object
gets the mode `auto` and the target's default tree shape (`SpeculationLimits.default`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.services.target.grammar.matcher import Grammar
from outrider.shared.base.constraint import Constraint
from outrider.shared.base.errors import InvalidRequestError, OutriderError
from outrider.shared.base.generation import (
    FinishReason,
    RoundTrace,
    SamplingParams,
    SpeculationMode,
    SpeculationReport,
)
from outrider.shared.base.logit_rules import NO_LOGPROBS, LogprobParams, TokenLogprob
from outrider.shared.base.token_states import NO_STATES, StateParams, TokenStates
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

DEFAULT_SHAPE = DraftShape(depth=5, topk=4, max_nodes=16)


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """The speculation parameters of one request, within the server's caps.

    Attributes:
        mode: `ON` for a fixed tree shape, `AUTO` for shapes that the speculation controller chooses, or
            `OFF`.
        shape: The tree shape of every round (`ON`), or the largest shape of a round (`AUTO`).
        trace: True if the client receives a trace of every round.
        chain: The longest chain that `AUTO` may choose as an alternative to shapes within `shape`. With
            `NO_DRAFT`, there is no such alternative.
    """

    mode: SpeculationMode
    shape: DraftShape
    trace: bool = False
    chain: DraftShape = NO_DRAFT

    @property
    def forms(self) -> tuple[DraftShape, ...]:
        """The largest shapes that a round may have: a tree, a chain, or both."""
        if self.shape.topk == 1:
            return (self.chain if self.chain.depth > self.shape.depth else self.shape,)
        return (self.shape, self.chain) if self.chain.drafts else (self.shape,)

    @property
    def most_nodes(self) -> int:
        """Number of nodes of the largest round, including the root."""
        return max(form.max_nodes for form in self.forms)


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """The server's default tree shape, and its caps on the shapes that requests may ask for.

    A request above a cap is refused, not clamped. A client that measures a shape must not get results for
    another shape.

    Attributes:
        default: The shape of requests that do not specify a shape.
        max_steps, max_topk, max_nodes: The caps on depth, branching and number of nodes.
        longest_chain: Depth of the longest chain that `AUTO` may choose if the request limits neither depth
            nor nodes. Chains within the request's own limits are always allowed.
    """

    default: DraftShape = DEFAULT_SHAPE
    max_steps: int = 16
    max_topk: int = 16
    max_nodes: int = 128
    longest_chain: int = 0

    def resolve(
        self,
        mode: SpeculationMode = SpeculationMode.AUTO,
        *,
        depth: int | None = None,
        topk: int | None = None,
        max_nodes: int | None = None,
        trace: bool = False,
    ) -> SpeculationParams:
        """Fill in the defaults for absent fields of a request's `speculation`, and check the caps.

        The default of `mode` is `AUTO`. If `depth`, `topk` or `max_nodes` is None, its value comes from
        `default`.

        Raises:
            InvalidRequestError: A value is below 1 or above its cap. The error names the field.
        """
        for name, value, cap in (
            ("depth", depth, self.max_steps),
            ("topk", topk, self.max_topk),
            ("max_nodes", max_nodes, self.max_nodes),
        ):
            if value is not None and not 1 <= value <= cap:
                hint = " 1 means no draft nodes." if name == "max_nodes" and value < 1 else ""
                raise InvalidRequestError(
                    f"speculation.{name} must be between 1 and {cap} on this server, not {value}.{hint}",
                    field=f"speculation.{name}",
                )
        shape = DraftShape(
            self.default.depth if depth is None else depth,
            self.default.topk if topk is None else topk,
            self.default.max_nodes if max_nodes is None else max_nodes,
        )
        chain = self._chain(depth, max_nodes) if mode is SpeculationMode.AUTO else NO_DRAFT
        return SpeculationParams(mode, shape.bounded(), trace, chain)

    def _chain(self, depth: int | None, max_nodes: int | None) -> DraftShape:
        """Return the longest chain within the request's limits. The server's limits replace absent limits."""
        levels = max(self.default.depth, self.longest_chain) if depth is None else depth
        nodes = max(self.default.max_nodes, self.longest_chain + 1) if max_nodes is None else max_nodes
        levels = min(levels, nodes - 1)
        return DraftShape(levels, 1, levels + 1) if levels else NO_DRAFT


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request to generate one sequence.

    Attributes:
        request_id: The identifier that the client has chosen, unique among the live requests of one stream.
        prompt_ids: The token ids of the prompt, at least one.
        max_new_tokens: Maximum number of emitted tokens, at least 1.
        sampling: The sampling parameters.
        speculation: The speculation parameters.
        stop_token_ids: Tokens that end the sequence. The stop token is emitted as the last token.
        ignore_eos: True if the model's end-of-sequence tokens do not end the sequence.
        deadline: Time at which the request fails, from `time.monotonic()`. None sets no deadline.
        priority: Requests with higher values are admitted first, and may displace requests with lower values.
        tenant: Name of the party whose requests share a part of the server. Empty if there is none.
        logprobs: The log-probabilities that the client wants.
        constraint: The constraint on the output. None if any output is allowed.
        grammar: The compiled constraint. None if there is no constraint.
        cache_salt: Only requests with the same salt share stored prefixes.
        traceparent: Trace context of the target's tracing span for this request. It is sent to the draft.
            Empty if the request is not traced.
        resume_ids: Tokens that another target has already emitted for this request. They count as output.
        states: The states of tokens that the client wants, such as hidden states.
        message_interval_s: Least time between two events with tokens, in seconds. The first tokens and the
            last ones are not delayed. 0 emits the tokens of each step at once.
    """

    request_id: str
    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams
    speculation: SpeculationParams
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    deadline: float | None = None
    priority: int = 0
    logprobs: LogprobParams = NO_LOGPROBS
    constraint: Constraint | None = None
    grammar: Grammar | None = None
    cache_salt: str = ""
    tenant: str = ""
    traceparent: str = ""
    resume_ids: Sequence[int] = ()
    states: StateParams = NO_STATES
    message_interval_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """Tokens that one engine step emitted for one request, or data about a part of its prompt.

    Attributes:
        request_id: The identifier from the request.
        token_ids: The emitted tokens.
        rounds: The rounds that chose the tokens, if the client wants a trace.
        logprobs: The log-probability of each token in `token_ids`, if the client wants them.
        prompt_logprobs: The log-probabilities of the next prompt tokens, if the client wants them. The first
            entry is for the token at index `prompt_start`, or at index 1 if `prompt_start` is 0.
        states: The states of tokens, such as hidden states, if the client wants them. Each event continues
            after the last token of the previous event. The last emitted token has no states yet.
        cached_tokens: In the first event with tokens: `FinishedEvent.cached_tokens`. 0 in later events.
        draft_tokens: Number of draft nodes that the tokens' round verified. None for tokens of a prefill.
        accepted_tokens: Number of draft nodes that the round accepted.
    """

    request_id: str
    token_ids: Sequence[int]
    rounds: Sequence[RoundTrace] = ()
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()
    states: TokenStates | None = None
    cached_tokens: int = 0
    draft_tokens: int | None = None
    accepted_tokens: int = 0

    @classmethod
    def joined(cls, events: Sequence[TokensEvent]) -> TokensEvent:
        """Return one event for consecutive events of a request, which have neither prompt data nor states."""
        if len(events) == 1:
            return events[0]
        drafted = [one.draft_tokens for one in events if one.draft_tokens is not None]
        return cls(
            events[0].request_id,
            [token for one in events for token in one.token_ids],
            [trace for one in events for trace in one.rounds],
            [logprob for one in events for logprob in one.logprobs],
            draft_tokens=sum(drafted) if drafted else None,
            accepted_tokens=sum(one.accepted_tokens for one in events),
        )


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The request has finished. No further event of this request follows.

    Attributes:
        request_id: The identifier from the request.
        reason: The reason why the request finished.
        matched_token: The stop token that ended the request. It was also emitted. None if the request ended
            for another reason.
        prompt_tokens, completion_tokens: Number of prompt tokens, and number of emitted tokens.
        speculation: Statistics of the request's speculation.
        queue_s, prefill_s, decode_s: Seconds in the queue, in prefill and in decoding.
        cached_tokens: Number of prompt tokens whose K/V was stored already when the request started.
    """

    request_id: str
    reason: FinishReason
    matched_token: int | None
    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationReport
    queue_s: float
    prefill_s: float
    decode_s: float
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """The request has failed. No event follows."""

    request_id: str
    error: OutriderError = field(compare=False)


Event = TokensEvent | FinishedEvent | FailedEvent


class EventSink(Protocol):
    """Receives the events of one or more requests. Called on the engine thread, so it must not block."""

    def deliver(self, events: Sequence[Event]) -> None:
        """Receive the events of one engine step, in order."""
        ...
