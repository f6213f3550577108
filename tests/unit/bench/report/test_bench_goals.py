"""The goals table: the run that each row uses, the run with which it is compared, and citations of runs."""

from __future__ import annotations

import json
from pathlib import Path

from support.suite.recorded_results import SETTINGS, latency_row, line_of, record

from outrider.bench.report.recorded import RecordedResult, Results
from outrider.bench.report.tables import NOT_MEASURED, goal_lines, round_lines


def test_the_table_shows_the_latest_fitting_result(tmp_path: Path) -> None:
    assert NOT_MEASURED in line_of(tmp_path, "round, chain of 5, batch 1")
    record(tmp_path, "old", "latency", SETTINGS, [latency_row("round chain 5, batch 1", 6.6)], "2026-01-01")
    record(tmp_path, "new", "latency", SETTINGS, [latency_row("round chain 5, batch 1", 5.2)], "2026-02-01")
    record(
        tmp_path,
        "cpu",
        "latency",
        SETTINGS | {"device": "cpu"},
        [latency_row("round chain 5, batch 1", 1.0)],
        "2026-03-01",
    )
    record(
        tmp_path,
        "other",
        "latency",
        SETTINGS | {"shape": "tiny"},
        [latency_row("round chain 5, batch 1", 1.0)],
        "2026-03-01",
    )
    record(
        tmp_path,
        "remote",
        "latency",
        SETTINGS | {"transport": "grpc"},
        [latency_row("round chain 5, batch 1", 1.0)],
        "2026-03-01",
    )
    line = line_of(tmp_path, "round, chain of 5, batch 1")
    assert "**5.20 ms** |" in line
    assert "3.30 ms (bytes) | 1.58 |" in line
    assert line.endswith("| new |")
    assert "- [new](../bench/results/new.json): `outrider bench latency` (2026-02-01 00:00 UTC, CPU)" in list(
        goal_lines(Results(tmp_path))
    )


def test_the_table_says_what_was_missed_and_compares_with_the_same_call(tmp_path: Path) -> None:
    rows = [
        latency_row("round chain 3, batch 64", 10.0, tok_s=15_000.0),
        latency_row("round tree 5/8/32, batch 1", 6.5, gpu_idle_between=0.02, gpu_idle=0.025),
    ]
    record(tmp_path, "ours", "latency", SETTINGS, rows)
    record(
        tmp_path,
        "grpc",
        "latency",
        SETTINGS | {"transport": "grpc"},
        [latency_row("round tree 5/8/32, batch 1", 6.6)],
    )
    (tmp_path / "vllm.jsonl").write_text(
        json.dumps({"case": "run", "config": "chain3", "bs": 64, "tok_s": 14_000.0, "ms_round": 11.0}) + "\n"
    )
    assert "**6.50 ms** (missed)" in line_of(tmp_path, "round, tree 5/8/32, batch 1")
    against = line_of(tmp_path, "chain of 3, batch 64, tokens/s relative to vLLM")
    assert "**1.071 × (15,000 tok/s)** |" in against
    assert "vLLM 14,000 tok/s" in against
    assert "**1.015 × (6.60 ms)** |" in line_of(
        tmp_path, "round over loopback `grpc:` relative to in-process"
    )
    assert "**2.0 % in gaps over 8 µs, 2.5 % in total (6.50 ms)** |" in line_of(
        tmp_path, "GPU idle between rounds, tree 5/8/32, batch 1"
    )


def test_files_that_no_benchmark_wrote_may_lie_beside_the_results(tmp_path: Path) -> None:
    record(tmp_path, "ours", "latency", SETTINGS, [latency_row("round chain 5, batch 1", 5.2)])
    (tmp_path / "suite.json").write_text('{"date": "2026-01-02 15:04 UTC"}')
    (tmp_path / "list.json").write_text("[]")
    assert line_of(tmp_path, "round, chain of 5, batch 1").endswith("| ours |")


def test_a_profiled_run_counts_for_idle_shares_only(tmp_path: Path) -> None:
    case = "round tree 5/8/32, batch 1"
    record(tmp_path, "best", "latency", SETTINGS, [latency_row(case, 5.4)], "2026-01-01")
    record(
        tmp_path,
        "profile",
        "latency",
        SETTINGS,
        [latency_row(case, 5.6, gpu_idle_between=0.01)],
        "2026-02-01",
    )
    content = json.loads((tmp_path / "profile.json").read_text()) | {"profiles": {"tree 5/8/32, batch 1": {}}}
    (tmp_path / "profile.json").write_text(json.dumps(content))
    assert line_of(tmp_path, "round, tree 5/8/32, batch 1").endswith("| best |")
    assert line_of(tmp_path, "GPU idle between rounds, tree 5/8/32, batch 1").endswith("| profile |")


