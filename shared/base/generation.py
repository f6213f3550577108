"""Sampling parameters, finish reasons and round traces: types shared by the gateway and the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.logit_rules import NO_RULES, LogitRules

MAX_SEED = (1 << 64) - 1


class SpeculationMode(Enum):
    """How a request uses speculation.

    Attributes:
        AUTO: The target chooses the shape of the draft tree in each round.
        ON: Every round uses exactly the shape of the draft tree that the request specifies.
        OFF: Plain decoding.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class FinishReason(Enum):
    """Why a sequence ended without an error."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the logits. The default values leave the distribution unchanged.

    Attributes:
        temperature: Divisor of the logits. 0 means greedy decoding.
        top_k: Keep the k most likely tokens; 0 disables the filter.
        top_p: Keep the smallest set of most likely tokens with at least this total probability; 1 disables
            the filter.
        min_p: Drop tokens whose probability is below this fraction of the highest probability; 0 disables the
            filter.
        seed: 64-bit seed of the sampling noise.
        choice_index: Index of this sequence among the `n` sequences that the client requested for one prompt.
        rules: Rules that change the logits before the temperature and the filters apply, such as penalties.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice_index: int = 0
    rules: LogitRules = NO_RULES

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequestError(
                f"temperature must be a finite number of at least 0, not {self.temperature}.",
                field="temperature",
            )
        if not 0 <= self.top_k < 1 << 31:
            raise InvalidRequestError(
                f"top_k must be at least 0 (0 disables it), not {self.top_k}.", field="top_k"
            )
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(
                f"top_p must be above 0 and at most 1, not {self.top_p}.", field="top_p"
            )
        if not 0 <= self.min_p <= 1:
            raise InvalidRequestError(f"min_p must be between 0 and 1, not {self.min_p}.", field="min_p")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequestError("seed must be an unsigned 64-bit integer.", field="seed")
        if not 0 <= self.choice_index < 1 << 16:
            raise InvalidRequestError(
                f"choice_index must be between 0 and 65535, not {self.choice_index}.", field="choice_index"
            )


@dataclass(frozen=True, slots=True)
class TraceNode:
    """One node of a verified draft tree, as reported to a client that requested a trace.

    Attributes:
        token: Token id.
        parent: Index of the parent node, or -1 for the root.
        depth: Distance from the root.
        logprob: Natural logarithm of the probability that the draft gave the token.
        text: The text that the token adds after its parent. The gateway sets `text` if the gateway has a
            tokenizer.
    """

    token: int
    parent: int
    depth: int
    logprob: float
    text: str | None = None


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """Trace of one speculation round of one request.

    Attributes:
        round: Number of the round. The target counts the rounds of all requests together.
        base_len: Number of committed tokens before the round. The root is the token at index `base_len - 1`.
        nodes: The verified tree. Node 0 is the root, and parents precede their children.
        accepted: Indices of the accepted nodes in `nodes`, in order from the root. The root is not included.
        emitted: Tokens that the round added to the sequence.
        draft_ms: Time spent on drafting, in milliseconds.
        verify_ms: Time spent on verification, in milliseconds.
        emitted_text: For each emitted token, the text that the token completes. For the token that ends
            an answer, its name, such as ``<|im_end|>``. The gateway sets this field if it has a tokenizer.
        reason: Why the round had no draft. With a draft in mode `auto`, the reason of the controller's
            decision. Empty with a draft in mode `on`.
    """

    round: int
    base_len: int
    nodes: Sequence[TraceNode]
    accepted: Sequence[int]
    emitted: Sequence[int]
    draft_ms: float
    verify_ms: float
    emitted_text: Sequence[str] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """Speculation statistics of one sequence.

    Attributes:
        accept_length: Mean number of tokens emitted per round, over the rounds that verified at least one
            draft node.
        rounds: Number of all rounds, including those without draft nodes.
        draft_tokens: Number of draft tokens that were verified.
        accepted_tokens: Number of draft tokens that were accepted.
        accepted_histogram: Element k is the number of rounds in which k draft tokens were accepted.
        fallback_reason: Why some rounds had no draft nodes. Empty if all rounds had draft nodes.
        speedup_estimate: Estimated speedup over plain decoding, or None if there is no estimate.
    """

    accept_length: float = 0.0
    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_histogram: Sequence[int] = ()
    fallback_reason: str = ""
    speedup_estimate: float | None = None
