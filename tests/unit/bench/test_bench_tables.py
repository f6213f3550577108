"""The tables of the documents: which recorded figure answers which row, what stands beside it, and who ran it when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.recorded_results import SETTINGS, latency_row, line_of, record

from outrider.bench.report.goals import GOALS
from outrider.bench.report.parts import ceiling_lines, kernel_lines, load_lines, start_lines
from outrider.bench.report.recorded import RecordedResult, Results
from outrider.bench.report.tables import (
    GENERIC_SHAPE,
    NOT_MEASURED,
    TABLES,
    compile_lines,
    cost_lines,
    goal_lines,
    round_lines,
    run_table,
    time_lines,
)
from outrider.shared.base.errors import ConfigurationError

ROOT = Path(__file__).parents[3]
DOCUMENTS = ("docs/performance.md", "docs/numerics.md", "README.md")


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
    against = line_of(tmp_path, "chain of 3, batch 64, tokens/s ÷ vLLM's")
    assert "**1.071 × (15,000 tok/s)** |" in against
    assert "vLLM 14,000 tok/s" in against
    assert "**1.015 × (6.60 ms)** |" in line_of(tmp_path, "`grpc:` on loopback ÷ in process")
    assert "**2.0 % in pauses over 8 µs, 2.5 % in all (6.50 ms)** |" in line_of(
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
        recorded.occasion
        == "2026-01-02 15:04 UTC, GPU a, 16 of 64 cores, with `nvidia-cuda-mps-control -d` running"
    )
    content["command"].append("--mps")
    assert recorded.occasion.endswith("cores"), "the command says it"
    content["source"] = {"commit": "0123456789abcdef", "modified": False, "trees": {}}
    assert recorded.occasion.endswith("16 of 64 cores, commit 0123456")
    content["source"] |= {"modified": True}
    assert recorded.occasion.endswith(", commit 0123456 with changes")
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
    assert "| vLLM 4.91 ms; SGLang 4.78 ms (issue's figure, no file) |" in line_of(
        tmp_path, "plain decode, batch 1, a step"
    )
    assert "| vLLM (one GPU) 4.91 ms |" in line_of(tmp_path, "the same with `--tp 2`")
    assert "| vLLM 5.72 ms |" in line_of(tmp_path, "round, chain of 3, batch 1")
    assert "| vLLM 6.32 ms; SGLang 8.9 ms (issue's figure, no file) |" in line_of(
        tmp_path, "round, chain of 5, batch 1"
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
        "a plain row beside a peer is of its call too"
    )
    assert "**2.50 ms** |" in line_of(tmp_path, "the same with `--tp 2`"), "the peer had one GPU: the latest"
    record(
        call, "trees", "latency", SETTINGS, [latency_row("round tree 5/8/32, batch 16", 15.0)], "2026-01-02"
    )
    record(
        tmp_path, "old", "latency", SETTINGS, [latency_row("round tree 5/8/32, batch 16", 17.0)], "2026-01-01"
    )
    assert "**15.00 ms** |" in line_of(tmp_path, "round, tree 5/8/32, batch 16"), (
        "the latest, wherever it lies"
    )
    record(tmp_path, "plain", "latency", SETTINGS, [latency_row("round plain, batch 4", 4.0)])
    assert "| plain decode |  | 4.00 / 6.00 |  |  |" in list(round_lines(Results(tmp_path))), (
        "the latest where the call has none of ours"
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
    for what in ("plain decode, batch 64, tokens/s ÷ vLLM's", "chain of 3, batch 64, tokens/s ÷ vLLM's"):
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
    assert "**3.00 ms** |" in line_of(tmp_path, "plain decode, batch 1, a step")
    narrow = line_of(tmp_path, "FP8 products ÷ bf16, plain decode, batch 1, a step")
    assert "**0.600 × (2.40 ms; 4.00 ms)** |" in narrow, (
        "compared with the run beside it, not with the latest"
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
    assert "**1.100 × (5.50 ms)** (missed) | 5.00 ms in process | 1.100 |" in line_of(
        tmp_path, "`ipc:` ÷ in process, one GPU"
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
    assert "**1.100 × (5.50 ms)** (missed) | 5.00 ms in process |" in line_of(
        tmp_path, "`ipc:` ÷ in process, one GPU"
    )
    (tmp_path / "alike.json").unlink()
    assert "| 5.30 ms in process |" in line_of(tmp_path, "`ipc:` ÷ in process, one GPU"), (
        "other cores rather than other GPUs"
    )


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
    assert "**1.100 × (5.50 ms)** (missed)" in line_of(tmp_path, "`ipc:` ÷ in process, one GPU")
    assert "**1.020 × (5.10 ms)** |" in line_of(tmp_path, "`ipc:` ÷ in process, one GPU under MPS")
    assert "**1.040 × (5.20 ms)** (missed)" in line_of(tmp_path, "`ipc:` ÷ in process, draft on a second GPU")
    assert "**2.00 ms** |" in line_of(tmp_path, "the same with `--tp 4`")


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
        tmp_path, "FP8 products, perplexity on GSM8K's test text, demo target"
    )
    assert not any("FP8 cache" in line for line in goal_lines(Results(tmp_path))), (
        "no figure was promised for it"
    )


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
    assert [line.rsplit("| ", 1)[1] for line in lines[2:7]] == [
        "65.0 % |",
        "21.0 % |",
        "3.0 % |",
        "2.0 % |",
        "1.2 %; 0.4 % |",
    ]
    assert (
        lines[-1]
        == "- [p](../bench/results/p.json): `outrider bench latency --profile` (1970-01-01 00:00 UTC, CPU)"
    )


def test_starts_stand_in_their_order(tmp_path: Path) -> None:
    assert list(start_lines(Results(tmp_path))) == ["Starts are not measured yet."]
    waits = [{"case": f"time to first token, p{p}", "value": float(p), "unit": "ms"} for p in (50, 99)]
    for name, date, start in (
        ("warm", "2026-01-02", {"seconds": 20.0, "kernels_cached": 300, "kernels_compiled": 0}),
        ("cold", "2026-01-01", {"seconds": 80.04, "kernels_cached": 0, "kernels_compiled": 300}),
        ("remote", "2026-01-03", None),
    ):
        record(tmp_path, name, "serve", {"device": "cuda"}, waits, date)
        content = json.loads((tmp_path / f"{name}.json").read_text()) | {"start": start}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    lines = list(start_lines(Results(tmp_path)))
    assert lines[2:4] == ["| 300 | 0 | 80.0 s | 50 ms | 99 ms |", "| 0 | 300 | 20.0 s | 50 ms | 99 ms |"]
    assert not any("remote" in line for line in lines)


def test_parts_have_tables_of_their_own(tmp_path: Path) -> None:
    for lines in (ceiling_lines, kernel_lines, load_lines):
        assert "not measured" in next(lines(Results(tmp_path)))
    rated = {
        "case": "device read",
        "value": 4532.4,
        "unit": "GB/s",
        "floor": 4810.0,
        "floor_of": "rated",
        "ratio": 1.061,
    }
    record(tmp_path, "roofline", "roofline", {"device": "cuda"}, [rated])
    assert (
        list(ceiling_lines(Results(tmp_path)))[2]
        == "| device read | 4,532 GB/s | 4,810 GB/s (rated) | 1.06 |"
    )
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
    (tmp_path / "vllm.jsonl").write_text(
        json.dumps({"case": "run", "config": "chain3", "bs": 64, "ms_round": 11.0}) + "\n"
    )
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
    record(
        tmp_path,
        "exact",
        "latency",
        SETTINGS | {"deterministic": "true"},
        [latency_row(case, 40.0)],
        "2026-01-02",
    )
    record(tmp_path, "later", "latency", SETTINGS, [latency_row(case, 8.0)], "2026-02-01")
    assert "| tree 5/8/32, batch 16 | 16.00 ms | 40.00 ms | 2.50 |" in list(cost_lines(Results(tmp_path)))


def test_what_compiling_changes_is_shown_for_the_model_that_it_is_for(tmp_path: Path) -> None:
    case = "round plain, batch 16"
    granite = SETTINGS | {"shape": GENERIC_SHAPE}
    record(tmp_path, "own", "latency", SETTINGS, [latency_row(case, 4.0)], "2026-01-03")
    record(tmp_path, "usual", "latency", granite, [latency_row(case, 10.0)], "2026-01-01")
    record(
        tmp_path,
        "compiled",
        "latency",
        granite | {"enable_torch_compile": "true"},
        [latency_row(case, 8.0)],
        "2026-01-02",
    )
    lines = list(compile_lines(Results(tmp_path)))
    assert "| plain, batch 1 | not measured yet | | |" in lines
    assert "| plain, batch 16 | 10.00 ms | 8.00 ms | 0.80 |" in lines


def test_every_table_has_one_place() -> None:
    texts = [(ROOT / document).read_text() for document in DOCUMENTS]
    for table in TABLES:
        assert [sum(text.count(mark) for text in texts) for mark in (table.begin, table.end)] == [1, 1], (
            table.begin
        )
        assert any(table.begin in text and table.end in text.split(table.begin)[1] for text in texts), (
            table.begin
        )


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_documented_tables_are_those_of_the_recorded_results(document: str) -> None:
    assert run_table(ROOT / "bench" / "results", ROOT / document, check=True) == 0


def test_results_are_named_by_their_commands() -> None:
    otherwise = set()
    for path in sorted((ROOT / "bench" / "results").rglob("*.json")):
        command = json.loads(path.read_text()).get("command", [])
        if (
            isinstance(command, list)
            and "--output" in command
            and command[command.index("--output") + 1] != path.name
        ):
            otherwise.add(path.name)
    assert not otherwise


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
    line = line_of(tmp_path, "demo pair, real acceptance, `auto` (the default) ÷ off")
    assert "| **2.20 × (2.30 × at T = 1; `on`, the same tree in every round, 1.80 ×)** |" in line
    assert "| 8.80 × (accept length: a round as short as a step) | 4.00 |" in line
