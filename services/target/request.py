"""What a client asks for, parsed and valid, and what it is told: frozen data that crosses threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from outrider.shared.base.errors import InvalidRequestError, OutriderError
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

MAX_SEED = (1 << 64) - 1
DEFAULT_SHAPE = DraftShape(depth=5, topk=4, max_nodes=16)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token follows from the logits; neutral by default.

    Attributes:
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 is off.
        top_p: Keep the smallest set of tokens that holds this much probability; 1 is off.
        min_p: Drop tokens less likely than this share of the likeliest; 0 is off.
        seed: 64 bits that key the noise.
        choice_index: Which of the n answers to one prompt this is.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice_index: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequestError(
                f"temperature must be a finite number of at least 0, not {self.temperature}.",
                field="temperature",
            )
        if not 0 <= self.top_k < 1 << 31:
            raise InvalidRequestError(
                f"top_k must be at least 0 (0 is off), not {self.top_k}.", field="top_k"
            )
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(
                f"top_p must be above 0 and at most 1, not {self.top_p}.", field="top_p"
            )
        if not 0 <= self.min_p <= 1:
            raise InvalidRequestError(f"min_p must lie between 0 and 1, not {self.min_p}.", field="min_p")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequestError("seed must fit in 64 bits without a sign.", field="seed")
        if not 0 <= self.choice_index < 1 << 16:
            raise InvalidRequestError(
                f"choice_index must be below 65536, not {self.choice_index}.", field="choice_index"
            )


class SpeculationMode(Enum):
    """`ON`: exactly the given shape every round. `AUTO`: the controller, within the shape. `OFF`: none."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """How a request wants to be drafted for, within the server's caps.

    Attributes:
        mode: See `SpeculationMode`.
        shape: Of every round (`ON`), or the largest one (`AUTO`).
        trace: Whether the client wants to see every round.
        chain: `AUTO` may choose chains up to this one, too; `NO_DRAFT` for none but those within `shape`.
    """

    mode: SpeculationMode
    shape: DraftShape
    trace: bool = False
    chain: DraftShape = NO_DRAFT

    @property
    def forms(self) -> tuple[DraftShape, ...]:
        """The largest tree and the longest chain that rounds may have; one of them where the other is none."""
        if self.shape.topk == 1:
            return (self.chain if self.chain.depth > self.shape.depth else self.shape,)
        return (self.shape, self.chain) if self.chain.drafts else (self.shape,)

    @property
    def most_nodes(self) -> int:
        """Nodes of the largest round, the root included."""
        return max(form.max_nodes for form in self.forms)


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """The server's default shape and its caps.

    A request above a cap is refused, never clamped: a client that measures shapes must not measure another one.

    Attributes:
        default: The shape of requests that name none.
        max_steps, max_topk, max_nodes: Caps.
        longest_chain: Levels of the longest chain that `AUTO` may choose where a request bounds neither depth nor nodes; chains within
            the request's own bounds it may always choose.
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
        """Fill in the defaults and check the caps.

        Raises:
            InvalidRequestError: A value is 0 or above its cap; names the field.
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
        """Return the longest chain within what a request asks for, and within the server's own bounds where it asks for nothing."""
        levels = max(self.default.depth, self.longest_chain) if depth is None else depth
        nodes = max(self.default.max_nodes, self.longest_chain + 1) if max_nodes is None else max_nodes
        levels = min(levels, nodes - 1)
        return DraftShape(levels, 1, levels + 1) if levels else NO_DRAFT


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate.

    Attributes:
        request_id: The client's name for it, unique among the live requests of one stream.
        prompt_ids: At least one token id.
        max_new_tokens: Upper bound of emitted tokens, at least 1.
        stop_token_ids: Tokens that end the sequence; they are emitted as its last token.
        ignore_eos: Whether the model's own end-of-sequence tokens do not end it.
        deadline: `time.monotonic()` after which it fails; None waits for ever.
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


class FinishReason(Enum):
    """Why a sequence ended well."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TraceNode:
    """A node of a verified tree; `logprob` is the draft's own."""

    token: int
    parent: int
    depth: int
    logprob: float


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One verified round of one sequence. `base_len` is committed_len before it; `accepted` are node indices without the root."""

    round: int
    base_len: int
    nodes: Sequence[TraceNode]
    accepted: Sequence[int]
    emitted: Sequence[int]
    draft_ms: float
    verify_ms: float


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """Speculation over a whole request; the identities between the numbers are in `speculation.SpeculationStats`."""

    accept_length: float
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    accepted_histogram: Sequence[int]
    fallback_reason: str
    speedup_estimate: float | None


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """Tokens that one step emitted for one request."""

    request_id: str
    token_ids: Sequence[int]
    rounds: Sequence[RoundTrace] = ()


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The request is over; nothing follows. `matched_token` is the stop token that ended it, if one did (it was emitted)."""

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
    """The request failed; nothing follows."""

    request_id: str
    error: OutriderError = field(compare=False)


Event = TokensEvent | FinishedEvent | FailedEvent


class EventSink(Protocol):
    """Where the events of some requests go, e.g. one gateway's stream. Called on the engine thread; must not block."""

    def deliver(self, events: Sequence[Event]) -> None:
        """Take the events of one engine step, in order."""
        ...
