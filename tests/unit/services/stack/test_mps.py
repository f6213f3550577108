"""`outrider up --mps`, with a fake of NVIDIA's control program that records its calls."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.services.stack import launch
from outrider.services.stack.launch import plan_stack, running_stack
from outrider.services.stack.mps import PROGRAM, shared_gpu
from outrider.services.stack.option_checks import check_values
from outrider.services.stack.options import StackOptions, Transport
from outrider.services.stack.placement import Gpu, place_draft
from outrider.services.stack.supervisor import Child, ChildSpec, Supervisor, Surroundings
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.spec.algorithm import Algorithm

FAKE_PROGRAM = """#!{python}
import json, os, pathlib, sys
pipe, log = (pathlib.Path(os.environ["CUDA_MPS_" + name + "_DIRECTORY"]) for name in ("PIPE", "LOG"))
assert pipe.is_dir() and log.is_dir()
command = "" if sys.argv[1:] else sys.stdin.read()
call = [sys.argv[1:], command, str(pipe), os.environ.get("CUDA_VISIBLE_DEVICES")]
with open({record!r}, "a") as record:
    record.write(json.dumps(call) + "\\n")
if command == "get_server_list\\n":
    print("4242\\nnone of ours")
if {fails!r} in (sys.argv[1:] or [command.strip()]):
    print("An instance of this daemon is already running", file=sys.stderr)
    sys.exit(1)
"""


STUBBORN = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.environ["WHERE"], flush=True)
while True:
    signal.pause()
"""


class FakeControl:
    """Installs the fake control program on PATH and reads the calls that it recorded."""

    def __init__(self, folder: Path) -> None:
        self._record = folder / "record"
        self._program = folder / PROGRAM

    def install(self, fails: str = "-") -> None:
        self._program.write_text(
            FAKE_PROGRAM.format(python=sys.executable, record=str(self._record), fails=fails)
        )
        self._program.chmod(0o700)

    @property
    def calls(self) -> list[list[Any]]:
        return (
            [json.loads(line) for line in self._record.read_text().splitlines()]
            if self._record.exists()
            else []
        )

    @property
    def commands(self) -> list[str]:
        return [" ".join(arguments) or command.strip() for arguments, command, *_ in self.calls]


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeControl:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return FakeControl(folder)


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    folder = tmp_path / "dev"
    folder.mkdir()
    (folder / "nvidia0").touch()
    return folder


class Lines:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.first = threading.Event()

    def __call__(self, name: str, line: str) -> None:
        self.seen.append((name, line))
        self.first.set()


def test_the_service_runs_with_pipes_of_its_own_until_the_end(
    tmp_path: Path, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.install()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    lines = Lines()
    with shared_gpu(tmp_path / "mps", lines) as around:
        assert control.commands == ["-d"]
        pipe, log = tmp_path / "mps" / "pipe", tmp_path / "mps" / "log"
        assert around.variables == {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
        around.before_kill(77)
        assert control.commands[1:] == ["get_server_list", "terminate_client 4242 77"]
    assert control.commands[-1] == "quit"
    assert {(where, visible) for *_, where, visible in control.calls} == {(str(pipe), None)}
    assert lines.seen == []


def test_the_reason_for_a_failed_start_is_passed_on(tmp_path: Path, control: FakeControl) -> None:
    control.install(fails="-d")
    why = "An instance of this daemon is already running"
    message = f"--mps: nvidia-cuda-mps-control failed to start: {why}. Remove --mps"
    with pytest.raises(ConfigurationError, match=message) as caught, shared_gpu(tmp_path / "mps", Lines()):
        pass
    assert caught.value.field == "--mps"
    assert control.commands == ["-d"]


def test_a_daemon_that_does_not_quit_is_reported(tmp_path: Path, control: FakeControl) -> None:
    control.install(fails="quit")
    lines = Lines()
    with shared_gpu(tmp_path / "mps", lines):
        pass
    assert lines.seen == [
        ("mps", "nvidia-cuda-mps-control did not quit: An instance of this daemon is already running")
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu"}, "--mps shares a GPU, but --device cpu uses none. Remove --mps"),
        ({"draft": None}, "only the target would run there"),
        ({"algorithm": Algorithm.NGRAM, "draft": None}, "only the target would run there"),
        ({"transport": Transport.INPROC}, "only the target would run there"),
        ({}, "--mps: nvidia-cuda-mps-control is not on PATH. Install it with NVIDIA's driver"),
    ],
)
def test_mps_is_refused_where_it_has_no_effect(
    options: dict[str, Any], message: str, gpus: Path, control: FakeControl
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        check_values(StackOptions(mps=True, **options), gpus)
    assert caught.value.field == "--mps"
    assert control.calls == []


def test_mps_is_refused_without_an_nvidia_gpu(tmp_path: Path, gpus: Path, control: FakeControl) -> None:
    control.install()
    check_values(StackOptions(mps=True), gpus)
    with pytest.raises(ConfigurationError, match="this machine has none") as caught:
        check_values(StackOptions(mps=True), tmp_path)
    assert caught.value.field == "--mps"


def test_the_draft_has_a_process_of_its_own_and_is_reached_by_ipc() -> None:
    assert not place_draft(StackOptions(mps=True, tp=2), [Gpu(0, 0, 0)]).inproc
    assert (
        plan_stack(StackOptions(mps=True), Path("/run/x"), inproc=False).draft_address
        == "ipc:///run/x/draft.sock"
    )
    by_grpc = StackOptions(mps=True, transport=Transport.GRPC)
    assert plan_stack(by_grpc, Path("/run/x"), inproc=False).draft_address == "unix:/run/x/draft.sock"


def test_the_stack_runs_inside_the_daemon(control: FakeControl, monkeypatch: pytest.MonkeyPatch) -> None:
    control.install()
    found: list[Surroundings] = []

    class Fake:
        def settle(self) -> None:
            found.append(Surroundings())

        def child(self, name: str) -> Child:
            return Child(ChildSpec(name, ()), Lines(), threading.Event(), Surroundings())

    @contextmanager
    def supervisor(_children: object, _echo: object, around: Surroundings) -> Iterator[Fake]:
        found.append(around)
        before = control.commands
        yield Fake()
        assert control.commands == before, "the daemon must outlive the children"

    monkeypatch.setattr(launch, "check_options", lambda _options: None)
    monkeypatch.setattr(launch, "_wait_until_ready", lambda *_: None)
    monkeypatch.setattr(launch, "Supervisor", supervisor)
    with running_stack(StackOptions(mps=True), Lines(), lambda _line: None):
        assert found[0].variables["CUDA_MPS_PIPE_DIRECTORY"] == control.calls[0][2]
    assert control.commands == ["-d", "quit"]
    with running_stack(StackOptions(), Lines(), lambda _line: None):
        assert found[2].variables == {}
    assert control.commands == ["-d", "quit"], "the daemon starts on request only"


def test_children_get_the_variables_and_are_taken_off_the_gpu_before_they_are_killed() -> None:
    code = STUBBORN
    detached: list[int] = []
    lines = Lines()
    around = Surroundings({"WHERE": "here"}, detached.append)
    with Supervisor([ChildSpec("target", (sys.executable, "-c", code), 0.2)], lines, around) as supervisor:
        (child,) = supervisor.children
        assert lines.first.wait(20)
        process_id = child.process_id
    assert lines.seen[0] == ("target", "here")
    assert detached == [process_id]
