"""The gateway's Prometheus metrics. /metrics returns them together with the target's metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from outrider.services.gateway.keys.key_metrics import KeyMetrics
from outrider.services.gateway.recent_load import RecentLoad
from outrider.services.gateway.request import FINISH_NAMES, Finished, drafted_rounds
from outrider.services.gateway.request_note import current_note
from outrider.services.gateway.target_client.member import Member
from outrider.shared.base.version import installed_version
from outrider.shared.obs.metrics import REQUEST_BUCKETS_S, TOKEN_BUCKETS_S, Metrics


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """The metrics of the sequences of one model.

    Attributes:
        time_to_first_token: Time from submission to the first token, in seconds.
        inter_token_latency: Time between tokens, in seconds.
        e2e_latency: Time from submission to the last token, in seconds.
        queue_time: Time in the target's queue, in seconds.
        prompt_tokens: Number of prompt tokens of finished sequences.
        generation_tokens: Number of generated tokens.
    """

    time_to_first_token: Histogram
    inter_token_latency: Histogram
    e2e_latency: Histogram
    queue_time: Histogram
    prompt_tokens: Counter
    generation_tokens: Counter


class GatewayMetrics:
    """All metrics of the gateway.

    The label `model` is a name that a target has reported, so clients cannot add values of it.

    Attributes:
        began_s: Time of the gateway's start, from `time.monotonic()`.
        recent: The load of the last two minutes, which /status.json contains and /metrics does not.
    """

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.recent = RecentLoad()
        self._metrics = metrics = Metrics()
        build = metrics.gauge("build_info", "1; the label is the version of the gateway.", ["version"])
        build.labels(installed_version()).set(1)
        model = ["model"]
        self._of_all_models = ModelMetrics(
            time_to_first_token=metrics.histogram(
                "time_to_first_token_seconds",
                "Time from submission to the first token.",
                REQUEST_BUCKETS_S,
                model,
            ),
            inter_token_latency=metrics.histogram(
                "inter_token_latency_seconds",
                "Time between tokens, averaged over a chunk.",
                TOKEN_BUCKETS_S,
                model,
            ),
            e2e_latency=metrics.histogram(
                "e2e_request_latency_seconds",
                "Time from submission to the last token.",
                REQUEST_BUCKETS_S,
                model,
            ),
            queue_time=metrics.histogram(
                "request_queue_time_seconds", "Time spent in the target's queue.", REQUEST_BUCKETS_S, model
            ),
            prompt_tokens=metrics.counter("prompt_tokens", "Prompt tokens of finished sequences.", model),
            generation_tokens=metrics.counter(
                "generation_tokens", "Generated tokens, also of sequences that broke off.", model
            ),
        )
        self._by_model: dict[str, ModelMetrics] = {}
        self.success = metrics.counter("request_success", "Finished sequences.", ["model", "finished_reason"])
        self._failures = metrics.counter(
            "request_failures", "Requests that were refused or failed, by reason.", ["model", "reason"]
        )
        self.moved = metrics.counter(
            "gateway_moved_sequences",
            "Sequences that went on at another target, by reason.",
            ["model", "reason"],
        )
        self.http_requests = metrics.counter("http_requests", "HTTP requests.", ["route", "status"])
        self.active = metrics.gauge("gateway_requests_active", "Admitted sequences that have not finished.")
        self.waiting = metrics.gauge("gateway_requests_waiting", "Admitted sequences that have no token yet.")
        self.waiting_tokens = metrics.gauge(
            "gateway_prompt_tokens_waiting", "Prompt tokens of waiting sequences."
        )
        self.keys = KeyMetrics(metrics)
        self.target_ready = metrics.gauge("gateway_target_ready", "1 if a target is connected and serving.")
        uptime = metrics.gauge("gateway_uptime_seconds", "Time since the gateway's start.")
        uptime.set_function(lambda: time.monotonic() - self.began_s)
        labels = ["model", "target"]
        self.ready_targets = metrics.gauge(
            "gateway_ready_targets", "1 if this target is connected and serving, or else 0.", labels
        )
        self.target_load = metrics.gauge(
            "gateway_target_load_tokens",
            "Prompt tokens and expected new tokens of the gateway's sequences on this target.",
            labels,
        )
        self.lost_connections = metrics.counter(
            "gateway_target_connections_lost", "Lost connections to this target.", labels
        )

    def of_model(self, model: str) -> ModelMetrics:
        """Return the metrics of the sequences of a model. `model` is the name that its target reports."""
        if model not in self._by_model:
            all_models = self._of_all_models
            self._by_model[model] = ModelMetrics(
                all_models.time_to_first_token.labels(model),
                all_models.inter_token_latency.labels(model),
                all_models.e2e_latency.labels(model),
                all_models.queue_time.labels(model),
                all_models.prompt_tokens.labels(model),
                all_models.generation_tokens.labels(model),
            )
        return self._by_model[model]

    def show_targets(self, members: Sequence[Member]) -> None:
        """Set the metrics of each target. Remove the metrics of targets that are no longer listed."""
        for metric in (self.ready_targets, self.target_load, self.lost_connections):
            metric.clear()
        for one in members:
            self.ready_targets.labels(**one.labels).set(one.client.ready)
            self.target_load.labels(**one.labels).set(one.load)
            self.lost_connections.labels(**one.labels).inc(one.client.connections_lost)
            if model := one.labels["model"]:
                self.of_model(model)  # so that counters begin with 0
        self.target_ready.set(any(one.client.ready for one in members))

    def finished(self, model: str, one: Finished, queue_s: float, counted_tokens: int) -> None:
        """Record a finished sequence.

        Args:
            model: Name of the model, as its target reports it.
            one: The end of the sequence.
            queue_s: Time in the target's queue, in seconds.
            counted_tokens: Number of the sequence's tokens that `generation_tokens` already contains.
        """
        metrics = self.of_model(model)
        metrics.e2e_latency.observe(one.e2e_s)
        metrics.queue_time.observe(queue_s)
        metrics.prompt_tokens.inc(one.usage.prompt_tokens)
        metrics.generation_tokens.inc(max(0, one.usage.completion_tokens - counted_tokens))
        self.success.labels(model, FINISH_NAMES[one.reason]).inc()
        self.recent.add_rounds(one.speculation.accepted_tokens, drafted_rounds(one.speculation))

    def failed(self, reason: str) -> None:
        """Count the current request, which was refused or failed. `RecentErrors` calls this method."""
        note = current_note.get()
        self._failures.labels("" if note is None else note.model, reason).inc()

    def render(self) -> str:
        """Return the metrics in Prometheus text format."""
        return self._metrics.render()
