"""Checked requests and their results: data that REST, gRPC, the core and the target client share.

Records of which each token needs one are not frozen, because creating a frozen record takes about three times
as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.shared.base.constraint import Constraint
from outrider.shared.base.generation import (
    FinishReason,
    RoundTrace,
    SamplingParams,
    SpeculationMode,
    SpeculationReport,
)
from outrider.shared.base.logit_rules import NO_LOGPROBS, LogprobParams, TokenLogprob
from outrider.shared.base.token_states import (
    NO_STATES,
    NO_TOKEN_STATES,
    StateParams,
    TokenStates,
    join_states,
)

FINISH_NAMES = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}
"""Names of finish reasons in REST replies and metrics. OpenAI defines all of them except `abort`."""


@dataclass(frozen=True, slots=True)
class RequestedSpeculation:
    """The speculation options that a client sets for a request. None selects the server's default.

    Attributes:
        mode: Whether the request uses speculation, or lets the server decide (AUTO). For None,
            `RequestBuilder.build` uses the gateway's setting `speculation_mode`.
        depth: Depth of the draft tree.
        topk: Branching factor of the draft tree.
        max_nodes: Largest number of tree nodes per round, including the root.
        trace: Whether the reply includes a trace of every round.
    """

    mode: SpeculationMode | None = None
    depth: int | None = None
    topk: int | None = None
    max_nodes: int | None = None
    trace: bool = False


@dataclass(frozen=True, slots=True)
class StopRules:
    """Conditions, apart from the length limit, that end a sequence, and options for the sequence's text.

    `regexes` are regular expressions. Within the first `min_tokens` tokens, neither a stop string nor a match
    of a regular expression ends the text.
    """

    strings: tuple[str, ...] = ()
    regexes: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_string: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0

    @property
    def searches(self) -> bool:
        """Return whether the text must be searched for its end."""
        return bool(self.strings or self.regexes)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request for one sequence.

    Attributes:
        request_id: Id that is unique among the running sequences of this gateway.
        prompt_ids: Token ids of the prompt. There is at least one, and each is within the target's
            vocabulary.
        max_new_tokens: Limit of new tokens, at least 1. The prompt and this many new tokens fit in the
            target's context.
        sampling: How tokens are sampled.
        speculation: Speculation options.
        stop: Conditions that end the sequence, and options for the sequence's text.
        deadline: Time, on the event loop's clock, at which the sequence is aborted.
        priority: Requests with a higher priority leave the target's queue first.
        cache_salt: Salt of the prefix cache. Requests with different salts share no cached prefixes.
        logprobs: The log-probabilities that the target reports.
        tenant: Name of the API key. The target divides its capacity fairly among tenants. Empty if the
            gateway has no keys.
        prompt_only: Whether to drop the output, because the client wants only logprobs of the prompt.
        constraint: The form that the output must have. None allows any output.
        traceparent: The request's span, sent to the target for tracing. Empty if the request is not traced.
        resume_ids: Tokens that another target emitted for this request before the connection to that target
            was lost. They count as output.
        states: The hidden states and routed experts that the target reports.
        streams: Whether the tokens are needed as they are generated: by a client that streams, or to find
            stop strings. Otherwise, the target collects tokens before it sends them.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    speculation: RequestedSpeculation
    stop: StopRules
    deadline: float
    priority: int = 0
    cache_salt: str = ""
    logprobs: LogprobParams = NO_LOGPROBS
    prompt_only: bool = False
    tenant: str = ""
    constraint: Constraint | None = None
    traceparent: str = ""
    resume_ids: tuple[int, ...] = ()
    states: StateParams = NO_STATES
    streams: bool = True


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one sequence."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(slots=True)
class TargetDelta:
    """A message of the target with new tokens of one sequence.

    If the request asked for traces or logprobs, the message also contains the tokens' rounds or logprobs.
    `prompt_logprobs` contains logprobs of prompt tokens, and `states` contains the states of tokens. Both
    continue where the previous message ended. `cached_tokens` is the number of prompt tokens whose K/V was
    stored already. Only the first message with tokens has it. `drafts` contains the numbers of draft nodes
    that the tokens' round verified and accepted. It is None for tokens of a prefill, or if the target does
    not report the numbers.
    """

    token_ids: Sequence[int]
    rounds: Sequence[RoundTrace] = ()
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()
    states: TokenStates | None = None
    cached_tokens: int = 0
    drafts: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class TargetFinish:
    """The target's final report on one sequence.

    Attributes:
        reason: Why the sequence ended.
        matched_token: The stop token or EOS token that ended the sequence, or None.
        usage: Token counts that the target reports.
        speculation: Speculation statistics of the sequence.
        queue_s: Time that the sequence spent in the target's queue, in seconds.
        prefill_s: Duration of the prefill, in seconds.
        decode_s: Time spent decoding, in seconds.
    """

    reason: FinishReason
    matched_token: int | None
    usage: Usage
    speculation: SpeculationReport
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Started:
    """Event: the target's first message for this sequence has arrived."""

    prompt_tokens: int
    seed: int
    prompt_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Chunk:
    """A piece of one sequence: final text, its tokens, and at most one round if the request is traced.

    If the request asked for logprobs, `logprobs` has one entry per token. `prompt_logprobs` contains logprobs
    of prompt tokens. They continue where the previous chunk ended. A chunk with logprobs of the prompt also
    contains the tokens of the whole prompt. If the request asked for hidden states or routed experts,
    `states` contains the states of the next tokens. `drafts` contains the numbers of verified and of accepted
    draft nodes of each round since the previous chunk. `cached_tokens` is the number of prompt tokens whose
    K/V was stored already.
    """

    text: str
    token_ids: Sequence[int]
    rounds: Sequence[RoundTrace] = ()
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()
    prompt_ids: tuple[int, ...] = ()
    states: TokenStates | None = None
    drafts: Sequence[tuple[int, int]] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The event that ends one sequence.

    Attributes:
        reason: Why the sequence ended.
        matched_stop: The stop string or stop token that ended the sequence, or None.
        usage: Token counts for the reply.
        speculation: Speculation statistics of the sequence.
        e2e_s: Time from the submission to the end of the sequence, in seconds.
    """

    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    speculation: SpeculationReport
    e2e_s: float


@dataclass(slots=True)
class ChoiceEvent:
    """An event of one sequence. `index` is the position of the sequence in its request."""

    index: int
    event: Started | Chunk | Finished


@dataclass(slots=True)
class Completion:
    """A finished sequence, collected from its events."""

    finished: Finished
    seed: int
    chunks: list[Chunk] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The complete text."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        """All emitted tokens, including a stop token."""
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """The logprobs of all emitted tokens."""
        return [one for chunk in self.chunks for one in chunk.logprobs]

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """The logprobs of the prompt's tokens."""
        return [one for chunk in self.chunks for one in chunk.prompt_logprobs]

    @property
    def states(self) -> TokenStates:
        """The states of all tokens, from the first token that the request asked for."""
        found = [chunk.states for chunk in self.chunks if chunk.states is not None]
        usage = self.finished.usage
        stop = usage.prompt_tokens + max(0, usage.completion_tokens - 1)
        return join_states(found).between(0, stop) or NO_TOKEN_STATES

    @property
    def rounds(self) -> list[RoundTrace]:
        """All traced rounds."""
        return [one for chunk in self.chunks for one in chunk.rounds]