def test_the_table_tells_every_run_apart(tmp_path: Path) -> None:
    rows = [latency_row("round chain 3, batch 4", 4.9)]
    record(
        tmp_path,
        "ours",
        "latency",
        SETTINGS | {"mps": True, "transport": "ipc"},
        rows,
        "2026-01-02T15:04:00Z",
        ["a"],
    )
    content = json.loads((tmp_path / "ours.json").read_text())
    content["machine"] |= {"cores": 64, "cores_used": 16}
    content["environment"] = {"CUDA_MPS_PIPE_DIRECTORY": "pipe", "CUDA_VISIBLE_DEVICES": "1"}
    recorded = RecordedResult(tmp_path / "ours.json", content)
    assert recorded.command == "CUDA_VISIBLE_DEVICES=1 outrider bench latency"
    assert (
        recorded.provenance
        == "2026-01-02 15:04 UTC, GPU a, 16 of 64 cores, with `nvidia-cuda-mps-control -d` running"
    )
    content["command"].append("--mps")
    assert recorded.provenance.endswith("cores"), "the command contains it"
    content["source"] = {"commit": "0123456789abcdef", "modified": False, "trees": {}}
    assert recorded.provenance.endswith("16 of 64 cores, commit 0123456")
    content["source"] |= {"modified": True}
    assert recorded.provenance.endswith(", commit 0123456 with uncommitted changes")
    record(tmp_path, "plain", "latency", SETTINGS, rows)
    lines = [
        {
            "case": "machine",
            "date": "2026-01-02T15:00Z",
            "gpu": "an H200",
            "command": "run_vllm.py --configs chain3",
        },
        {"case": "run", "config": "chain3", "bs": 4, "ms_round": 5.9},
    ]
    (tmp_path / "vllm.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    assert list(goal_lines(Results(tmp_path)))[-1] == (
        "- [vllm](../bench/results/vllm.jsonl): `run_vllm.py --configs chain3` (2026-01-02T15:00Z; an H200)"
    )


def test_a_peer_that_tells_no_command_gets_none(tmp_path: Path) -> None:
    record(tmp_path, "one", "latency", SETTINGS, [latency_row("round plain, batch 1", 4.0)])
    record(tmp_path, "two", "latency", SETTINGS | {"tp": 2}, [latency_row("round plain, batch 1", 2.5)])
    record(
        tmp_path,
        "chains",
        "latency",
        SETTINGS,
        [latency_row(f"round chain {steps}, batch 1", 5.0) for steps in (3, 5)],
    )
    figures = {"plain": 4.91, "chain3": 5.72, "chain5": 6.32}
    lines = [
        json.dumps({"case": "run", "config": config, "bs": 1, "ms_round": figure})
        for config, figure in figures.items()
    ]
    (tmp_path / "vllm.jsonl").write_text("\n".join(lines))
    assert list(goal_lines(Results(tmp_path)))[-1] == "- [vllm](../bench/results/vllm.jsonl): (not recorded)"
    assert "| vLLM 4.91 ms; SGLang 4.78 ms (no result file) |" in line_of(
        tmp_path, "plain decode step, batch 1"
    )
    assert "| vLLM (one GPU) 4.91 ms |" in line_of(tmp_path, "plain decode step, batch 1, `--tp 2`")
    assert "| vLLM 5.72 ms |" in line_of(tmp_path, "round, chain of 3, batch 1")
    assert "| vLLM 6.32 ms; SGLang 8.9 ms (no result file) |" in line_of(
        tmp_path, "round, chain of 5, batch 1"
    )


