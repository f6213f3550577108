"""The target's self-description (`ServedTarget`: model, limits, default tree) and load (`TargetStats`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """Information about the target: its model, its limits and its speculation.

    `num_steps`, `topk` and `num_draft_tokens` are the default tree shape. `max_steps`, `max_topk` and
    `max_nodes` limit the speculation options of requests.
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
