"""Valid requests and their results: frozen data shared by both APIs, the core and the target client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

MASK_64 = (1 << 64) - 1
MAX_STOPS = 4


class SpeculationMode(Enum):
    """How a request uses speculation.

    Attributes:
        AUTO: The target's controller chooses the tree shape of each round.
        ON: Every round uses exactly the given shape.
        OFF: Plain decoding.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class FinishReason(Enum):
    """Why a sequence ended. The values are OpenAI's, except for `abort`, which OpenAI does not define."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled.

    Attributes:
        temperature: 0 selects greedy decoding.
        top_k: 0 disables the filter.
        top_p: 1 disables the filter.
        min_p: 0 disables the filter.
        seed: The 64-bit seed of the request.
        choice_index: Index of this choice among the `n` choices of its prompt.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice_index: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Speculation options of a request. None selects the target's default.

    Attributes:
        mode: How the request uses speculation.
        depth: Depth of the draft tree.
        topk: Branching of the draft tree.
        max_nodes: Nodes verified per round, including the root.
        trace: Whether the reply includes a trace of every round.
    """

    mode: SpeculationMode = SpeculationMode.AUTO
    depth: int | None = None
    topk: int | None = None
    max_nodes: int | None = None
    trace: bool = False


@dataclass(frozen=True, slots=True)
class StopRules:
    """Conditions other than the length that end a sequence, and options for its text."""

    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_string: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A valid request for one sequence.

    Attributes:
        request_id: Unique among the running sequences of this gateway.
        prompt_ids: At least one token id, each within the target's vocabulary.
        max_new_tokens: At least 1. The prompt and the new tokens fit in the target's context.
        sampling: How tokens are sampled.
        speculation: Speculation options.
        stop: Conditions that end the sequence, and options for its text.
        deadline: Time on the event loop's clock after which the sequence is aborted.
        priority: Requests with a higher priority leave the target's queue first.
        cache_salt: Separates the prefix caches of different clients.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    speculation: SpeculationParams
    stop: StopRules
    deadline: float
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class TraceNode:
    """One node of a verified tree.

    Attributes:
        token: Token id.
        parent: Index of the parent node; -1 for the root.
        depth: Distance from the root.
        logprob: Log-probability under the draft.
    """

    token: int
    parent: int
    depth: int
    logprob: float


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """Trace of one speculation round.

    Attributes:
        round: Number of the round within its sequence.
        base_len: Committed length before the round. The root is the token at `base_len - 1`.
        nodes: The verified tree. Node 0 is the root, and parents precede their children.
        accepted: Indices of the accepted nodes in path order, without the root.
        emitted: Tokens that the round added to the sequence.
        draft_ms: Time spent on drafting, in milliseconds.
        verify_ms: Time spent on verification, in milliseconds.
    """

    round: int
    base_len: int
    nodes: tuple[TraceNode, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    draft_ms: float
    verify_ms: float


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Speculation statistics of one sequence.

    Attributes:
        accept_length: Mean tokens emitted per round, over rounds that verified at least one draft node.
        rounds: Number of all rounds, including those without draft nodes.
        draft_tokens: Number of draft tokens that were verified.
        accepted_tokens: Number of draft tokens that were accepted.
        accepted_histogram: Element k is the number of rounds in which k draft tokens were accepted.
        fallback_reason: Why some rounds had no draft nodes; empty if all had some.
        speedup_estimate: Estimated speedup over plain decoding, if there is an estimate.
    """

    accept_length: float = 0.0
    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_histogram: tuple[int, ...] = ()
    fallback_reason: str = ""
    speedup_estimate: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one sequence."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TargetDelta:
    """Tokens that the target emitted together, with their rounds if the request asked for a trace."""

    token_ids: tuple[int, ...]
    rounds: tuple[RoundTrace, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetFinish:
    """The target's final report on a sequence.

    Attributes:
        reason: Why the sequence ended.
        matched_token: The stop or EOS token that ended the sequence, if any.
        usage: Token counts as reported by the target.
        speculation: Speculation statistics of the sequence.
        queue_s: Time in the queue, in seconds.
        prefill_s: Time in prefill, in seconds.
        decode_s: Time in decoding, in seconds.
    """

    reason: FinishReason
    matched_token: int | None
    usage: Usage
    speculation: SpeculationStats
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Started:
    """The target's first event for a sequence has arrived."""

    prompt_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one sequence: final text, its tokens, and at most one round if the request is traced."""

    text: str
    token_ids: tuple[int, ...]
    rounds: tuple[RoundTrace, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one sequence.

    Attributes:
        reason: Why the sequence ended.
        matched_stop: The stop string or stop token that ended the sequence, if any.
        usage: Token counts for the reply.
        speculation: Speculation statistics of the sequence.
        e2e_s: Time from submission to the end, in seconds.
    """

    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    speculation: SpeculationStats
    e2e_s: float


@dataclass(frozen=True, slots=True)
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

    @property
    def text(self) -> str:
        """The complete text."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        """All emitted tokens, including a stop token."""
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def rounds(self) -> list[RoundTrace]:
        """All traced rounds."""
        return [one for chunk in self.chunks for one in chunk.rounds]


def merge_usage(finished: Sequence[Finished], choices_per_prompt: int) -> Usage:
    """Return the sum over all sequences. A prompt shared by several choices counts once."""
    first_choices = finished[::choices_per_prompt]
    return Usage(
        prompt_tokens=sum(one.usage.prompt_tokens for one in first_choices),
        completion_tokens=sum(one.usage.completion_tokens for one in finished),
        cached_tokens=sum(one.usage.cached_tokens for one in first_choices),
    )


def merge_speculation(stats: Sequence[SpeculationStats]) -> SpeculationStats:
    """Return the sum over all sequences.

    Accept lengths are weighted by the number of rounds with draft nodes, which is estimated from the totals.
    """
    if len(stats) == 1:
        return stats[0]
    drafted_rounds = [_drafted_rounds(one) for one in stats]
    total_drafted = sum(drafted_rounds)
    accept_length = (
        sum(one.accept_length * rounds for one, rounds in zip(stats, drafted_rounds, strict=True))
        / total_drafted
        if total_drafted
        else 0.0
    )
    width = max((len(one.accepted_histogram) for one in stats), default=0)
    histogram = tuple(
        sum(one.accepted_histogram[k] for one in stats if k < len(one.accepted_histogram))
        for k in range(width)
    )
    estimates = [one.speedup_estimate for one in stats if one.speedup_estimate is not None]
    return SpeculationStats(
        accept_length=accept_length,
        rounds=sum(one.rounds for one in stats),
        draft_tokens=sum(one.draft_tokens for one in stats),
        accepted_tokens=sum(one.accepted_tokens for one in stats),
        accepted_histogram=histogram,
        fallback_reason=next((one.fallback_reason for one in stats if one.fallback_reason), ""),
        speedup_estimate=sum(estimates) / len(estimates) if estimates else None,
    )


def _drafted_rounds(stats: SpeculationStats) -> float:
    # accept_length = 1 + accepted / rounds with draft nodes. If nothing was accepted, use the upper bound.
    if stats.accepted_tokens and stats.accept_length > 1:
        return stats.accepted_tokens / (stats.accept_length - 1)
    return float(stats.rounds) if stats.draft_tokens else 0.0
