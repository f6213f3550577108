"""A parsed request, the limits of its speculation, and the events that answer it. All are immutable."""

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
    """How one request uses speculation, within the server's caps.

    Attributes:
        mode: Fixed shape, chosen by the controller, or off.
        shape: Shape of every round (`ON`), or the largest shape (`AUTO`).
        trace: Whether the client receives a trace of every round.
        chain: Longest chain that `AUTO` may choose beyond those within `shape`; `NO_DRAFT` for none.
    """

    mode: SpeculationMode
    shape: DraftShape
    trace: bool = False
    chain: DraftShape = NO_DRAFT

    @property
    def forms(self) -> tuple[DraftShape, ...]:
        """The largest tree and the longest chain that a round may have, or only one of them."""
        if self.shape.topk == 1:
            return (self.chain if self.chain.depth > self.shape.depth else self.shape,)
        return (self.shape, self.chain) if self.chain.drafts else (self.shape,)

    @property
    def most_nodes(self) -> int:
        """Nodes of the largest round, including the root."""
        return max(form.max_nodes for form in self.forms)


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """The server's default draft shape and its caps.

    A request above a cap is refused, never clamped. A client that measures a shape must not measure another
    one instead.

    Attributes:
        default: Shape of requests that specify none.
        max_steps, max_topk, max_nodes: Caps.
        longest_chain: Depth of the longest chain that `AUTO` may choose if the request bounds neither depth
            nor nodes. Chains within the request's own bounds are always allowed.
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
        """Fill in defaults and check the caps.

        Raises:
            InvalidRequestError: A value is 0 or above its cap; the error names the field.
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
        """Return the longest chain within the request's bounds, or within the server's where it sets none."""
        levels = max(self.default.depth, self.longest_chain) if depth is None else depth
        nodes = max(self.default.max_nodes, self.longest_chain + 1) if max_nodes is None else max_nodes
        levels = min(levels, nodes - 1)
        return DraftShape(levels, 1, levels + 1) if levels else NO_DRAFT


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one sequence.

    Attributes:
        request_id: Name given by the client, unique among the live requests of one stream.
        prompt_ids: At least one token id.
        max_new_tokens: Maximum number of emitted tokens, at least 1.
        sampling: How tokens are sampled.
        speculation: How drafts are used.
        stop_token_ids: Tokens that end the sequence. The stop token is emitted as the last token.
        ignore_eos: Whether the model's end-of-sequence tokens do not end the sequence.
        deadline: `time.monotonic()` at which the request fails; None for no deadline.
        priority: Higher values are admitted first.
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
    """The request has finished; no event follows.

    Attributes:
        request_id: As in the request.
        reason: Why it finished.
        matched_token: The stop token that ended it, which was emitted; None if it ended otherwise.
        prompt_tokens, completion_tokens: Number of tokens read and emitted.
        speculation: Speculation statistics.
        queue_s, prefill_s, decode_s: Seconds in the queue, in prefill and in decoding.
        cached_tokens: Prompt tokens read from a prefix cache; 0 without one.
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
    """The request failed; no event follows."""

    request_id: str
    error: OutriderError = field(compare=False)


Event = TokensEvent | FinishedEvent | FailedEvent


class EventSink(Protocol):
    """Receives the events of one or more requests. Called on the engine thread, so it must not block."""

    def deliver(self, events: Sequence[Event]) -> None:
        """Receive the events of one engine step, in order."""
        ...