def test_a_peer_is_compared_with_what_ran_in_its_call(tmp_path: Path) -> None:
    record(tmp_path, "later", "latency", SETTINGS, [latency_row("round chain 3, batch 4", 5.2)], "2026-02-01")
    call = tmp_path / "2026-01-02T1459Z"
    call.mkdir()
    record(call, "ours", "latency", SETTINGS, [latency_row("round chain 3, batch 4", 5.0)], "2026-01-02")
    lines = [{"case": "run", "config": config, "bs": 4, "ms_round": 6.0} for config in ("chain3", "plain")]
    (call / "vllm.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    against = line_of(tmp_path, "round, chain of 3, batch 4, relative to vLLM")
    assert "**0.833 × (5.00 ms)** |" in against
    assert against.endswith("| 2026-01-02T1459Z/ours |")
    commands = list(goal_lines(Results(tmp_path)))
    assert any(
        line.startswith("- [2026-01-02T1459Z/ours](../bench/results/2026-01-02T1459Z/ours.json): ")
        for line in commands
    )
    for folder, date, value in ((call, "2026-01-02", 4.8), (tmp_path, "2026-02-01", 4.5)):
        record(folder, "single", "latency", SETTINGS, [latency_row("round chain 3, batch 1", value)], date)
        record(
            folder,
            "ranks",
            "latency",
            SETTINGS | {"tp": 2},
            [latency_row("round plain, batch 1", value - 2)],
            date,
        )
    lines += [{"case": "run", "config": config, "bs": 1, "ms_round": 5.5} for config in ("chain3", "plain")]
    (call / "vllm.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    assert "**4.80 ms** |" in line_of(tmp_path, "round, chain of 3, batch 1"), (
        "rows without a ratio use the peer's session too"
    )
    assert "**2.50 ms** |" in line_of(tmp_path, "plain decode step, batch 1, `--tp 2`"), (
        "the peer had one GPU, so the latest run is used"
    )
    record(
        call, "trees", "latency", SETTINGS, [latency_row("round tree 5/8/32, batch 16", 15.0)], "2026-01-02"
    )
    record(
        tmp_path, "old", "latency", SETTINGS, [latency_row("round tree 5/8/32, batch 16", 17.0)], "2026-01-01"
    )
    assert "**15.00 ms** |" in line_of(tmp_path, "round, tree 5/8/32, batch 16"), (
        "the latest, in whichever folder"
    )
    record(tmp_path, "plain", "latency", SETTINGS, [latency_row("round plain, batch 4", 4.0)])
    assert "| plain decode |  | 4.00 / 6.00 |  |  |" in list(round_lines(Results(tmp_path))), (
        "the latest if the session has no run of ours"
    )


def test_all_rows_beside_a_peer_are_of_its_latest_call(tmp_path: Path) -> None:
    earlier = tmp_path / "2026-01-02T1459Z"
    earlier.mkdir()
    for folder, date, factor in ((earlier, "2026-01-02T14:59Z", 2.0), (tmp_path, "2026-01-03T09:10Z", 1.0)):
        lines = [{"case": "machine", "date": date}]
        lines += [
            {"case": "run", "config": config, "bs": 64, "tok_s": 9000.0, "ms_round": factor}
            for config in ("plain", "chain3")
        ]
        (folder / "vllm-h200.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
        rows = [
            latency_row(f"round {kind}, batch 64", 7.0, tok_s=9000.0 + 1000 * factor)
            for kind in ("plain", "chain 3")
        ]
        record(folder, "ours", "latency", SETTINGS, rows, date[:10])
    (tmp_path / "vllm-undated.jsonl").write_text(
        json.dumps({"case": "run", "config": "plain", "bs": 64, "tok_s": 1.0, "ms_round": 1.0})
    )
    for what in (
        "plain decode, batch 64, tokens/s relative to vLLM",
        "chain of 3, batch 64, tokens/s relative to vLLM",
    ):
        assert "**1.111 × (10,000 tok/s)** |" in line_of(tmp_path, what)
        assert line_of(tmp_path, what).endswith("| ours |")
    named = [line for line in goal_lines(Results(tmp_path)) if line.startswith("- [") and "vllm" in line]
    assert [line.split("]")[0] for line in named] == ["- [vllm-h200"]


def test_runs_that_were_told_to_compute_otherwise_have_rows_of_their_own(tmp_path: Path) -> None:
    case = "round plain, batch 1"
    record(tmp_path, "early", "latency", SETTINGS, [latency_row(case, 4.0)], "2026-01-01T10:00:00Z")
    record(
        tmp_path,
        "fp8",
        "latency",
        SETTINGS | {"quantization": "fp8"},
        [latency_row(case, 2.4)],
        "2026-01-01T10:01:00Z",
    )
    record(
        tmp_path,
        "exact",
        "latency",
        SETTINGS | {"deterministic": "true"},
        [latency_row(case, 5.0)],
        "2026-03-01",
    )
    record(
        tmp_path,
        "late",
        "latency",
        SETTINGS | {"quantization": "none"},
        [latency_row(case, 3.0)],
        "2026-02-01",
    )
    assert "**3.00 ms** |" in line_of(tmp_path, "plain decode step, batch 1")
    narrow = line_of(tmp_path, "plain decode step, batch 1, FP8 products relative to bf16")
    assert "**0.600 × (2.40 ms vs. 4.00 ms)** |" in narrow, (
        "compared with the nearest run, not with the latest"
    )
    assert narrow.endswith("| fp8 |")


def test_runs_are_compared_on_one_gpu(tmp_path: Path) -> None:
    case = "round tree 5/8/32, batch 1"
    record(tmp_path, "same", "latency", SETTINGS, [latency_row(case, 5.0)], "2026-01-01T10:00:00Z", ["a"])
    record(tmp_path, "near", "latency", SETTINGS, [latency_row(case, 5.4)], "2026-01-01T10:04:00Z", ["b"])
    record(
        tmp_path,
        "ipc",
        "latency",
        SETTINGS | {"transport": "ipc"},
        [latency_row(case, 5.5)],
        "2026-01-01T10:05:00Z",
        ["a", "b"],
    )
    assert "**1.100 × (5.50 ms)** (missed) | 5.00 ms in-process | 1.100 |" in line_of(
        tmp_path, "round over `ipc:` relative to in-process, one GPU"
    )


def test_runs_are_compared_that_had_the_same_gpus_and_cores(tmp_path: Path) -> None:
    case = "round tree 5/8/32, batch 1"
    runs = (
        ("alike", "inproc", 5.0, "10:00", ["a"], 16),
        ("two", "inproc", 5.4, "10:04", ["a", "b"], 16),
        ("all", "inproc", 5.3, "10:03", ["a"], 32),
        ("ipc", "ipc", 5.5, "10:05", ["a"], 16),
    )
    for name, transport, value, time, gpus, cores in runs:
        record(
            tmp_path,
            name,
            "latency",
            SETTINGS | {"transport": transport},
            [latency_row(case, value)],
            f"2026-01-01T{time}:00Z",
            gpus,
        )
        content = json.loads((tmp_path / f"{name}.json").read_text())
        content["machine"]["cores_used"] = cores
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert "**1.100 × (5.50 ms)** (missed) | 5.00 ms in-process |" in line_of(
        tmp_path, "round over `ipc:` relative to in-process, one GPU"
    )
    (tmp_path / "alike.json").unlink()
    assert "| 5.30 ms in-process |" in line_of(
        tmp_path, "round over `ipc:` relative to in-process, one GPU"
    ), "a run with other cores is preferred to one with other GPUs"


def test_the_multi_process_service_and_more_gpus_have_rows_of_their_own(tmp_path: Path) -> None:
    case = "round tree 5/8/32, batch 1"
    ipc = SETTINGS | {"transport": "ipc"}
    record(tmp_path, "inproc", "latency", SETTINGS, [latency_row(case, 5.0)])
    record(tmp_path, "ipc", "latency", ipc, [latency_row(case, 5.5)])
    record(tmp_path, "mps", "latency", ipc | {"mps": True}, [latency_row(case, 5.1)], "2026-02-01")
    record(
        tmp_path, "two", "latency", ipc | {"draft_device": "cuda:1"}, [latency_row(case, 5.2)], "2026-02-01"
    )
    record(tmp_path, "tp4", "latency", SETTINGS | {"tp": 4}, [latency_row("round plain, batch 1", 2.0)])
    assert "**1.100 × (5.50 ms)** (missed)" in line_of(
        tmp_path, "round over `ipc:` relative to in-process, one GPU"
    )
    assert "**1.020 × (5.10 ms)** |" in line_of(
        tmp_path, "round over `ipc:` relative to in-process, one GPU with MPS"
    )
    assert "**1.040 × (5.20 ms)** (missed)" in line_of(
        tmp_path, "round over `ipc:` relative to in-process, draft on a second GPU"
    )
    assert "**2.00 ms** |" in line_of(tmp_path, "plain decode step, batch 1, `--tp 4`")


def test_perplexity_has_its_rows(tmp_path: Path) -> None:
    rows = [
        {"case": "as it is", "value": 100.0, "unit": "perplexity"},
        {"case": "FP8 products", "value": 101.5, "unit": "perplexity", "increase_percent": 1.5},
    ]
    record(
        tmp_path,
        "perplexity",
        "perplexity",
        {"device": "cpu", "dtype": "float32", "text": "gsm8k_test.jsonl"},
        rows,
    )
    assert "**+1.50 % (101.5; cpu, float32)** (missed)" in line_of(
        tmp_path, "perplexity with FP8 products, demo target, GSM8K test text"
    )
    assert not any("FP8 KV cache" in line for line in goal_lines(Results(tmp_path))), "no goal was set for it"


def test_the_demo_pair_is_judged_by_what_requests_get(tmp_path: Path) -> None:
    rows = [
        {
            "temperature": temperature,
            "auto_over_off": {"median": auto},
            "on_over_off": {"median": 1.8},
            "accept_length": {"on": 5.8, "auto": 8.8},
        }
        for temperature, auto in ((0.0, 2.2), (1.0, 2.3))
    ]
    (tmp_path / "speculation-cuda.json").write_text(json.dumps({"summary": rows}))
    line = line_of(tmp_path, "demo pair, real acceptance: tokens/s of `auto` (the default) relative to `off`")
    assert "| **2.20 × (2.30 × at T = 1; 1.80 × with `on`, the same tree in every round)** |" in line
    assert "| 8.80 × (the accept length) | 4.00 |" in line