def merge_usage(finished: Sequence[Finished], choices_per_prompt: int) -> Usage:
    """Return the token counts summed over all sequences. Count a prompt that several choices share once."""
    first_choices = finished[::choices_per_prompt]
    return Usage(
        prompt_tokens=sum(one.usage.prompt_tokens for one in first_choices),
        completion_tokens=sum(one.usage.completion_tokens for one in finished),
        cached_tokens=sum(one.usage.cached_tokens for one in first_choices),
    )


def merge_speculation(stats: Sequence[SpeculationReport]) -> SpeculationReport:
    """Return speculation statistics summed over the sequences of a request.

    The accept length is an average over the sequences, weighted by their numbers of rounds with draft nodes.
    These numbers are estimated from each sequence's totals.
    """
    if len(stats) == 1:
        return stats[0]
    weights = [drafted_rounds(one) for one in stats]
    total_drafted = sum(weights)
    accept_length = (
        sum(one.accept_length * rounds for one, rounds in zip(stats, weights, strict=True)) / total_drafted
        if total_drafted
        else 0.0
    )
    width = max((len(one.accepted_histogram) for one in stats), default=0)
    histogram = tuple(
        sum(one.accepted_histogram[k] for one in stats if k < len(one.accepted_histogram))
        for k in range(width)
    )
    estimates = [one.speedup_estimate for one in stats if one.speedup_estimate is not None]
    return SpeculationReport(
        accept_length=accept_length,
        rounds=sum(one.rounds for one in stats),
        draft_tokens=sum(one.draft_tokens for one in stats),
        accepted_tokens=sum(one.accepted_tokens for one in stats),
        accepted_histogram=histogram,
        fallback_reason=next((one.fallback_reason for one in stats if one.fallback_reason), ""),
        speedup_estimate=sum(estimates) / len(estimates) if estimates else None,
    )


def drafted_rounds(stats: SpeculationReport) -> float:
    """Return the estimated number of rounds with draft nodes."""
    # accept_length = 1 + accepted / rounds with draft nodes. If nothing was accepted, assume that every round
    # had draft nodes.
    if stats.accepted_tokens and stats.accept_length > 1:
        return stats.accepted_tokens / (stats.accept_length - 1)
    return float(stats.rounds) if stats.draft_tokens else 0.0
