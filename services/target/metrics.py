"""The target's Prometheus metrics. Names have the same stems as vLLM's, so that dashboards can be reused."""

from __future__ import annotations

from collections import Counter

from outrider.services.target.policy.controller import ExecutedStep, SpeculationController
from outrider.services.target.policy.cost_model import DraftPath
from outrider.services.target.policy.verdict import AutoReason, AutoVerdict
from outrider.services.target.scheduling.scheduler import Scheduler
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.kv.prefix_cache import PrefixStats
from outrider.shared.obs.metrics import REQUEST_BUCKETS_S, STEP_BUCKETS_S, TOKEN_BUCKETS_S, Metrics
from outrider.shared.spec.drafter import BACKING_OFF, WARMING, DrafterState

REASONS_OF_STATE = {
    DrafterState.ON: "on",
    DrafterState.NONE: "off",
    DrafterState.CONNECTING: "connecting",
    DrafterState.LATE: "late",
    DrafterState.DOWN: "draft_down",
}

# Fallback reasons of the engine, `DraftSessions` and the remote drafter. If a draft refuses a session for
# another reason, that reason is added when it first occurs.
FALLBACK_REASONS = (
    *(
        state.value
        for state in DrafterState
        if state is not DrafterState.ON and state is not DrafterState.NONE
    ),
    BACKING_OFF,
    WARMING,
    "bad_tree",
    "budget",
    "empty_tree",
    "misfit",
    "no_features",
    "no_proposal",
    "not_followed",
    "rejected",
    "resync",
)
MAX_DEPTHS = 16


