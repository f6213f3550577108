"""The engine's metrics after a request agree with the request's report."""

from __future__ import annotations

import torch
from support.engine.target_harness import (
    FakeDrafter,
    generate_plain,
    make_harness,
    oracle_plan,
    random_plan,
)

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.policy.verdict import AutoReason, AutoVerdict
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.tree import DraftShape

torch.set_num_threads(1)
VOCAB = 64
PROMPT = [5, 9, 2, 33, 7]


def test_metrics_count_what_happened(decoder: Decoder) -> None:
    harness = make_harness(decoder, FakeDrafter(random_plan(VOCAB)))
    harness.submit(PROMPT, 20, request_id="a")
    harness.run()
    text = harness.engine.prometheus_text()
    assert "outrider_generation_tokens_total 20.0" in text
    assert 'outrider_request_success_total{finished_reason="length"} 1.0' in text
    assert 'outrider_kv_cache_tokens{kind="leaked"} 0.0' in text
    assert 'outrider_speculation_state{reason="on"} 1.0' in text
    report = harness.sink.finished["a"].speculation
    assert f"outrider_spec_decode_num_draft_tokens_total {float(report.draft_tokens)}" in text


def test_the_accepted_tokens_of_all_rows_of_a_round_count(decoder: Decoder) -> None:
    prompts = {"a": PROMPT, "b": [1, 2, 3]}
    plain = {name: generate_plain(decoder, NoDrafter(), prompt, 60) for name, prompt in prompts.items()}
    texts = [prompts[name] + plain[name] for name in prompts]
    harness = make_harness(decoder, FakeDrafter(oracle_plan(texts, VOCAB, 0.6)))
    for name, prompt in prompts.items():
        harness.submit(prompt, 40, request_id=name)
    harness.run()
    text = harness.engine.prometheus_text()
    reports = [harness.sink.finished[name].speculation for name in prompts]
    assert all(report.accepted_tokens for report in reports)
    assert f"num_accepted_tokens_total {float(sum(one.accepted_tokens for one in reports))}" in text
    assert f"num_draft_tokens_total {float(sum(one.draft_tokens for one in reports))}" in text
    for depth in range(1, max(len(one.accepted_histogram) for one in reports)):
        count = sum(sum(one.accepted_histogram[depth:]) for one in reports)
        assert f'outrider_accepted_tokens_total{{depth="{depth}"}} {float(count)}' in text


def test_metrics_tell_depths_fallbacks_and_round_trips(decoder: Decoder) -> None:
    plain = generate_plain(decoder, NoDrafter(), PROMPT, 60)
    harness = make_harness(decoder, FakeDrafter(oracle_plan([PROMPT + plain], VOCAB, 0.7)))
    assert 'outrider_draft_fallback_total{reason="draft_down"} 0.0' in harness.engine.prometheus_text()
    harness.submit(PROMPT, 40, request_id="a")
    harness.run()
    text = harness.engine.prometheus_text()
    report = harness.sink.finished["a"].speculation
    assert report.accepted_tokens > 0
    by_depth = [sum(report.accepted_histogram[depth:]) for depth in range(1, len(report.accepted_histogram))]
    for depth, count in enumerate(by_depth, 1):
        assert f'outrider_accepted_tokens_total{{depth="{depth}"}} {float(count)}' in text
        assert (
            f'outrider_spec_decode_num_accepted_tokens_per_pos_total{{position="{depth - 1}"}} {float(count)}'
            in text
        )
    assert f"outrider_draft_rpc_seconds_count {float(report.rounds)}" in text
    assert 'outrider_draft_fallback_total{reason="late"} 0.0' in text


def test_metrics_count_the_rounds_that_drafted_to_each_depth(decoder: Decoder) -> None:
    harness = make_harness(decoder, FakeDrafter(random_plan(VOCAB)))
    for request_id, depth in (("deep", 4), ("flat", 2)):
        harness.submit(PROMPT, 12, request_id=request_id, shape=(depth, 1, depth + 1), trace=True)
    harness.run()
    drafted = [
        max(node.depth for node in one.nodes)
        for request_id in ("deep", "flat")
        for one in harness.sink.rounds[request_id]
    ]
    assert {2, 3} <= set(drafted)
    text = harness.engine.prometheus_text()
    for depth in range(1, 6):
        count = sum(one >= depth for one in drafted)
        assert f'outrider_drafted_rounds_total{{depth="{depth}"}} {float(count)}' in text


def test_metrics_tell_what_auto_has_decided(decoder: Decoder) -> None:
    harness = make_harness(decoder, FakeDrafter(random_plan(VOCAB)))
    assert 'outrider_auto_decision{reason="idle"} 1.0' in harness.engine.prometheus_text()
    for shapes, plain_rows in (({DraftShape(3, 1, 4): 2}, 1), ({}, 3)):
        reason = AutoReason.PAYS if shapes else AutoReason.DOES_NOT_PAY
        harness.engine.controller.verdict = AutoVerdict(reason, shapes, plain_rows, 3, 1.5, 0.004)
        text = harness.engine.prometheus_text()
        assert f'outrider_auto_decision{{reason="{reason.value}"}} 1.0' in text
        assert 'outrider_auto_decision{reason="idle"} 0.0' in text
        assert f'outrider_auto_rows{{shape="chain 3"}} {float(sum(shapes.values()))}' in text
        assert f'outrider_auto_rows{{shape="plain"}} {float(plain_rows)}' in text
        assert "outrider_auto_estimated_speedup 1.5" in text
    assert harness.engine.stats().verdict.reason is AutoReason.DOES_NOT_PAY


def test_resources_tell_memory_graphs_and_the_path_of_the_drafts(decoder: Decoder) -> None:
    harness = make_harness(decoder, FakeDrafter(random_plan(VOCAB)))
    used = harness.engine.resources()
    assert used.weight_bytes == decoder.weight_bytes > 0
    assert used.kv_bytes > 0
    assert used.process_bytes > 2**20
    assert (used.gpu_used_bytes, used.gpu_total_bytes) == (0, 0)
    assert (used.graphs_recorded, used.graphs_left, used.draft_transport) == (0, 0, "none")
    assert used.draft_on_device is None
    harness.submit(PROMPT, 20, request_id="a")
    harness.run()
    assert harness.engine.resources().draft_on_device is False
