"""Compiling ahead: this process rehearses work without running it, and others compile the kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.kernels.rehearse_kernels import __file__ as script

from outrider.kernels import _launch, ahead
from outrider.kernels.ahead import Compiled, compile_ahead, rehearsing
from outrider.shared.engine.graphs import GraphCache

CPU = torch.device("cpu")


def test_a_rehearsal_compiles_each_kernel_once_and_launches_none(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, str(script)],
        env={**variables, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == {
        "forgotten": [0, "NOT_YET"],
        "asked for again": 1,
        "given up": "NO",
        "output": 0.0,  # A launched kernel would have returned ones, the norm of ones.
        "submitted": 1,
        "told": [[1, 1]],
        "output_again": 0.0,
        "missing": 0,
        "launched elsewhere": True,
        "compiled": 1,
        "state": "YES",
        "refused": [2, 0],
        "too slow": [1, 0],  # its process is killed
    }
    assert [path.name for path in tmp_path.rglob("*.cubin")] == ["_stream_rows.cubin"]


def test_there_is_no_rehearsal_on_a_cpu() -> None:
    ran: list[int] = []
    assert compile_ahead(CPU, [lambda: ran.append(1)]) == 0
    assert not ran
    assert not rehearsing()


@pytest.mark.parametrize(
    ("state", "compiled", "submitted"),
    [(Compiled.YES, True, 0), (Compiled.NO, True, 0), (Compiled.NOT_YET, False, 1)],
)
def test_missing_kernels_are_compiled_in_the_background(
    monkeypatch: pytest.MonkeyPatch, state: Compiled, compiled: bool, submitted: int
) -> None:
    waits: list[float | None] = []
    monkeypatch.setattr(ahead, "state_of", lambda *_work: state)
    monkeypatch.setattr(ahead, "compile_ahead", lambda *_work, limit_s: waits.append(limit_s))
    assert ahead.compiled_or_soon(CPU, lambda: None) is compiled
    assert waits == [None] * submitted, "nobody may wait for the compilers"


def test_outputs_are_zeros_while_launches_may_be_left_out() -> None:
    with _launch.outputs_of_zeros():
        assert not _launch.empty((1024,), torch.int32, CPU).any()


def test_graphs_are_not_recorded_in_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, ran = GraphCache(CPU), []
    graphs.enabled = True
    monkeypatch.setattr("outrider.shared.engine.graphs.rehearsing", lambda: True)
    graphs.capture("key", lambda: ran.append(1))
    assert ran == [1]
    assert not graphs.holds("key")
