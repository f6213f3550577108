"""Requests that are known to be valid, and what comes of them: frozen data between the surfaces, the core and the target client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

MASK_64 = (1 << 64) - 1
MAX_STOPS = 4


class SpeculationMode(Enum):
    """`ON`: exactly the given shape every round. `AUTO`: the target's controller decides. `OFF`: plain decoding."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class FinishReason(Enum):
    """Why a sequence ended; the values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. `temperature` 0 is greedy; `top_k` 0 is off; `seed` is the request's 64-bit seed."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice_index: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """What a request says of speculation; None takes the target's default. `max_nodes` includes the root."""

    mode: SpeculationMode = SpeculationMode.AUTO
    depth: int | None = None
    topk: int | None = None
    max_nodes: int | None = None
    trace: bool = False


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a sequence beside its length, and how its text is rendered."""

    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_string: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate.

    Attributes:
        request_id: Unique among the running sequences of this gateway.
        prompt_ids: At least one token id, each within the target's vocabulary.
        max_new_tokens: At least 1; prompt and new tokens fit in the target's context.
        deadline: Time of the event loop's clock after which the sequence is given up.
        cache_salt: Separates prefix caches of different clients.
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
    """One node of a verified tree; `logprob` is the draft's."""

    token: int
    parent: int
    depth: int
    logprob: float


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round. `base_len` is committed_len before it; `accepted` are node indices in path order, the root excluded."""

    round: int
    base_len: int
    nodes: tuple[TraceNode, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    draft_ms: float
    verify_ms: float


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Speculation over one sequence. `accept_length` covers the rounds that verified at least one draft node, `rounds` all."""

    accept_length: float = 0.0
    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_histogram: tuple[int, ...] = ()
    fallback_reason: str = ""
    speedup_estimate: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one sequence."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TargetDelta:
    """Tokens that the target emitted at one moment, with their rounds if the request asked for a trace."""

    token_ids: tuple[int, ...]
    rounds: tuple[RoundTrace, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetFinish:
    """The target's last word on a sequence. `matched_token` is the stop or EOS token that ended it; times in seconds."""

    reason: FinishReason
    matched_token: int | None
    usage: Usage
    speculation: SpeculationStats
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Started:
    """The first word of the target on one sequence has come."""

    prompt_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one sequence: text that is final, the tokens it came from, and with trace at most one round."""

    text: str
    token_ids: tuple[int, ...]
    rounds: tuple[RoundTrace, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one sequence. `matched_stop` is the stop string or the stop token that ended it."""

    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    speculation: SpeculationStats
    e2e_s: float


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """What happened to one sequence of a request; `index` counts the sequences in order."""

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
        """The whole text."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        """All emitted tokens, a stop token included."""
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def rounds(self) -> list[RoundTrace]:
        """All traced rounds."""
        return [one for chunk in self.chunks for one in chunk.rounds]


def merge_usage(finished: Sequence[Finished], choices_per_prompt: int) -> Usage:
    """Sum over sequences; a prompt that several choices share counts once."""
    first_choices = finished[::choices_per_prompt]
    return Usage(
        prompt_tokens=sum(one.usage.prompt_tokens for one in first_choices),
        completion_tokens=sum(one.usage.completion_tokens for one in finished),
        cached_tokens=sum(one.usage.cached_tokens for one in first_choices),
    )


def merge_speculation(stats: Sequence[SpeculationStats]) -> SpeculationStats:
    """Sum over sequences. Accept lengths are weighted by the rounds that drafted, as far as these can be told from the sums."""
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
    # accept_length = 1 + accepted / drafted rounds; with nothing accepted only an upper bound is known.
    if stats.accepted_tokens and stats.accept_length > 1:
        return stats.accepted_tokens / (stats.accept_length - 1)
    return float(stats.rounds) if stats.draft_tokens else 0.0