class TargetMetrics:
    """The metrics of one engine, in a separate registry. Engine thread only, except for `render`.

    Attributes:
        drafted_on_device: True if the trees of the last drafted round stayed on the devices, and False if
            they passed through the host. None before the first drafted round.
    """

    def __init__(self) -> None:
        self.drafted_on_device: bool | None = None
        self.reset()

    def reset(self) -> None:
        """Reset all metrics by starting a new registry."""
        self._metrics = metrics = Metrics()
        histogram, counter, gauge = metrics.histogram, metrics.counter, metrics.gauge
        self._ttft = histogram(
            "time_to_first_token_seconds", "Time from submission to the first token.", REQUEST_BUCKETS_S
        )
        self._itl = histogram(
            "inter_token_latency_seconds", "Time between deliveries, per token.", TOKEN_BUCKETS_S
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds",
            "Time from submission to the end of a request.",
            REQUEST_BUCKETS_S,
        )
        self._queue = histogram(
            "request_queue_time_seconds", "Time from submission to admission.", REQUEST_BUCKETS_S
        )
        self._running = gauge("num_requests_running", "Admitted sequences; each has KV pages.")
        self._waiting = gauge("num_requests_waiting", "Sequences in the queue.")
        self._kv_usage = gauge("kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.")
        self._kv_tokens = gauge("kv_cache_tokens", "Slots of the KV cache, by use.", ("kind",))
        self._cached_tokens = gauge("prefix_cache_tokens", "Slots of the KV cache with stored prefixes.")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens that were looked up.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens whose K/V was stored already.")
        self._prefix_evictions = counter(
            "prefix_cache_evicted_tokens", "Slots of stored prefixes that other tokens needed."
        )
        self._prefixes_seen = PrefixStats()
        self._preemptions = counter("num_preemptions", "Sequences retracted because no page was free.")
        self._prompt = counter("prompt_tokens", "Prompt tokens of requests that emitted their first token.")
        self._generated = counter("generation_tokens", "Tokens emitted.")
        self._success = counter("request_success", "Requests that ended, by reason.", ("finished_reason",))
        self._drafts = counter(
            "spec_decode_num_drafts", "Rounds that verified at least one draft node, per sequence."
        )
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Draft nodes verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft nodes accepted.")
        self._per_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft nodes accepted, by depth from 0.", ("position",)
        )
        self._accepted_at = counter(
            "accepted_tokens", "Draft nodes accepted, by depth; the root is at depth 0.", ("depth",)
        )
        self._drafted_to = counter(
            "drafted_rounds",
            "Drafted rounds, per sequence, whose tree could reach a depth; the root is at depth 0.",
            ("depth",),
        )
        self._rpc_s = histogram(
            "draft_rpc_seconds",
            "Time from requesting a round's trees to receiving them, including work done meanwhile.",
            STEP_BUCKETS_S,
        )
        self._draft_s = histogram(
            "draft_seconds", "Time of drafting a round, or of the wait for its trees.", STEP_BUCKETS_S
        )
        self._verify_s = histogram(
            "verify_seconds", "Time of a round's verify pass, with sampling and compaction.", STEP_BUCKETS_S
        )
        self._round_s = histogram(
            "device_round_seconds", "Time of a round whose trees are not from the host.", STEP_BUCKETS_S
        )
        self._speedup = gauge(
            "estimated_speedup", "Tokens per second of drafting steps, relative to plain steps."
        )
        self._decision = gauge("auto_decision", "1 for the reason of auto's last decision.", ("reason",))
        self._auto_rows = gauge("auto_rows", "Rows in mode auto, by the shape that auto chose.", ("shape",))
        self._auto_speedup = gauge(
            "auto_estimated_speedup", "Estimated speed of auto's best choice, relative to plain decoding."
        )
        self._looks_lost = gauge(
            "auto_looks_lost_seconds", "Time lost by rounds that measured other shapes than the best."
        )
        self._shapes_seen: set[str] = set()
        self._graphs_left = gauge(
            "graphs_left", "CUDA graphs that will be recorded while no request is live."
        )
        self._state = gauge("speculation_state", "1 for the current state of speculation.", ("reason",))
        self._fallbacks = counter(
            "draft_fallback", "Rounds that requested draft nodes and got none, by reason.", ("reason",)
        )
        self._resyncs = counter("draft_resync", "Sequences that were reopened on the draft.")
        self._resyncs_seen = 0
        self._preemptions_seen = 0
        self._positions = [self._per_pos.labels(str(position)) for position in range(MAX_DEPTHS)]
        depths = range(1, MAX_DEPTHS + 1)
        self._depths = [self._accepted_at.labels(str(depth)) for depth in depths]
        self._drafted = [self._drafted_to.labels(str(depth)) for depth in depths]
        # Create every series now, because a rate over a missing series has no data.
        for reason in FALLBACK_REASONS:
            self._fallbacks.labels(reason)

    def first_token(self, sequence: Sequence, now: float) -> None:
        """Record the first token of a request."""
        self._ttft.observe(now - sequence.submitted_at)
        self._queue.observe(sequence.admitted_at - sequence.submitted_at)
        self._prompt.inc(sequence.prompt_len)
        self._generated.inc()

    def more_tokens(self, count: int, seconds: float) -> None:
        """Record `count` tokens that were delivered `seconds` after the previous delivery."""
        self._generated.inc(count)
        self._itl.observe(seconds / count)

    def finished(self, reason: str, seconds: float | None = None) -> None:
        """Record the end of a request."""
        self._success.labels(reason).inc()
        if seconds is not None:
            self._e2e.observe(seconds)

    def fell_back(self, reason: str) -> None:
        """Count a round that requested draft nodes and got none."""
        self._fallbacks.labels(reason).inc()

    def observe_round(self, step: ExecutedStep, draft_s: float, answer_s: float | None) -> None:
        """Record the measurements of an executed round in the Prometheus metrics.

        Args:
            step: The executed round.
            draft_s: Seconds of drafting on the device.
            answer_s: Seconds between the host's request for trees and the arrival of the trees. None if the
                host requested no trees.
        """
        self._verify_s.observe(step.verify_s)
        if step.path is not DraftPath.HOST:
            self._round_s.observe(step.round_s)
        if answer_s is not None:
            self._rpc_s.observe(answer_s)
        if step.requested:
            self.drafted_on_device = step.path is not DraftPath.HOST
            self._draft_s.observe(step.draft_s or draft_s)
            self._count_drafts(step)

    def _count_drafts(self, step: ExecutedStep) -> None:
        # Each counter takes a lock, so sum over the entries first.
        drafted = [entry for entry in step.entries if entry.num_nodes > 1]
        self._drafts.inc(len(drafted))
        self._draft_tokens.inc(sum(entry.num_nodes - 1 for entry in drafted))
        self._accepted.inc(sum(entry.accepted for entry in drafted))
        # A form can force more levels than the shape has.
        depths = [max(entry.accepted, min(entry.shape.depth, entry.num_nodes - 1)) for entry in drafted]
        for index in range(min(max(depths, default=0), MAX_DEPTHS)):
            self._drafted[index].inc(sum(depth > index for depth in depths))
            count = sum(entry.accepted > index for entry in drafted)
            self._positions[index].inc(count)
            self._depths[index].inc(count)

    def render(
        self,
        scheduler: Scheduler,
        state: DrafterState,
        resyncs: int,
        controller: SpeculationController,
        graphs_left: int = 0,
    ) -> str:
        """Set the gauges to their current values, and return all metrics as Prometheus text. Thread-safe."""
        allocator = scheduler.allocator
        sequences = tuple(scheduler.active)
        self._running.set(len(sequences))
        self._waiting.set(len(scheduler.waiting))
        self._kv_usage.set(1 - allocator.available_pages / allocator.num_pages)
        reserved = sum(sequence.reserved_len for sequence in sequences)
        self._kv_tokens.labels("committed").set(sum(sequence.cached_len for sequence in sequences))
        self._kv_tokens.labels("reserved").set(reserved)
        held = (allocator.num_pages - allocator.available_pages) * scheduler.page_size
        self._kv_tokens.labels("leaked").set(0 if sequences else held)
        self._tell_prefixes(scheduler.prefixes.stats(), scheduler.page_size)
        self._preemptions.inc(scheduler.num_retractions - self._preemptions_seen)
        self._preemptions_seen = scheduler.num_retractions
        self._resyncs.inc(resyncs - self._resyncs_seen)
        self._resyncs_seen = resyncs
        speedup = controller.speedup_estimate
        self._speedup.set(1.0 if speedup is None else speedup)
        self._tell_decision(controller.verdict)
        self._looks_lost.set(controller.lost_s)
        self._graphs_left.set(graphs_left)
        for known, reason in REASONS_OF_STATE.items():
            self._state.labels(reason).set(1 if known is state else 0)
        return self._metrics.render()

    def _tell_prefixes(self, stats: PrefixStats, page_size: int) -> None:
        seen, self._prefixes_seen = self._prefixes_seen, stats
        self._cached_tokens.set(stats.pages * page_size)
        self._prefix_queries.inc(max(0, stats.queried_tokens - seen.queried_tokens))
        self._prefix_hits.inc(max(0, stats.hit_tokens - seen.hit_tokens))
        self._prefix_evictions.inc(max(0, stats.evicted_pages - seen.evicted_pages) * page_size)

    def _tell_decision(self, verdict: AutoVerdict) -> None:
        for reason in AutoReason:
            self._decision.labels(reason.value).set(1 if verdict.reason is reason else 0)
        # Leave topk and nodes out of names, because each name is a series and requests can set many bounds.
        rows = Counter({"plain": verdict.plain_rows})
        for shape, count in verdict.shapes.items():
            rows[f"{'chain' if shape.topk == 1 else 'tree'} {shape.depth}"] += count
        self._shapes_seen |= rows.keys()
        for name in tuple(self._shapes_seen):
            self._auto_rows.labels(name).set(rows[name])
        self._auto_speedup.set(1.0 if verdict.speedup is None else verdict.speedup)
