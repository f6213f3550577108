"""The generated tables except the goals: the copies in the documents must match the recorded results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.suite.recorded_results import SETTINGS, latency_row, record

from outrider.bench.report.goals import GOALS
from outrider.bench.report.parts import ceiling_lines, kernel_lines, load_lines, start_lines
from outrider.bench.report.recorded import Results
from outrider.bench.report.tables import (
    GENERIC_SHAPE,
    NOT_MEASURED,
    TABLES,
    compile_lines,
    cost_lines,
    round_lines,
    run_table,
    time_lines,
)
from outrider.shared.base.errors import ConfigurationError

ROOT = Path(__file__).parents[4]
DOCUMENTS = ("docs/performance.md", "docs/numerics.md", "README.md")


def test_a_profile_is_summed_up_by_what_kernels_are_for(tmp_path: Path) -> None:
    assert NOT_MEASURED in "".join(time_lines(Results(tmp_path)))
    kernels = [
        ["_dot_tiles", 10, 5.0, 0.5], ["sum_rows", 1, 0.5, 0.05], ["nvjet_hsh_128x256", 2, 1.0, 0.1],
        ["_attention", 3, 2.0, 0.2], ["_merge", 1, 0.05, 0.005], ["merge_rows", 2, 0.05, 0.005],
        ["_level_merge", 3, 0.3, 0.03], ["_argmax_merge", 1, 0.1, 0.01], ["Memcpy DtoH", 1, 0.1, 0.01],
    ]  # fmt: skip
    content = {
        "benchmark": "latency",
        "command": ["outrider", "bench", "latency", "--profile"],
        "settings": SETTINGS,
        "profiles": {"plain, batch 1": {"kernels": kernels, "gpu_idle": 0.012, "gpu_idle_between": 0.004}},
    }
    (tmp_path / "p.json").write_text(json.dumps(content))
    lines = list(time_lines(Results(tmp_path)))
    assert lines[0] == "| share of the GPU's time | plain, batch 1 |"
    assert [line.rsplit("| ", 1)[1] for line in lines[2:8]] == [
        "65.0 % |",
        "21.0 % |",
        "3.0 % |",
        "2.0 % |",
        "1.2 % |",
        "0.4 % |",
    ]
    assert (
        lines[-1]
        == "- [p](../bench/results/p.json): `outrider bench latency --profile` (1970-01-01 00:00 UTC, CPU)"
    )


def test_starts_stand_in_their_order(tmp_path: Path) -> None:
    assert list(start_lines(Results(tmp_path))) == ["Startup is not measured yet."]
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
        "| `rms_norm` | 2 | launch | 1.50 | 2.00 | 64 rows: 2 us |",
        "| `project_add` | 1 | bytes | 1.10 | 1.10 | o 4096×4096, 1 rows: 2 us |",
        "| `feature_rows.place_rows` | 1 | launch | 1.20 | 1.20 | 6 rows: 2 us |",
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
    assert lines[5] == "| EAGLE-3, tree 5/8/32 (no vLLM equivalent) | 6.50 |  |  |  |"
    assert lines[-1] == "Sources: [ours.json](bench/results/ours.json)."


def test_the_table_is_written_between_its_marks(tmp_path: Path) -> None:
    begin, end = TABLES[0].begin, TABLES[0].end
    document = tmp_path / "doc.md"
    document.write_text("no markers")
    with pytest.raises(ConfigurationError, match="no markers"):
        run_table(tmp_path, document, check=False)
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    assert run_table(tmp_path, document, check=True) == 1
    assert run_table(tmp_path, document, check=False) == 0
    assert run_table(tmp_path, document, check=True) == 0
    text = document.read_text()
    assert text.startswith(f"before\n{begin}\n\n| measurement |")
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
