"""The gateway's Prometheus metrics. /metrics returns them together with the target's metrics."""

from __future__ import annotations

from outrider.services.gateway.keys.key_metrics import KeyMetrics
from outrider.services.gateway.request import FINISH_NAMES, Finished
from outrider.shared.obs.metrics import REQUEST_BUCKETS_S, TOKEN_BUCKETS_S, Metrics


class GatewayMetrics:
    """All metrics of the gateway."""

    def __init__(self) -> None:
        self._metrics = metrics = Metrics()
        self.time_to_first_token = metrics.histogram(
            "time_to_first_token_seconds", "Time from submission to the first token.", REQUEST_BUCKETS_S
        )
        self.inter_token_latency = metrics.histogram(
            "inter_token_latency_seconds", "Time between tokens, averaged over a chunk.", TOKEN_BUCKETS_S
        )
        self.e2e_latency = metrics.histogram(
            "e2e_request_latency_seconds", "Time from submission to the last token.", REQUEST_BUCKETS_S
        )
        self.queue_time = metrics.histogram(
            "request_queue_time_seconds", "Time spent in the target's queue.", REQUEST_BUCKETS_S
        )
        self.prompt_tokens = metrics.counter("prompt_tokens", "Prompt tokens of finished sequences.")
        self.generation_tokens = metrics.counter("generation_tokens", "Generated tokens.")
        self.success = metrics.counter("request_success", "Finished sequences.", ["finished_reason"])
        self.failures = metrics.counter("request_failures", "Failed sequences, by reason.", ["reason"])
        self.http_requests = metrics.counter("http_requests", "HTTP requests.", ["route", "status"])
        self.active = metrics.gauge("gateway_requests_active", "Admitted sequences that have not finished.")
        self.waiting = metrics.gauge("gateway_requests_waiting", "Admitted sequences that have no token yet.")
        self.waiting_tokens = metrics.gauge(
            "gateway_prompt_tokens_waiting", "Prompt tokens of waiting sequences."
        )
        self.keys = KeyMetrics(metrics)
        self.target_ready = metrics.gauge("gateway_target_ready", "1 if the target is connected and serving.")

    def finished(self, one: Finished, queue_s: float) -> None:
        """Record a finished sequence."""
        self.e2e_latency.observe(one.e2e_s)
        self.queue_time.observe(queue_s)
        self.prompt_tokens.inc(one.usage.prompt_tokens)
        self.generation_tokens.inc(one.usage.completion_tokens)
        self.success.labels(FINISH_NAMES[one.reason]).inc()

    def render(self) -> str:
        """Return the metrics in Prometheus text format."""
        return self._metrics.render()
