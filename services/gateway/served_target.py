"""The target's self-description (`ServedTarget`: model, limits, default tree) and load (`TargetStats`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from outrider.shared.base.errors import ModelNotFoundError


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """Information about the target: its model, its limits and its speculation.

    `num_steps`, `topk` and `num_draft_tokens` are the default tree shape. `max_steps`, `max_topk` and
    `max_nodes` limit the speculation options of requests. `resumes` is whether the target can go on with an
    answer that another target has begun, and `constrains` whether it can enforce a form of the output.
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


@dataclass(frozen=True, slots=True)
class AutoDecision:
    """The current choice of mode `auto`, and its reason.

    Attributes:
        reason: Such as ``pays`` or ``does_not_pay``. Empty if the target does not report it.
        shapes: (depth, topk, max_nodes, rows) of the rows that draft.
        plain_rows: Number of `auto` rows that decode plainly.
        batch_size: Number of rows of the round, including those in other modes.
        estimated_speedup: Speed of the best choice, relative to plain decoding. None if unknown.
        round_ms: Estimated duration of a round. None if unknown.
        looks_lost_ms: Time lost by rounds that tried shapes which were not estimated to be the best.
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
    """The target's cache of prefixes.

    Attributes:
        enabled: False if the cache is turned off.
        queried_tokens, hit_tokens: Number of prompt tokens of all admitted requests, and number of those
            whose K/V was stored already.
        pages: Number of stored pages.
        evicted_pages: Number of pages that were evicted.
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
    """The target's current load, its totals since its start, and its metrics as Prometheus text."""

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


def unknown_model(model: str, names: Sequence[str]) -> ModelNotFoundError:
    """Return the error of a request for a model that is not among the served `names`."""
    known = ", ".join(repr(name) for name in names)
    return ModelNotFoundError(
        f"The model {model[:128]!r} does not exist. Models served here: {known}.", field="model"
    )
