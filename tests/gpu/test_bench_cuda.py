"""Small runs of `outrider bench` on a GPU: graphs, profiler, ceilings, and synthetic acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from guards import Guards
from synthetic_cases import check_packed_acceptance, check_synthetic_acceptance
from typer.testing import CliRunner

from outrider.services.cli.commands import app

pytestmark = pytest.mark.gpu


def run(output: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(app, ["bench", *arguments, "--device", "cuda", "--output", str(output)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return {row["case"]: row for row in json.loads(output.read_text())["rows"]}


@pytest.mark.parametrize(("bs", "columns"), [(1, 1), (4, 6), (64, 33), (5, 128)])
def test_synthetic_acceptance_equals_the_reference(bs: int, columns: int) -> None:
    check_synthetic_acceptance("cuda", bs, columns, Guards())
    check_packed_acceptance("cuda", bs, columns, Guards())


def test_the_ceilings_are_those_of_a_gpu(tmp_path: Path) -> None:
    rows = run(tmp_path / "r.json", "roofline")
    assert rows["device read"]["value"] > 100
    assert rows["matrix product 8192³ bfloat16"]["value"] > 10
    assert rows["small kernel inside a graph"]["value"] < rows["launch of a small kernel, eager"]["value"] * 2


def test_accept_length_and_idle_share_are_measured(tmp_path: Path) -> None:
    flags = (
        "--shape",
        "tiny",
        "--rounds",
        "plain,chain3@2.5,5/4/16@3",
        "--batch",
        "1,4",
        "--prompt",
        "64",
        "--new-tokens",
        "96",
    )
    rows = run(tmp_path / "l.json", "latency", *flags, "--prefill", "128", "--profile")
    assert rows["round chain 3, batch 4"]["accept_length"] == pytest.approx(2.5, abs=0.25)
    assert rows["round tree 5/4/16, batch 4"]["accept_length"] == pytest.approx(3.0, abs=0.3)
    assert 0 <= rows["round plain, batch 1"]["gpu_idle_between"] <= 1
    assert all("rounds_without_draft" not in row for case, row in rows.items() if "chain" in case)


def test_kernels_run_in_graphs(tmp_path: Path) -> None:
    rows = run(tmp_path / "k.json", "kernels", "--shape", "tiny", "--only", "linear,norm,round,trade,propose")
    assert any(case.startswith("propose 5/8/32") for case in rows)
    assert all(row["value"] > 0 for row in rows.values())
