"""`gpu_suite.py`: every test file is in exactly one job, and failed, hung or unstarted tests are reported."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import gpu_suite
import pytest
from gpu_suite import Suite, record
from support.suite.gpu_suite_plan import (
    LANES,
    RANKS,
    SERVED_RANKS,
    TESTS,
    TWO_TARGETS,
    WITH_FLASHINFER,
    Job,
    plan,
)
from support.suite.gpu_suite_report import name_of

SOME = """
def test_once():
    mark = pathlib.Path(__file__).with_suffix(".mark")
    first = not mark.exists()
    mark.touch()
    assert not first

def test_fine(record_property):
    record_property("near-tie", "as near as that")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    monkeypatch.setattr(gpu_suite, "nvidia_smi", lambda *_arguments: ["a GPU"] * 2)
    logs = tmp_path / "logs"
    logs.mkdir()
    return Suite(["0", "1"], logs, 600.0)


def write_tests(path: Path, text: str) -> Path:
    path.write_text("import os, pathlib, time\n\n" + text)
    return path


@pytest.mark.parametrize("gpus", [1, 2, 3, 4])
def test_every_file_is_in_one_job(gpus: int) -> None:
    jobs = plan(gpus, 16)
    counts = Counter(file for job in jobs for file in job.files)
    there = {
        f"{folder}/{path.name}" for folder in ("law", "gpu") for path in (TESTS / folder).glob("test_*.py")
    }
    assert counts.pop(RANKS, 0) == {1: 0, 2: 1, 3: 1, 4: 2}[gpus]
    for file in WITH_FLASHINFER:
        assert counts.pop(file) == 2, "once with the library and once without"
    for file in (SERVED_RANKS, TWO_TARGETS):
        assert counts.pop(file, 0) == (gpus > 1)
    assert set(counts) == there - {RANKS, SERVED_RANKS, TWO_TARGETS, *WITH_FLASHINFER}
    assert set(counts.values()) == {1}
    assert all(0 <= lane < LANES for job in jobs for lane in job.lanes)
    assert all(job.law == file.startswith("law/") for job in jobs for file in job.files)


def test_every_test_that_needs_flashinfer_runs_with_it() -> None:
    marked = {
        f"gpu/{path.name}"
        for path in (TESTS / "gpu").glob("test_*.py")
        if "mark.flashinfer" in path.read_text()
    }
    assert marked == set(WITH_FLASHINFER)


def test_what_fails_is_run_again_and_stays_failed(suite: Suite, tmp_path: Path) -> None:
    path = write_tests(tmp_path / "test_some.py", SOME)
    jobs = [Job("some", (1,), 1, (str(path),))]
    suite.run(jobs)
    names = sorted(suite.tests)
    assert [suite.tests[name]["outcome"] for name in names] == ["passed", "failed"]
    suite.again([], jobs)
    found = record(suite, [*names, "tests/law/test_other.py::test_left_out"], "abc")
    assert (found["tests"], found["passed"], found["failed"], found["not run"]) == (3, 1, 1, 1)
    assert found["commit"] == "abc"
    left_out, failure = sorted(found["not passed"], key=lambda row: str(row["outcome"]), reverse=True)
    assert left_out == {"test": "tests/law/test_other.py::test_left_out", "outcome": "not run", "error": ""}
    assert failure["again"] == "passed"
    assert "assert not" in failure["error"]
    assert found["near-ties"] == ["as near as that"]
    assert found["files"]["law/test_other.py"]["not run"] == 1


def test_what_hangs_is_cut_off_and_what_waits_for_its_gpu_is_told(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_suite, "LAST_S", 10.0)
    begun = tmp_path / "begun"
    hangs = write_tests(
        tmp_path / "test_hangs.py",
        f"def test_hang():\n    pathlib.Path({str(begun)!r}).touch()\n    time.sleep(600)\n",
    )
    jobs = [
        Job("hangs", (0,), 1, (str(hangs),)),
        Job("behind", (0, 1), 1, (str(hangs),)),
        Job("further behind", (1,), 1, (str(hangs),)),
    ]
    monkeypatch.setattr(
        Suite, "deadline", property(lambda self: 0.0 if begun.exists() else float("inf")), raising=False
    )
    suite.run(jobs)
    assert {row["job"]: row["ended"].split(",")[0] for row in suite.job_outcomes} == {
        "hangs": "cut off",
        "behind": "not begun",
        "further behind": "not begun",
    }
    (test,) = suite.tests.values()
    assert test["outcome"] == "not ended"
    assert record(suite, [], "abc")["not run"] == 1


def test_lanes_share_the_gpus(suite: Suite) -> None:
    assert [suite.gpus_of(Job("", lanes, 1, ())) for lanes in ((0,), (3,), (2, 3), (0, 2))] == [
        ["0"],
        ["1"],
        ["0", "1"],
        ["0"],
    ]


def test_each_lane_has_its_share_of_the_cores(suite: Suite) -> None:
    cores = os.sched_getaffinity(0)
    assert all(share <= cores for share in suite.cores)
    assert len(cores) < 2 or suite.cores[0].isdisjoint(suite.cores[1])


@pytest.mark.parametrize(
    ("node_id", "name"),
    [
        ("a.py::b[1]@group", "a.py::b[1]"),
        ("a.py::b@group", "a.py::b"),
        ("a.py::b[x@y]", "a.py::b[x@y]"),
        ("a.py::b", "a.py::b"),
    ],
)
def test_names_are_without_their_groups(node_id: str, name: str) -> None:
    assert name_of(node_id) == name
