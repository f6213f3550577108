"""The arithmetic of benchmark figures: floors, ratios, percentiles, idle shares and load summaries."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from outrider.bench.load.open_loop import Experience, Load, summarise_load
from outrider.bench.load.serve import serve_rows
from outrider.bench.measure.clock import measure, percentile, summarise_times
from outrider.bench.measure.floors import (
    QuantizedSizes,
    draft_step,
    forward_work,
    prefill,
    speculative_round,
    target_parameters,
)
from outrider.bench.measure.idle import summarise_kernels
from outrider.bench.measure.latency import parse_shapes
from outrider.bench.measure.roofline import Ceilings
from outrider.bench.report.record import Result, Row
from outrider.bench.report.source import PARTS
from outrider.bench.stacks.shapes import named_shape
from outrider.shared.base.errors import ConfigurationError

LLAMA = named_shape("llama3.1-8b")


def test_the_floor_of_the_8b_shape_is_the_measured_one() -> None:
    config = LLAMA.model_config()
    assert target_parameters(config) * 2 == pytest.approx(15.01e9, rel=1e-3)
    assert draft_step(LLAMA.head, 1, 2).nbytes == pytest.approx(0.699e9, rel=1e-3)
    step = forward_work(config, rows=1, sequences=1, context=0, itemsize=2)
    assert Ceilings(4.53e12, 8e14).seconds(step.nbytes, step.flops) * 1e3 == pytest.approx(3.31, abs=0.01)
    cached = forward_work(config, 1, 1, 1000, 2).nbytes - step.nbytes
    assert cached == 1000 * 32 * 2 * 8 * 128 * 2


def test_narrow_numbers_are_read_as_such() -> None:
    config = LLAMA.model_config()
    wide, narrow = (
        forward_work(config, 1, 1, 1000, 2, sizes) for sizes in (None, QuantizedSizes(products=1, cache=1))
    )
    assert narrow.nbytes == wide.nbytes / 2, "including the output head"
    assert narrow.flops == wide.flops


def test_a_round_is_its_steps_and_its_verification() -> None:
    config = LLAMA.model_config()
    parts = speculative_round(config, LLAMA.head, batch=4, steps=5, topk=8, nodes=32, context=0, itemsize=2)
    assert len(parts) == 7
    assert sum(part.nbytes for part in parts) == pytest.approx(15.01e9 + 5 * 0.699e9 + 0.101e9, rel=1e-3)
    halved = speculative_round(config, LLAMA.head, 4, 5, 8, 32, 0, 2, share=0.5)
    assert sum(part.nbytes for part in parts) - sum(part.nbytes for part in halved) == pytest.approx(
        15.01e9 / 2, rel=1e-3
    )
    assert parts[1].flops == 8 * parts[0].flops, "the extend has one row per sequence, a beam has topk"


def test_a_prefill_is_bound_by_arithmetic() -> None:
    work = prefill(LLAMA.model_config(), 2048, 2)
    assert work.flops == pytest.approx(
        2 * 6.98e9 * 2048 + 2 * 0.525e9 + 32 * 4 * 32 * 128 * 2048 * 2049 / 2, rel=0.01
    )
    assert Ceilings(4.5e12, 8e14).bound(work.nbytes, work.flops) == "flops"
    assert Ceilings(4.5e12, 8e14).bound(1e12, 0) == "bytes"


def test_ratios_are_at_least_one_for_times_and_rates() -> None:
    assert Row("a", 6.0, "ms", 3.0).ratio == 2.0
    assert Row("a", 300.0, "GB/s", 600.0).ratio == 2.0
    assert Row("a", 300.0, "GB/s").ratio is None
    assert Row("a", 6.0, "ms", 3.0, "bytes", {"batch": 4}).as_json() == {
        "case": "a", "value": 6.0, "unit": "ms", "floor": 3.0, "floor_of": "bytes", "ratio": 2.0, "batch": 4,
    }  # fmt: skip


def test_a_result_says_what_ran_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/outrider", "bench", "thing", "--output", "/home/me/out.json"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/some-pipes")
    monkeypatch.setenv("OUTRIDER_API_KEY", "secret")
    path = Result("thing", {"device": "cpu"}, [Row("a", 1.0, "ms", 0.5)], {"profiles": {}}).save(tmp_path)
    assert path == tmp_path / "thing-cpu.json"
    written = json.loads(path.read_text())
    assert written["command"] == ["outrider", "bench", "thing", "--output", "out.json"], (
        "paths are reduced to names"
    )
    assert written["environment"].items() >= {
        ("CUDA_VISIBLE_DEVICES", "2,0"),
        ("CUDA_MPS_PIPE_DIRECTORY", "some-pipes"),
    }
    assert "secret" not in path.read_text()
    assert set(written["source"]["trees"]) == set(PARTS)
    assert 1 <= written["machine"]["cores_used"] <= written["machine"]["cores"]
    assert written["rows"][0]["ratio"] == 2.0
    assert "profiles" in written
    assert (
        Result("thing", {"device": "cuda:1"}, []).save(tmp_path / "x" / "own.json")
        == tmp_path / "x" / "own.json"
    )


def test_percentiles_interpolate() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    assert summarise_times([3.0, 1.0, 2.0]).median == 2.0


def test_work_is_timed_per_copy() -> None:
    x = torch.zeros(1000)
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        x.add_(1.0)

    once = measure(work, torch.device("cpu"), samples=3, sample_s=1e-4)
    assert once.samples == 3
    assert 0 < once.p10 <= once.median <= once.p90
    assert len(calls) >= 5


def test_idle_time_is_what_no_kernel_covers() -> None:
    # Rounds of 100 µs: two kernels 1 µs apart, then 20 µs idle. One kernel overlaps the next.
    rounds = [
        (start, [(0, 40_000, "a"), (41_000, 80_000, "b"), (60_000, 70_000, "c")])
        for start in range(0, 4_000_000, 100_000)
    ]
    intervals = [
        (begin + start, begin + end, name) for begin, kernels in rounds for start, end, name in kernels
    ]
    profile = summarise_kernels(intervals)
    assert profile is not None
    assert profile.idle == pytest.approx(0.21, abs=0.015)
    assert profile.idle_between == pytest.approx(0.20, abs=0.015)
    assert profile.longest_gap_us == 20.0
    assert profile.kernels[0][0] == "a"
    assert profile.kernels[0][3] == pytest.approx(0.4, abs=0.02)
    assert summarise_kernels(intervals[:3]) is None


def test_kinds_of_rounds_are_parsed_or_refused() -> None:
    plain, chain, tree = parse_shapes(["plain", "chain5@2.6", "5/8/32"], 3.5)
    assert plain.tree is None
    assert (chain.label, chain.accept_length) == ("chain 5", 2.6)
    assert chain.tree is not None
    assert chain.tree.max_nodes == 6
    assert (tree.label, tree.accept_length) == ("tree 5/8/32", 3.5)
    assert parse_shapes(["plain:1+4", "5/8/32@3:2"], 3.5)[0].batches == (1, 4)
    assert parse_shapes(["plain:1+4", "5/8/32@3:2"], 3.5)[1].batches == (2,)
    for wrong in (
        "plain:0",
        "plain:1,2",
        "chain3:x",
        "chain",
        "5/8",
        "0/1/2",
        "5/1/1",
        "tree",
        "5/8/32@x",
        "chain0",
    ):
        with pytest.raises(ConfigurationError) as refused:
            parse_shapes([wrong], 3.5)
        assert refused.value.field == "--rounds"


def test_arrivals_are_a_poisson_process_that_repeats_itself() -> None:
    moments = Load(50.0, 40.0, seed=3).arrivals()
    assert moments == Load(50.0, 40.0, seed=3).arrivals()
    assert moments != Load(50.0, 40.0, seed=4).arrivals()
    assert len(moments) == pytest.approx(2000, rel=0.1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread == pytest.approx(mean, rel=0.1), "an exponential distribution's deviation equals its mean"
    assert len(Load(0.001, 1.0).arrivals()) == 1


def test_a_load_is_summed_up() -> None:
    answered = Experience(
        sent=0.0, chunks=[0.1, 0.2, 0.4], ended=0.4, tokens=7, accept_length=3.0, draft_tokens=9
    )
    slow = Experience(sent=1.0, chunks=[2.0, 2.1], ended=2.1, tokens=3, accept_length=1.5, draft_tokens=4)
    failed = Experience(sent=1.0, ended=2.5, error="no")
    summary = summarise_load([answered, slow, failed], first_token_limit_ms=500.0, per_token_limit_ms=None)
    assert (summary.requests, summary.failed, summary.errors) == (3, 1, ["no"])
    assert summary.first_token[50] == pytest.approx(550)
    assert summary.between[50] == pytest.approx(100)
    assert summary.per_token[50] == pytest.approx(50)
    assert summary.request_rate == pytest.approx(2 / 2.5)
    assert summary.good_rate == pytest.approx(1 / 2.5)
    assert summary.token_rate == pytest.approx(10 / 2.5)
    assert summary.tokens_per_request == 5
    load = Load(2.0, 3.0)
    rows = serve_rows(summary, summary, load)
    assert all(row.ratio is not None for row in rows), "every figure needs a floor"
    assert rows[-2].floor == pytest.approx(5 * len(load.arrivals()) / 3.0), "a mean of five tokens a request"
    assert (rows[-1].value, rows[-1].floor) == (summary.accept_length, summary.accept_length)
    assert summarise_load([answered, slow, failed], None, None, lasted_s=4.0).request_rate == pytest.approx(
        2 / 4.0
    )
    assert summary.accept_length == pytest.approx((3.0 * 7 + 1.5 * 3) / 10)
