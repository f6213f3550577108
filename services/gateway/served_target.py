"""The target's self-description (`ServedTarget`: model, limits, default tree) and load (`TargetStats`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from outrider.shared.base.errors import ModelNotFoundError
from outrider.shared.base.resources import ResourceStats


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """The gateway's information about a target: its model, its limits and its speculation.

    `num_steps`, `topk` and `num_draft_tokens` define the default tree shape. `max_steps`, `max_topk` and
    `max_nodes` limit the speculation options of requests. `resumes` is true if the target can continue an
    answer that another target has begun. `constrains` is true if the target can enforce a form of the output.
    `reports_states` is true if it can report hidden states, routed experts and logprobs of named tokens.
    `routed_layers` and `experts_per_token` are the sizes of a token's routed experts: the number of layers
    and the number of experts per layer. Both are 0 if the model has none. `model_path` is the model's folder
    or its name on the hub. `tp_size` is the number of processes that share the model, or None if it is
    unknown. `page_size` is the number of tokens per page of the KV cache, or 0 if it is unknown.
    """

    model_id: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: str
    device: str
    fingerprint: str
    weight_version: str
    max_running_requests: int
    algorithm: str
    draft_model: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    max_steps: int
    max_topk: int
    max_nodes: int
    speculation_state: str
    resumes: bool = False
    constrains: bool = False
    reports_states: bool = False
    hidden_size: int = 0
    routed_layers: int = 0
    experts_per_token: int = 0
    model_path: str = ""
    tp_size: int | None = None
    page_size: int = 0


@dataclass(frozen=True, slots=True)
class AutoDecision:
    """The current decision of mode `auto` about how much to draft, and the reason for this decision.

    A row is a sequence in the target's decode batch.

    Attributes:
        reason: A word such as ``pays`` or ``does_not_pay``. Empty if the target does not report the reason.
        shapes: One entry (depth, topk, max_nodes, rows) per tree shape. The last number counts the rows that
            draft with this shape.
        plain_rows: Number of rows in mode `auto` that decode without speculation.
        batch_size: Number of rows in the round, including rows in other modes.
        estimated_speedup: Estimated speed of the chosen shapes, relative to plain decoding. None if unknown.
        round_ms: Estimated duration of a round, in milliseconds. None if unknown.
        looks_lost_ms: Time, in milliseconds, lost in rounds that tried a shape only to measure it. Such a
            shape was not estimated to be the best.
    """

    reason: str = ""
    shapes: tuple[tuple[int, int, int, int], ...] = ()
    plain_rows: int = 0
    batch_size: int = 0
    estimated_speedup: float | None = None
    round_ms: float | None = None
    looks_lost_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Statistics of the target's prefix cache.

    Attributes:
        enabled: Whether the cache is turned on.
        queried_tokens, hit_tokens: Number of prompt tokens of all admitted requests, and number of those
            tokens whose K/V was in the cache.
        pages: Number of cached pages.
        evicted_pages: Number of pages that were evicted so far.
    """

    enabled: bool = False
    queried_tokens: int = 0
    hit_tokens: int = 0
    pages: int = 0
    evicted_pages: int = 0

    @classmethod
    def total(cls, parts: Iterable[PrefixCacheStats]) -> PrefixCacheStats:
        """Return the sums over several targets."""
        given = list(parts)
        return cls(
            any(one.enabled for one in given),
            sum(one.queried_tokens for one in given),
            sum(one.hit_tokens for one in given),
            sum(one.pages for one in given),
            sum(one.evicted_pages for one in given),
        )

    def as_json(self) -> dict[str, int]:
        """Return the numbers by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TargetStats:
    """The target's current load, its totals since its start, and its metrics as Prometheus text.

    `waiting_prompt_tokens` is the number of prompt tokens of the waiting requests. `draft_tokens` and
    `accepted_tokens` are the numbers of draft tokens that were verified and accepted.
    `uptime_s` is the number of seconds since the target's process began to load, or None if it is unknown.
    """

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_held: int
    draft_state: str
    accept_length: float
    generated_tokens: int
    rounds: int
    prometheus_text: str
    auto: AutoDecision = AutoDecision()
    prefix_cache: PrefixCacheStats = PrefixCacheStats()
    resources: ResourceStats = field(default_factory=ResourceStats)
    waiting_prompt_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    uptime_s: float | None = None


def unknown_model(model: str, names: Sequence[str]) -> ModelNotFoundError:
    """Return the error for a request that names the model `model`, which is not among `names`."""
    known = ", ".join(repr(name) for name in names)
    return ModelNotFoundError(
        f"The model {model[:128]!r} does not exist. Models served here: {known}.", field="model"
    )
