"""Metrics per API key. The label `key` is the key's name, never the key."""

from __future__ import annotations

from outrider.shared.obs.metrics import Metrics


class KeyMetrics:
    """Prometheus counters and gauges with one series per API key.

    Attributes:
        requests: Number of requests that were admitted under the limit of requests per minute.
        refusals: Number of requests that were refused by a limit or because the key lacks a permission.
        tokens: Number of prompt tokens and of generated tokens.
        active: Number of sequences that wait or run.
        file_ok: 0 if the keys file has changed and could not be read, otherwise 1.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.requests = metrics.counter("key_requests", "Requests, by the name of the API key.", ["key"])
        self.refusals = metrics.counter(
            "key_refusals",
            "Requests refused by a limit or a missing permission of the key.",
            ["key", "reason"],
        )
        self.tokens = metrics.counter(
            "key_tokens", "Prompt and generated tokens, by the name of the API key.", ["key", "kind"]
        )
        self.active = metrics.gauge(
            "key_sequences_active", "Sequences that wait or run, by the name of the API key.", ["key"]
        )
        self.file_ok = metrics.gauge("api_keys_file_ok", "0 if the changed file of API keys is not valid.")
        self.file_ok.set(1)
