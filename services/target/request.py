"""What a client asks for, parsed and valid, and what it is told: frozen data that crosses threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.shared.base.errors import InvalidRequestError, OutriderError
from outrider.shared.base.generation import (
    FinishReason,
    RoundTrace,
    SamplingParams,
    SpeculationMode,
    SpeculationReport,
)
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

DEFAULT_SHAPE = DraftShape(depth=5, topk=4, max_nodes=16)


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
