"""The whole GPU suite in one command, over all GPUs of a host: the laws on a GPU in fp32, and `tests/gpu` with what needs several GPUs.

    python tests/gpu_suite.py --output gpu_suite.json [--limit SECONDS]      (the packages of `.[test,flashinfer]`, and pytest-xdist)

Four lanes, each with its share of the cores and its GPU (of four; of fewer, lanes share), do one job after another. What measures, or needs
a GPU's memory, is a job of its own.
A test that fails is told at once, and run again at the end if there is time, as is one that was cut off: neither counts as passed then.
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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "support.gpu_suite_report",
    "-p",
    "no:cacheprovider",
    "--tb=short",
    "-o",
    "filterwarnings=default",
)
PACKAGES = ("torch", "triton", "grpcio", "transformers", "flashinfer-python")
LANES = 4
MOST_WORKERS = 14
LAST_S = 12.0
"""Before the limit, when what still runs is asked to end."""
AGAIN_S = 40.0
"""Least time in which tests are run again."""

ROUNDS_ELSEWHERE = "law/test_equality_rounds_remote.py"
FIRST_LAWS = tuple(f"law/test_{name}.py" for name in (
    "heads_trained", "equality_draft", "drafter_mtp", "equality_device_pair", "drafter_standalone", "equality_device_loop", "heads_tree",
    "heads_remote", "drafter_ngram", "noise_position", "philox",
))  # fmt: skip
"""About half of the laws by time; those first that train something."""
OTHER_LAWS_FIRST = (
    "doctor_trained",
    "mutations",
    "drafter_mtp_deepseek",
    "family_output",
    "joins",
    "demo_pair",
    "equality_engine",
)
FIRST_KERNELS = (
    "families_cuda", "tile_trial_cuda", "device_loop_cuda", "compile_cuda", "drafters", "layer_kernels_cuda", "draft_graph_cuda",
    "deterministic_cuda", "kernels",
)  # fmt: skip
"""Long tests first."""
SOAK, TEXTS, MPS, RANKS, FLASHINFER = (
    f"gpu/test_{name}_cuda.py" for name in ("soak", "text_bf16", "mps", "tp", "flashinfer")
)
SERVED, SERVED_BF16 = "gpu/test_serving.py", "gpu/test_serving_bf16.py"
QUIET = tuple(
    f"gpu/test_{name}_cuda.py"
    for name in ("ipc", "ipc_rounds", "bench", "exchange", "launch_counts", "relay")
)
"""They wait for other processes, or measure; on two GPUs if there are two."""
APART = (SOAK, TEXTS, MPS, RANKS, SERVED, SERVED_BF16, *QUIET)


@dataclass(frozen=True, slots=True)
class Job:
    """One run of pytest.

    Attributes:
        lanes: Whose cores and GPUs it has; it starts when the jobs before it have left all of them.
        workers: Processes of pytest-xdist, if more than one.
        arguments: Test files, relative to `tests`, and options.
        law: Whether its tests compute where `OUTRIDER_TEST_DEVICE` says.
        library: Whether it needs FlashInfer.
    """

    name: str
    lanes: tuple[int, ...]
    workers: int
    arguments: tuple[str, ...]
    law: bool = False
    library: bool = False

    @property
    def files(self) -> list[str]:
        return [argument for argument in self.arguments if argument.endswith(".py")]


def rest(folder: str, first: tuple[str, ...], without: tuple[str, ...]) -> tuple[str, ...]:
    """Return the test files of a folder that no other job has, the named ones first."""
    order = {f"{folder}/test_{name}.py": place for place, name in enumerate(first)}
    found = [f"{folder}/{path.name}" for path in sorted((TESTS / folder).glob("test_*.py"))]
    return tuple(
        sorted((path for path in found if path not in without), key=lambda path: order.get(path, len(order)))
    )


def plan(gpus: int, cores: int) -> list[Job]:
    """Return all jobs in the order in which lanes take them; `cores`: of one lane."""
    many, few, pair = (
        max(1, min(MOST_WORKERS, cores - 1)),
        max(1, min(7, cores // 2)),
        max(1, min(8, cores - 2)),
    )
    other_laws = rest("law", OTHER_LAWS_FIRST, (*FIRST_LAWS, ROUNDS_ELSEWHERE))
    kernels = ("-m", "gpu and not flashinfer", *rest("gpu", FIRST_KERNELS, APART))
    jobs = [
        Job("soak", (0,), 1, (SOAK,)),
        Job("laws", (1,), many, FIRST_LAWS, law=True),
        Job("other laws", (2,), many, other_laws, law=True),
        Job("kernels", (3,), many, kernels),
        Job("rounds elsewhere", (0,), few, (ROUNDS_ELSEWHERE,), law=True),
        Job("flashinfer", (1,), min(4, few), ("-m", "flashinfer", FLASHINFER), library=True),
        Job("served", (2,), 1, (SERVED, SERVED_BF16, MPS)),
        Job("texts", (3,), min(4, few), (TEXTS,)),
        Job("quiet", (2, 3), pair, QUIET),
    ]
    if gpus > 1:
        jobs.append(Job("two ranks", (0, 1), pair, ("-m", "multi_gpu", "-k", "not [4-", RANKS)))
    if gpus > 3:
        jobs.append(Job("four ranks", (0, 1, 2, 3), few, ("-m", "multi_gpu", "-k", "[4-", RANKS)))
    return jobs


class Suite:
    """Runs jobs, hears of their tests, and keeps what became of each.

    Args:
        gpus: Their numbers for `CUDA_VISIBLE_DEVICES`.
        logs: A folder for what jobs print.
        limit_s: When everything ends, from now.
        library: A folder with FlashInfer, or "".
    """

    def __init__(self, gpus: list[str], logs: Path, limit_s: float, library: str = "") -> None:
        self.gpus, self.logs, self.library = gpus, logs, library
        self.begun = time.monotonic()
        self.deadline = self.begun + limit_s - LAST_S
        cores = sorted(os.sched_getaffinity(0))
        self.share = max(1, len(cores) // LANES)
        self.cores = [set(cores[at * self.share : (at + 1) * self.share] or cores) for at in range(LANES)]
        self.tests: dict[str, dict[str, Any]] = {}
        self.told: list[dict[str, Any]] = []
        self._heard: dict[str, IO[str]] = {}

    def gpus_of(self, job: Job) -> list[str]:
        return [self.gpus[at] for at in sorted({lane % len(self.gpus) for lane in job.lanes})]

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:5.0f} s] {text}", flush=True)

    def run(self, jobs: list[Job], only: Path | None = None) -> None:
        """Run jobs, on each lane one after the other; at the deadline, what runs is asked to end. `only`: a file of the tests to run."""
        waiting, running = list(jobs), dict[str, tuple[Job, subprocess.Popen[bytes], float]]()
        while (waiting or running) and time.monotonic() < self.deadline:
            taken = {lane for job, _, _ in running.values() for lane in job.lanes}
            for job in list(waiting):
                if taken.isdisjoint(job.lanes):
                    waiting.remove(job)
                    running[job.name] = job, self._start(job, only), time.monotonic()
                taken.update(job.lanes)  # of one that waits, too: lanes keep the order
            self._collect_ended(running)
            self._hear()
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
        self._hear()
        for file in self._heard.values():
            file.close()
        self._heard.clear()
        self.told += [{"job": job.name, "seconds": 0, "ended": "not begun"} for job in waiting]

    def again(self, missing: list[str], jobs: list[Job]) -> None:
        """Run what failed or did not end once more, and what has not run, in few processes, if there is time."""
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
        self._heard[job.name] = log.open()
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

    def _hear(self) -> None:
        """Read what jobs have written since."""
        for file in self._heard.values():
            while (at := file.tell()) >= 0 and (line := file.readline()):
                if not line.endswith("\n"):
                    file.seek(at)
                    break
                self._take(json.loads(line))

    def _take(self, row: dict[str, Any]) -> None:
        test = self.tests.setdefault(row["test"], {"outcome": "not ended", "seconds": 0.0})
        if row["event"] == "end":
            key = "again" if "again" in test else "outcome"
            if test[key] != "failed":  # a test that passes may fail as it is taken down
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
                self.told.append(
                    {"job": job.name, "gpus": self.gpus_of(job), "seconds": seconds, "ended": ended}
                )
                self.say(f"{job.name}: {ended} after {seconds} s")


class Names:
    """Hears from pytest, meanwhile, which tests there are for these GPUs."""

    def __init__(self) -> None:
        path = ":".join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH", ""))))
        given = os.environ | {"OUTRIDER_TEST_DEVICE": "cuda", "PYTHONPATH": path}
        commands = [[*PYTEST, "--collect-only", str(TESTS / folder)] for folder in ("law", "gpu")]
        self._asked = [
            subprocess.Popen(one, cwd=ROOT, env=given, stdout=subprocess.PIPE, text=True) for one in commands
        ]

    def all(self) -> list[str]:
        return [line for asked in self._asked for line in asked.communicate()[0].splitlines() if "::" in line]


def file_of(name: str) -> str:
    return name.split("::")[0].removeprefix("tests/")


def record(suite: Suite, names: list[str], commit: str) -> dict[str, Any]:
    """Return what is to be written down of a run: counts a file, what did not pass, what near-ties and long runs printed."""
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
        "jobs": suite.told,
        "near-ties": [tie for test in suite.tests.values() for tie in test.get("near_ties", ())],
        "printed": {
            name.split("::")[-1]: test["printed"].strip().splitlines()
            for name, test in suite.tests.items()
            if test.get("printed")
        },
    }


def why(error: str) -> str:
    """Return what the lines of a report that say what was wrong end with."""
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
    """Run everything; the exit code says whether every test passed, at its first run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for everything")
    parser.add_argument(
        "--logs", type=Path, default=Path("gpu-suite-logs"), help="folder for what the runs print"
    )
    parser.add_argument(
        "--commit", default="", help="what is tested, where the working tree is no git checkout"
    )
    parser.add_argument(
        "--flashinfer-path", default="", help="folder with FlashInfer, if it is not installed"
    )
    given = parser.parse_args()
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = given.commit or subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number, _ in enumerate(nvidia_smi("-L"))]
    given.logs.mkdir(parents=True, exist_ok=True)
    suite, asked = Suite(gpus[:4], given.logs.resolve(), given.limit, given.flashinfer_path), Names()
    jobs = plan(len(suite.gpus), suite.share)
    suite.run(jobs)
    names = asked.all()
    suite.again([name for name in names if name not in suite.tests], jobs)
    found = record(suite, names, commit)
    given.output.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    suite.say(
        f"{found['passed']} of {found['tests']} passed, {found['failed']} failed, {found['not run']} not run"
    )
    return 0 if found["passed"] == found["tests"] else 1


if __name__ == "__main__":
    sys.exit(main())
