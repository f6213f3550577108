"""Prometheus helpers: one registry per service, a common name prefix, shared bucket edges, text output.

The helpers never use the default registry of the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

# The library would add a gauge with the time of creation to each counter and histogram.
disable_created_metrics()  # type: ignore[no-untyped-call]

PREFIX = "outrider"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REQUEST_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
STEP_BUCKETS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.002,
    0.004,
    0.008,
    0.016,
    0.032,
    0.064,
    0.128,
    0.256,
    0.512,
    1.0,
    2.0,
)


class Metrics:
    """A service's metrics.

    Pass all names without the prefix, and pass names of counters without ``_total``, which the library
    appends.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def counter(self, name: str, help_text: str, labels: Iterable[str] = ()) -> Counter:
        """Register a counter ``outrider_<name>_total``."""
        return Counter(name, help_text, tuple(labels), namespace=PREFIX, registry=self.registry)

    def gauge(self, name: str, help_text: str, labels: Iterable[str] = ()) -> Gauge:
        """Register a gauge ``outrider_<name>``."""
        return Gauge(name, help_text, tuple(labels), namespace=PREFIX, registry=self.registry)

    def histogram(
        self, name: str, help_text: str, buckets: Iterable[float], labels: Iterable[str] = ()
    ) -> Histogram:
        """Register a histogram ``outrider_<name>``. `buckets` are upper edges, in the metric's unit."""
        return Histogram(
            name, help_text, tuple(labels), namespace=PREFIX, registry=self.registry, buckets=tuple(buckets)
        )

    def render(self) -> str:
        """Return the metrics in Prometheus text format."""
        return generate_latest(self.registry).decode("utf-8")


def join_expositions(own: str, others: Sequence[tuple[Mapping[str, str], str]]) -> str:
    """Append other services' metrics to this service's. Each metric family appears once in the result.

    Args:
        own: This service's metrics, in Prometheus text format. A family of `others` with the same name is
            skipped.
        others: For each other service, the labels to add to its samples, and its metrics in text format. If
            several of these services have the same family, its samples are joined under the help text of the
            first service.
    """
    ours = {line.split(" ", 3)[2] for line in own.splitlines() if line.startswith("# TYPE ")}
    heads: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for labels, text in others:
        added = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, family, *_ = line.split(" ", 3)
                if family not in ours:
                    heads.setdefault(family, {}).setdefault(kind, line)
            elif line and not line.startswith("#") and family not in ours:
                samples.setdefault(family, []).append(_labelled(line, added))
    body = own if own.endswith("\n") or not own else own + "\n"
    lines = [line for family, head in heads.items() for line in (*head.values(), *samples.get(family, ()))]
    return body + "".join(f"{line}\n" for line in lines)


def _labelled(sample: str, added: str) -> str:
    """Return a sample line with more labels before its own."""
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        rest = sample[brace + 1 :]
        return f"{sample[:brace]}{{{added}{',' if added and not rest.startswith('}') else ''}{rest}"
    return f"{sample[:space]}{{{added}}}{sample[space:]}" if added else sample


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
