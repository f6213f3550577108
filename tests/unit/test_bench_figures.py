"""The arithmetic behind every figure: floors, ratios, percentiles, idle shares, loads, and the table of recorded results."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.bench.clock import measure, percentile, summarise
from outrider.bench.floors import Narrow, draft_step, forward_pass, prefill, speculative_round, target_parameters
from outrider.bench.idle import summarise_kernels
from outrider.bench.latency import parse_shapes
from outrider.bench.load import Experience, Load, summarise_load
from outrider.bench.performance_goals import GOALS
from outrider.bench.performance_parts import ceiling_lines, kernel_lines, load_lines
from outrider.bench.performance_results import Recorded, Results
from outrider.bench.performance_table import NOT_MEASURED, TABLES, cost_lines, goal_lines, round_lines, run_table, time_lines
from outrider.bench.record import Result, Row
from outrider.bench.roofline import Ceilings
from outrider.bench.serve import serve_rows
from outrider.bench.shapes import named_shape
from outrider.shared.base.errors import ConfigurationError

LLAMA = named_shape("llama3.1-8b")
ROOT = Path(__file__).parents[2]


def test_the_floor_of_the_8b_shape_is_the_measured_one() -> None:
    config = LLAMA.model_config()
    assert target_parameters(config) * 2 == pytest.approx(15.01e9, rel=1e-3)
    assert draft_step(LLAMA.head, 1, 2).nbytes == pytest.approx(0.699e9, rel=1e-3)
    step = forward_pass(config, rows=1, sequences=1, context=0, itemsize=2)
    assert Ceilings(4.53e12, 8e14).seconds(step.nbytes, step.flops) * 1e3 == pytest.approx(3.31, abs=0.01)
    cached = forward_pass(config, 1, 1, 1000, 2).nbytes - step.nbytes
    assert cached == 1000 * 32 * 2 * 8 * 128 * 2


def test_narrow_numbers_are_read_as_such() -> None:
    config = LLAMA.model_config()
    wide, narrow = (forward_pass(config, 1, 1, 1000, 2, sizes) for sizes in (None, Narrow(products=1, cache=1)))
    assert narrow.nbytes == wide.nbytes / 2, "the output head too"
    assert narrow.flops == wide.flops


def test_a_round_is_its_steps_and_its_verification() -> None:
    config = LLAMA.model_config()
    parts = speculative_round(config, LLAMA.head, batch=4, steps=5, topk=8, nodes=32, context=0, itemsize=2)
    assert len(parts) == 7
    assert sum(part.nbytes for part in parts) == pytest.approx(15.01e9 + 5 * 0.699e9 + 0.101e9, rel=1e-3)
    halved = speculative_round(config, LLAMA.head, 4, 5, 8, 32, 0, 2, share=0.5)
    assert sum(part.nbytes for part in parts) - sum(part.nbytes for part in halved) == pytest.approx(15.01e9 / 2, rel=1e-3)
    assert parts[1].flops == 8 * parts[0].flops, "the extend has a row a sequence, a beam topk"


def test_a_prefill_is_bound_by_arithmetic() -> None:
    work = prefill(LLAMA.model_config(), 2048, 2)
    assert work.flops == pytest.approx(2 * 6.98e9 * 2048 + 2 * 0.525e9 + 32 * 4 * 32 * 128 * 2048 * 2049 / 2, rel=0.01)
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
    assert written["command"] == ["outrider", "bench", "thing", "--output", "out.json"], "no path of the machine"
    assert written["environment"].items() >= {("CUDA_VISIBLE_DEVICES", "2,0"), ("CUDA_MPS_PIPE_DIRECTORY", "some-pipes")}
    assert "secret" not in path.read_text()
    assert 1 <= written["machine"]["cores_used"] <= written["machine"]["cores"]
    assert written["rows"][0]["ratio"] == 2.0
    assert "profiles" in written
    assert Result("thing", {"device": "cuda:1"}, []).save(tmp_path / "x" / "own.json") == tmp_path / "x" / "own.json"


def test_percentiles_interpolate() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    assert summarise([3.0, 1.0, 2.0]).median == 2.0


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
    # Rounds of 100 µs: two kernels 1 µs apart, then 20 µs of nothing. One overlaps its successor.
    rounds = [(start, [(0, 40_000, "a"), (41_000, 80_000, "b"), (60_000, 70_000, "c")]) for start in range(0, 4_000_000, 100_000)]
    intervals = [(begin + start, begin + end, name) for begin, kernels in rounds for start, end, name in kernels]
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
    for wrong in ("plain:0", "plain:1,2", "chain3:x", "chain", "5/8", "0/1/2", "5/1/1", "tree", "5/8/32@x", "chain0"):
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
    assert spread == pytest.approx(mean, rel=0.1), "exponential gaps spread as much as they last"
    assert len(Load(0.001, 1.0).arrivals()) == 1


def test_a_load_is_summed_up() -> None:
    answered = Experience(sent=0.0, chunks=[0.1, 0.2, 0.4], ended=0.4, tokens=7, accept_length=3.0, draft_tokens=9)
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
    assert all(row.ratio is not None for row in rows), "every figure stands beside its floor"
    assert rows[-1].floor == pytest.approx(5 * len(load.arrivals()) / 3.0), "requests of five tokens each"
    assert summary.accept_length == pytest.approx((3.0 * 7 + 1.5 * 3) / 10)


def record(
    folder: Path,
    name: str,
    benchmark: str,
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    date: str = "2026-01-01",
    gpus: Sequence[str] = (),
) -> None:
    """Write one file of results."""
    content = {
        "benchmark": benchmark,
        "command": ["outrider", "bench", benchmark],
        "date": date,
        "machine": {"gpu_ids": gpus},
        "settings": settings,
        "rows": rows,
    }
    (folder / f"{name}.json").write_text(json.dumps(content))


def latency_row(case: str, value: float, **more: Any) -> dict[str, Any]:
    return {"case": case, "value": value, "unit": "ms", "floor": 3.3, "floor_of": "bytes", "ratio": value / 3.3, "batch": 1, **more}


SETTINGS = {"shape": "llama3.1-8b", "prompt": 512, "new_tokens": 384, "device": "cuda", "transport": "inproc"}


def line_of(folder: Path, what: str) -> str:
    return next(line for line in goal_lines(Results(folder)) if line.startswith(f"| {what} |"))


def test_the_table_shows_the_latest_fitting_result(tmp_path: Path) -> None:
    assert NOT_MEASURED in line_of(tmp_path, "round, chain of 5, batch 1")
    record(tmp_path, "old", "latency", SETTINGS, [latency_row("round chain 5, batch 1", 6.6)], "2026-01-01")
    record(tmp_path, "new", "latency", SETTINGS, [latency_row("round chain 5, batch 1", 5.2)], "2026-02-01")
    record(tmp_path, "cpu", "latency", SETTINGS | {"device": "cpu"}, [latency_row("round chain 5, batch 1", 1.0)], "2026-03-01")
    record(tmp_path, "other", "latency", SETTINGS | {"shape": "tiny"}, [latency_row("round chain 5, batch 1", 1.0)], "2026-03-01")
    record(tmp_path, "remote", "latency", SETTINGS | {"transport": "grpc"}, [latency_row("round chain 5, batch 1", 1.0)], "2026-03-01")
    line = line_of(tmp_path, "round, chain of 5, batch 1")
    assert "**5.20 ms** |" in line
    assert "3.30 ms (bytes) | 1.58 |" in line
    assert line.endswith("| new |")
    assert "- [new](../bench/results/new.json): `outrider bench latency` (2026-02-01 00:00 UTC, CPU)" in list(goal_lines(Results(tmp_path)))


def test_the_table_says_what_was_missed_and_compares_with_the_same_call(tmp_path: Path) -> None:
    rows = [
        latency_row("round chain 3, batch 64", 10.0, tok_s=15_000.0),
        latency_row("round tree 5/8/32, batch 1", 6.5, gpu_idle_between=0.02),
    ]
    record(tmp_path, "ours", "latency", SETTINGS, rows)
    record(tmp_path, "grpc", "latency", SETTINGS | {"transport": "grpc"}, [latency_row("round tree 5/8/32, batch 1", 6.6)])
    (tmp_path / "vllm.jsonl").write_text(
        json.dumps({"case": "run", "config": "chain3", "bs": 64, "tok_s": 14_000.0, "ms_round": 11.0}) + "\n"
    )
    assert "**6.50 ms** (missed)" in line_of(tmp_path, "round, tree 5/8/32, batch 1")
    against = line_of(tmp_path, "chain of 3, batch 64, tokens/s ÷ vLLM's")
    assert "**1.071 × (15,000 tok/s)** |" in against
    assert "vLLM 14,000 tok/s" in against
    assert "**1.015 × (6.60 ms)** |" in line_of(tmp_path, "`grpc:` on loopback ÷ in process")
    assert "**2.0 % (6.50 ms)** |" in line_of(tmp_path, "GPU idle between rounds, tree 5/8/32, batch 1")


def test_a_profiled_run_counts_for_idle_shares_only(tmp_path: Path) -> None:
    case = "round tree 5/8/32, batch 1"
    record(tmp_path, "best", "latency", SETTINGS, [latency_row(case, 5.4)], "2026-01-01")
    record(tmp_path, "profile", "latency", SETTINGS, [latency_row(case, 5.6, gpu_idle_between=0.01)], "2026-02-01")
    content = json.loads((tmp_path / "profile.json").read_text()) | {"profiles": {"tree 5/8/32, batch 1": {}}}
    (tmp_path / "profile.json").write_text(json.dumps(content))
    assert line_of(tmp_path, "round, tree 5/8/32, batch 1").endswith("| best |")
    assert line_of(tmp_path, "GPU idle between rounds, tree 5/8/32, batch 1").endswith("| profile |")


def test_the_table_tells_every_run_apart(tmp_path: Path) -> None:
    rows = [latency_row("round chain 3, batch 4", 4.9)]
    record(tmp_path, "ours", "latency", SETTINGS | {"mps": True, "transport": "ipc"}, rows, "2026-01-02T15:04:00Z", ["a"])
    content = json.loads((tmp_path / "ours.json").read_text())
    content["machine"] |= {"cores": 64, "cores_used": 16}
    content["environment"] = {"CUDA_MPS_PIPE_DIRECTORY": "pipe", "CUDA_VISIBLE_DEVICES": "1"}
    recorded = Recorded(tmp_path / "ours.json", content)
    assert recorded.command == "CUDA_VISIBLE_DEVICES=1 outrider bench latency"
    assert recorded.occasion == "2026-01-02 15:04 UTC, GPU a, 16 of 64 cores, with `nvidia-cuda-mps-control -d` running"
    content["command"].append("--mps")
    assert recorded.occasion.endswith("cores"), "the command says it"
    record(tmp_path, "plain", "latency", SETTINGS, rows)
    lines = [
        {"case": "machine", "date": "2026-01-02T15:00Z", "gpu": "an H200", "command": "run_vllm.py --configs chain3"},
        {"case": "run", "config": "chain3", "bs": 4, "ms_round": 5.9},
    ]
    (tmp_path / "vllm.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    assert list(goal_lines(Results(tmp_path)))[-1] == (
        "- [vllm](../bench/results/vllm.jsonl): `run_vllm.py --configs chain3` (2026-01-02T15:00Z; an H200)"
    )


def test_a_peer_is_compared_with_what_ran_in_its_call(tmp_path: Path) -> None:
    record(tmp_path, "later", "latency", SETTINGS, [latency_row("round chain 3, batch 4", 5.2)], "2026-02-01")
    call = tmp_path / "2026-01-02T1459Z"
    call.mkdir()
    record(call, "ours", "latency", SETTINGS, [latency_row("round chain 3, batch 4", 5.0)], "2026-01-02")
    lines = [{"case": "run", "config": config, "bs": 4, "ms_round": 6.0} for config in ("chain3", "plain")]
    (call / "vllm.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    against = line_of(tmp_path, "round, chain of 3, batch 4 ÷ vLLM's")
    assert "**0.833 × (5.00 ms)** |" in against
    assert against.endswith("| 2026-01-02T1459Z/ours |")
    commands = list(goal_lines(Results(tmp_path)))
    assert any(line.startswith("- [2026-01-02T1459Z/ours](../bench/results/2026-01-02T1459Z/ours.json): ") for line in commands)
    record(tmp_path, "plain", "latency", SETTINGS, [latency_row("round plain, batch 4", 4.0)])
    assert "| plain decode |  | 4.00 / 6.00 |  |  |" in list(round_lines(Results(tmp_path))), "the latest where the call has none of ours"


def test_runs_that_were_told_to_compute_otherwise_have_rows_of_their_own(tmp_path: Path) -> None:
    case = "round plain, batch 1"
    record(tmp_path, "early", "latency", SETTINGS, [latency_row(case, 4.0)], "2026-01-01T10:00:00Z")
    record(tmp_path, "fp8", "latency", SETTINGS | {"quantization": "fp8"}, [latency_row(case, 2.4)], "2026-01-01T10:01:00Z")
    record(tmp_path, "exact", "latency", SETTINGS | {"deterministic": "true"}, [latency_row(case, 5.0)], "2026-03-01")
    record(tmp_path, "late", "latency", SETTINGS | {"quantization": "none"}, [latency_row(case, 3.0)], "2026-02-01")
    assert "**3.00 ms** |" in line_of(tmp_path, "plain decode, batch 1, a step")
    narrow = line_of(tmp_path, "FP8 products ÷ bf16, plain decode, batch 1, a step")
    assert "**0.600 × (2.40 ms; 4.00 ms)** |" in narrow, "compared with the run beside it, not with the latest"
    assert narrow.endswith("| fp8 |")


def test_runs_are_compared_on_one_gpu(tmp_path: Path) -> None:
    case = "round tree 5/8/32, batch 1"
    record(tmp_path, "same", "latency", SETTINGS, [latency_row(case, 5.0)], "2026-01-01T10:00:00Z", ["a"])
    record(tmp_path, "near", "latency", SETTINGS, [latency_row(case, 5.4)], "2026-01-01T10:04:00Z", ["b"])
    record(tmp_path, "ipc", "latency", SETTINGS | {"transport": "ipc"}, [latency_row(case, 5.5)], "2026-01-01T10:05:00Z", ["a", "b"])
    assert "**1.100 × (5.50 ms)** (missed) | 5.00 ms in process | 1.100 |" in line_of(tmp_path, "`ipc:` ÷ in process, one GPU")


def test_the_multi_process_service_and_more_gpus_have_rows_of_their_own(tmp_path: Path) -> None:
    case = "round tree 5/8/32, batch 1"
    ipc = SETTINGS | {"transport": "ipc"}
    record(tmp_path, "inproc", "latency", SETTINGS, [latency_row(case, 5.0)])
    record(tmp_path, "ipc", "latency", ipc, [latency_row(case, 5.5)])
    record(tmp_path, "mps", "latency", ipc | {"mps": True}, [latency_row(case, 5.1)], "2026-02-01")
    record(tmp_path, "two", "latency", ipc | {"draft_device": "cuda:1"}, [latency_row(case, 5.2)], "2026-02-01")
    record(tmp_path, "tp4", "latency", SETTINGS | {"tp": 4}, [latency_row("round plain, batch 1", 2.0)])
    assert "**1.100 × (5.50 ms)** (missed)" in line_of(tmp_path, "`ipc:` ÷ in process, one GPU")
    assert "**1.020 × (5.10 ms)** |" in line_of(tmp_path, "`ipc:` ÷ in process, one GPU under MPS")
    assert "**1.040 × (5.20 ms)** (missed)" in line_of(tmp_path, "`ipc:` ÷ in process, draft on a second GPU")
    assert "**2.00 ms** |" in line_of(tmp_path, "the same with `--tp 4`")


def test_perplexity_has_its_rows(tmp_path: Path) -> None:
    rows = [
        {"case": "as it is", "value": 100.0, "unit": "perplexity"},
        {"case": "FP8 products", "value": 101.5, "unit": "perplexity", "increase_percent": 1.5},
    ]
    record(tmp_path, "perplexity", "perplexity", {"device": "cpu", "dtype": "float32", "text": "gsm8k_test.jsonl"}, rows)
    assert "**+1.50 % (101.5; cpu, float32)** (missed)" in line_of(tmp_path, "FP8 products, perplexity on GSM8K's test text, demo target")
    assert not any("FP8 cache" in line for line in goal_lines(Results(tmp_path))), "no figure was promised for it"


def test_a_profile_is_summed_up_by_what_kernels_are_for(tmp_path: Path) -> None:
    assert NOT_MEASURED in "".join(time_lines(Results(tmp_path)))
    kernels = [
        ["_dot_tiles", 10, 5.0, 0.5], ["sum_rows", 1, 0.5, 0.05], ["nvjet_hsh_128x256", 2, 1.0, 0.1], ["_attention", 3, 2.0, 0.2],
        ["_merge", 3, 0.1, 0.01], ["_level_merge", 3, 0.3, 0.03], ["_argmax_merge", 1, 0.1, 0.01], ["Memcpy DtoH", 1, 0.1, 0.01],
    ]  # fmt: skip
    content = {
        "benchmark": "latency",
        "command": ["outrider", "bench", "latency", "--profile"],
        "settings": SETTINGS,
        "profiles": {"plain, batch 1": {"kernels": kernels, "gpu_idle": 0.012, "gpu_idle_between": 0.004}},
    }
    (tmp_path / "p.json").write_text(json.dumps(content))
    lines = list(time_lines(Results(tmp_path)))
    assert lines[0] == "| shares of the GPU's time | plain, batch 1 |"
    assert [line.rsplit("| ", 1)[1] for line in lines[2:7]] == ["65.0 % |", "21.0 % |", "3.0 % |", "2.0 % |", "1.2 %; 0.4 % |"]
    assert lines[-1] == "- [p](../bench/results/p.json): `outrider bench latency --profile` (1970-01-01 00:00 UTC, CPU)"


def test_parts_have_tables_of_their_own(tmp_path: Path) -> None:
    for lines in (ceiling_lines, kernel_lines, load_lines):
        assert "not measured" in next(lines(Results(tmp_path)))
    rated = {"case": "device read", "value": 4532.4, "unit": "GB/s", "floor": 4810.0, "floor_of": "rated", "ratio": 1.061}
    record(tmp_path, "roofline", "roofline", {"device": "cuda"}, [rated])
    assert list(ceiling_lines(Results(tmp_path)))[2] == "| device read | 4,532 GB/s | 4,810 GB/s (rated) | 1.06 |"
    rows = [
        {"case": case, "value": 2.0, "unit": "us", "floor": 1.0, "floor_of": bound, "ratio": ratio}
        for case, bound, ratio in (
            ("rms_norm, 1 rows", "launch", 1.5),
            ("rms_norm, 64 rows", "launch", 2.0),
            ("project_add o 4096×4096, 1 rows", "bytes", 1.1),
            ("feature_rows.place_rows, 6 rows", "launch", 1.2),
            ("forward 1 rows, batch 1, context 768", "bytes", 1.3),
        )
    ]
    record(tmp_path, "kernels", "kernels", {"device": "cuda"}, rows)
    record(tmp_path, "passes", "kernels", {"device": "cuda"}, rows[-1:], "2026-02-01")
    assert list(kernel_lines(Results(tmp_path)))[2:5] == [
        "| `rms_norm` | 2 | a launch | 1.50 | 2.00 | 64 rows: 2 us |",
        "| `project_add` | 1 | bytes | 1.10 | 1.10 | o 4096×4096, 1 rows: 2 us |",
        "| `feature_rows.place_rows` | 1 | a launch | 1.20 | 1.20 | 6 rows: 2 us |",
    ]
    record(tmp_path, "serve", "serve", {"device": "cuda"}, [rated | {"case": "requests", "unit": "req/s"}])
    assert "| requests | 4,532 req/s |" in list(load_lines(Results(tmp_path)))[2]


def test_rounds_stand_beside_those_of_the_peer(tmp_path: Path) -> None:
    rows = [latency_row("round chain 3, batch 64", 10.0), latency_row("round tree 5/8/32, batch 1", 6.5)]
    record(tmp_path, "ours", "latency", SETTINGS, rows)
    (tmp_path / "vllm.jsonl").write_text(json.dumps({"case": "run", "config": "chain3", "bs": 64, "ms_round": 11.0}) + "\n")
    lines = list(round_lines(Results(tmp_path)))
    assert lines[3] == "| EAGLE-3, chain of 3 |  |  |  | 10.00 / 11.00 |"
    assert lines[5] == "| EAGLE-3, tree 5/8/32 (vLLM has none) | 6.50 |  |  |  |"
    assert lines[-1] == "From [ours.json](bench/results/ours.json)."


def test_the_table_is_written_between_its_marks(tmp_path: Path) -> None:
    begin, end = TABLES[0].begin, TABLES[0].end
    document = tmp_path / "doc.md"
    document.write_text("no place")
    with pytest.raises(ConfigurationError, match="no place"):
        run_table(tmp_path, document, check=False)
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    assert run_table(tmp_path, document, check=True) == 1
    assert run_table(tmp_path, document, check=False) == 0
    assert run_table(tmp_path, document, check=True) == 0
    text = document.read_text()
    assert text.startswith(f"before\n{begin}\n\n| |")
    assert text.endswith(f"{end}\nafter\n")
    assert text.count("\n| ") == sum(goal.limit is not None for goal in GOALS) + 2


def test_what_equal_bits_cost_is_shown_beside_the_usual_round(tmp_path: Path) -> None:
    case = "round tree 5/8/32, batch 16"
    assert "| tree 5/8/32, batch 16 | not measured yet | | |" in list(cost_lines(Results(tmp_path)))
    record(tmp_path, "usual", "latency", SETTINGS, [latency_row(case, 16.0)], "2026-01-01")
    record(tmp_path, "exact", "latency", SETTINGS | {"deterministic": "true"}, [latency_row(case, 40.0)], "2026-01-02")
    record(tmp_path, "later", "latency", SETTINGS, [latency_row(case, 8.0)], "2026-02-01")
    assert "| tree 5/8/32, batch 16 | 16.00 ms | 40.00 ms | 2.50 |" in list(cost_lines(Results(tmp_path)))


@pytest.mark.parametrize("document", ["docs/performance.md", "docs/numerics.md", "README.md"])
def test_the_documented_tables_are_those_of_the_recorded_results(document: str) -> None:
    assert run_table(ROOT / "bench" / "results", ROOT / document, check=True) == 0


def test_results_are_named_by_their_commands() -> None:
    for path in sorted((ROOT / "bench" / "results").rglob("*.json")):
        written = json.loads(path.read_text())
        command = written.get("command", [])
        if "benchmark" in written and "--output" in command:  # `outrider bench` alone took a folder once
            assert command[command.index("--output") + 1] == path.name
