"""Runs the whole GPU suite with one command, over all GPUs of a host.

    python tests/gpu_suite.py --output gpu_suite.json [--limit SECONDS]

It needs the packages of `.[test,flashinfer]` and pytest-xdist. The suite consists of the laws on a GPU in
fp32 and `tests/gpu`, including the tests for several GPUs.

Four lanes run the jobs of `support.suite.gpu_suite_plan` one after another. Each lane has its share of the
cores and its own GPU; on hosts with fewer than four GPUs, lanes share them. Tests that measure, or need much
GPU memory, have their own jobs.

A failed test is reported immediately. Failed tests and tests that were cut off run again at the end if there
is time, but this does not count as passed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from support.suite.gpu_suite_plan import LANES, TESTS, Job, plan

ROOT = TESTS.parent
PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "support.suite.gpu_suite_report",
    "-p",
    "no:cacheprovider",
    "--tb=short",
    "-o",
    "filterwarnings=default",
)
PACKAGES = ("torch", "triton", "grpcio", "transformers", "flashinfer-python")
LAST_S = 12.0
"""Seconds before the limit at which running jobs are interrupted."""
AGAIN_S = 40.0
"""Minimum remaining seconds for running tests again."""


class Suite:
    """Runs jobs, reads the events of their tests, and keeps the outcome of each test.

    Args:
        gpus: Numbers of the GPUs, for `CUDA_VISIBLE_DEVICES`.
        logs: Folder for the jobs' output.
        limit_s: Seconds from now until everything must end.
        library: Folder with FlashInfer, or "".
    """

    def __init__(self, gpus: list[str], logs: Path, limit_s: float, library: str = "") -> None:
        self.gpus, self.logs, self.library = gpus, logs, library
        self.begun = time.monotonic()
        self.deadline = self.begun + limit_s - LAST_S
        cores = sorted(os.sched_getaffinity(0))
        self.share = max(1, len(cores) // LANES)
        self.cores = [set(cores[at * self.share : (at + 1) * self.share] or cores) for at in range(LANES)]
        self.tests: dict[str, dict[str, Any]] = {}
        self.job_outcomes: list[dict[str, Any]] = []
        self._log_files: dict[str, IO[str]] = {}

    def gpus_of(self, job: Job) -> list[str]:
        return [self.gpus[at] for at in sorted({lane % len(self.gpus) for lane in job.lanes})]

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:5.0f} s] {text}", flush=True)

    def run(self, jobs: list[Job], only: Path | None = None) -> None:
        """Run jobs, on each lane one after another. At the deadline, running jobs are interrupted.

        Args:
            jobs: Jobs in the order in which the lanes start them.
            only: File that lists the tests to run; None for all.
        """
        waiting, running = list(jobs), dict[str, tuple[Job, subprocess.Popen[bytes], float]]()
        while (waiting or running) and time.monotonic() < self.deadline:
            taken = {lane for job, _, _ in running.values() for lane in job.lanes}
            for job in list(waiting):
                if taken.isdisjoint(job.lanes):
                    waiting.remove(job)
                    running[job.name] = job, self._start(job, only), time.monotonic()
                taken.update(job.lanes)  # even if the job still waits, so that later jobs do not overtake it
            self._collect_ended(running)
            self._read_logs()
            time.sleep(0.1)
        for _, process, _ in running.values():
            os.killpg(process.pid, signal.SIGINT)
        end = time.monotonic() + LAST_S / 2
        while running and time.monotonic() < end:
            self._collect_ended(running, "cut off, ")
            time.sleep(0.1)
        for _, process, _ in running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._collect_ended(running, "cut off, ")
        self._read_logs()
        for file in self._log_files.values():
            file.close()
        self._log_files.clear()
        self.job_outcomes += [{"job": job.name, "seconds": 0, "ended": "not begun"} for job in waiting]

    def again(self, missing: list[str], jobs: list[Job]) -> None:
        """Run unfinished and failed tests again, and missing tests for the first time, if there is time.

        These runs use few worker processes.
        """
        unfinished = [name for name, test in self.tests.items() if test["outcome"] != "passed"]
        if not unfinished + missing or self.deadline - time.monotonic() < AGAIN_S:
            return
        for name in unfinished:
            self.tests[name]["again"] = "not ended"
        only = self.logs / "again.txt"
        only.write_text("\n".join(unfinished + missing))
        wanted = {file_of(name) for name in unfinished + missing}
        repeated = []
        for job in jobs:
            of_job = {file for file in job.files if file.endswith(tuple(wanted))}
            if of_job:
                kept = tuple(
                    argument for argument in job.arguments if argument in of_job or argument not in job.files
                )
                repeated.append(
                    Job(f"{job.name} again", job.lanes, min(job.workers, 4), kept, job.law, job.library)
                )
        self.run(repeated, only)

    def _start(self, job: Job, only: Path | None) -> subprocess.Popen[bytes]:
        log = self.logs / f"{job.name.replace(' ', '_')}.jsonl"
        log.write_text("")
        self._log_files[job.name] = log.open()
        spread = ("-n", str(job.workers), "--dist", "loadgroup") if job.workers > 1 else ()
        command = [
            *PYTEST,
            *spread,
            *(str(TESTS / one) if one in job.files else one for one in job.arguments),
        ]
        self.say(f"{job.name}, GPU {','.join(self.gpus_of(job))}: pytest {shlex.join(command[3:])}")
        cores = set().union(*(self.cores[lane] for lane in job.lanes))
        with log.with_suffix(".log").open("wb") as output:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment(job, log, only),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )

    def _environment(self, job: Job, log: Path, only: Path | None) -> dict[str, str]:
        folders = [str(TESTS), self.library if job.library else "", os.environ.get("PYTHONPATH", "")]
        given = {
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus_of(job)),
            "PYTHONPATH": ":".join(filter(None, folders)),
            "OMP_NUM_THREADS": "1",
            "GPU_SUITE_LOG": str(log),
            "GPU_SUITE_ONLY": str(only or ""),
        }
        return os.environ | given | ({"OUTRIDER_TEST_DEVICE": "cuda"} if job.law else {})

    def _read_logs(self) -> None:
        """Read the events that jobs have logged since the last call."""
        for file in self._log_files.values():
            while (at := file.tell()) >= 0 and (line := file.readline()):
                if not line.endswith("\n"):
                    file.seek(at)
                    break
                self._record_event(json.loads(line))

    def _record_event(self, row: dict[str, Any]) -> None:
        test = self.tests.setdefault(row["test"], {"outcome": "not ended", "seconds": 0.0})
        if row["event"] == "end":
            key = "again" if "again" in test else "outcome"
            if test[key] != "failed":  # a passed test can still fail in its teardown
                test[key] = row["outcome"]
                if key == "outcome":
                    test |= {
                        name: value for name, value in row.items() if name not in ("event", "test", "outcome")
                    }
            if row["outcome"] == "failed":
                self.say(f"FAILED {row['test']} ({row['when']}, {row['seconds']} s)\n{row['error'][-2500:]}")
        elif row["event"] == "down" and "again" not in test:
            test["seconds"] = row["seconds"]

    def _collect_ended(
        self, running: dict[str, tuple[Job, subprocess.Popen[bytes], float]], how: str = ""
    ) -> None:
        for job, process, at in list(running.values()):
            if process.poll() is not None:
                del running[job.name]
                seconds = round(time.monotonic() - at, 1)
                ended = f"{how}exit code {process.returncode}"
                self.job_outcomes.append(
                    {"job": job.name, "gpus": self.gpus_of(job), "seconds": seconds, "ended": ended}
                )
                self.say(f"{job.name}: {ended} after {seconds} s")


class Names:
    """Collects the names of all tests for these GPUs, with pytest in the background."""

    def __init__(self) -> None:
        path = ":".join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH", ""))))
        given = os.environ | {"OUTRIDER_TEST_DEVICE": "cuda", "PYTHONPATH": path}
        commands = [[*PYTEST, "--collect-only", str(TESTS / folder)] for folder in ("law", "gpu")]
        self._collecting = [
            subprocess.Popen(one, cwd=ROOT, env=given, stdout=subprocess.PIPE, text=True) for one in commands
        ]

    def all(self) -> list[str]:
        return [
            line for run in self._collecting for line in run.communicate()[0].splitlines() if "::" in line
        ]


def file_of(name: str) -> str:
    return name.split("::")[0].removeprefix("tests/")


def record(suite: Suite, names: list[str], commit: str) -> dict[str, Any]:
    """Return the report of a run.

    It contains counts for each file, the tests that did not pass, near-ties and the output of long runs.
    """
    rows: dict[str, dict[str, float]] = {}
    not_passed = []
    for name in dict.fromkeys([*names, *suite.tests]):
        row = rows.setdefault(
            file_of(name), {"tests": 0, "passed": 0, "failed": 0, "not run": 0, "seconds": 0.0}
        )
        test = suite.tests.get(name, {"outcome": "not run", "seconds": 0.0})
        row["tests"] += 1
        row[test["outcome"] if test["outcome"] in ("passed", "failed") else "not run"] += 1
        row["seconds"] = round(row["seconds"] + test["seconds"], 1)
        if test["outcome"] != "passed":
            again = {"again": test["again"]} if "again" in test else {}
            not_passed.append(
                {"test": name, "outcome": test["outcome"], "error": why(test.get("error", "")), **again}
            )
    machine = {
        "gpus": nvidia_smi("--query-gpu=name", "--format=csv,noheader")[: len(suite.gpus)],
        "cores a lane": suite.share,
    }
    machine["packages"] = {"python": platform.python_version()} | {
        name: version for name in PACKAGES if (version := version_of(name))
    }
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit,
        "command": shlex.join(["python", "tests/gpu_suite.py", *sys.argv[1:]]),
        "machine": machine,
        "seconds": round(time.monotonic() - suite.begun),
        **{key: sum(row[key] for row in rows.values()) for key in ("tests", "passed", "failed", "not run")},
        "files": dict(sorted(rows.items())),
        "not passed": not_passed,
        "jobs": suite.job_outcomes,
        "near-ties": [tie for test in suite.tests.values() for tie in test.get("near_ties", ())],
        "printed": {
            name.split("::")[-1]: test["printed"].strip().splitlines()
            for name, test in suite.tests.items()
            if test.get("printed")
        },
    }


def why(error: str) -> str:
    """Return the last lines of the error description in a pytest report."""
    return " ".join(line[4:] for line in error.splitlines() if line.startswith("E "))[-500:]


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def nvidia_smi(*arguments: str) -> list[str]:
    return (
        subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True)
        .stdout.strip()
        .splitlines()
    )


def main() -> int:
    """Run everything. Returns 0 if every test passed at its first run, otherwise 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for everything")
    parser.add_argument(
        "--logs", type=Path, default=Path("gpu-suite-logs"), help="folder for the output of the jobs"
    )
    parser.add_argument(
        "--commit", default="", help="the tested commit, if the working tree is not a git checkout"
    )
    parser.add_argument(
        "--flashinfer-path", default="", help="folder that contains FlashInfer, if it is not installed"
    )
    given = parser.parse_args()
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = given.commit or subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number, _ in enumerate(nvidia_smi("-L"))]
    given.logs.mkdir(parents=True, exist_ok=True)
    suite, collected = Suite(gpus[:4], given.logs.resolve(), given.limit, given.flashinfer_path), Names()
    jobs = plan(len(suite.gpus), suite.share)
    suite.run(jobs)
    names = collected.all()
    suite.again([name for name in names if name not in suite.tests], jobs)
    found = record(suite, names, commit)
    given.output.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    suite.say(
        f"{found['passed']} of {found['tests']} passed, {found['failed']} failed, {found['not run']} not run"
    )
    return 0 if found["passed"] == found["tests"] else 1


if __name__ == "__main__":
    sys.exit(main())
