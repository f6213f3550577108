"""Services from the wheel of an earlier revision work with today's services, in both directions.

The earlier revision is the last one whose highest version of the draft protocol is 2. Its wheel is built from
git's history, unpacked, and run by this environment's Python. Two stacks cover every pair of neighbours: the
earlier gateway and draft with today's target, and today's gateway and draft with the earlier target.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.services.stack import DEMO_HEAD, DEMO_TARGET, Process
from support.suite.scripts import import_script

from outrider.services.stack.launch import free_port

ROOT = Path(__file__).resolve().parents[2]
CPU = ("--device", "cpu", "--threads", "1")
QUESTIONS = (
    {"text": "What is the capital of France?", "temperature": 0.0},
    {"text": "Explain why the sky is blue.", "temperature": 0.9, "seed": 5},
)


SCRIPT = import_script("earlier_wheel")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment variables with which Python imports the package of the earlier wheel."""
    folder = tmp_path_factory.mktemp("earlier")
    try:
        wheel = SCRIPT.build_wheel(SCRIPT.LAST_OF_DRAFT_PROTOCOL_2, folder)
    except SCRIPT.HistoryError as error:
        pytest.fail(str(error))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "package")
    environment = {"PYTHONPATH": str(folder / "package")}
    program = "import outrider.shared.rpc.version as v; print(v.__file__, v.MAX_VERSION)"
    told = subprocess.check_output([sys.executable, "-c", program], env=os.environ | environment, text=True)
    assert told.split() == [str(folder / "package/outrider/shared/rpc/version.py"), "2"]
    return environment


class Services:
    """A draft, a target and a gateway as processes.

    Args:
        cleanup: Stops the processes when it is closed.
        folder: Folder for sockets and logs.
        environments: Environment variables of the draft, the target and the gateway.
    """

    def __init__(self, cleanup: ExitStack, folder: Path, *environments: dict[str, str]) -> None:
        folder.mkdir()
        draft, target = (f"unix:{folder}/{name}.sock" for name in ("d", "t"))
        port = free_port()
        commands = (
            ("draft", "--draft", DEMO_HEAD, "--target-weights", DEMO_TARGET, "--listen", draft, *CPU),
            ("target", "--model", DEMO_TARGET, "--draft", draft, "--listen", target, *CPU),
            (
                "gateway",
                "--port",
                port,
                "--grpc-port",
                port + 1,
                "--target",
                target,
                "--tokenizer",
                DEMO_TARGET,
            ),
        )
        # The services start at the same time, and connect when the others are ready.
        self.processes = []
        for command, environment in zip(commands, environments, strict=True):
            log = folder / f"{command[0]}.log"
            process = Process("serve", *(str(part) for part in command), log=log, environment=environment)
            cleanup.callback(process.stop)
            self.processes.append(process)
        for process, address in zip(self.processes, (draft, target, f"127.0.0.1:{port + 1}"), strict=True):
            process.wait_serving(address)
        self._url = f"http://127.0.0.1:{port}/generate"

    def answer(self, question: dict[str, Any], mode: str) -> dict[str, Any]:
        """Return the reply to a question."""
        sampling = {name: value for name, value in question.items() if name != "text"}
        body = {
            "text": question["text"],
            "sampling_params": sampling | {"max_new_tokens": 48},
            "speculation": {"mode": mode},
        }
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return dict(json.load(reply))


@pytest.fixture(scope="module")
def stacks(
    earlier: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Services, ...]]:
    folder = tmp_path_factory.mktemp("s")
    with ExitStack() as cleanup:
        yield (
            Services(cleanup, folder / "a", earlier, {}, earlier),
            Services(cleanup, folder / "b", {}, earlier, {}),
        )


@pytest.mark.parametrize("question", QUESTIONS, ids=["greedy", "sampled"])
def test_an_earlier_release_and_this_one_give_the_same_tokens(
    stacks: tuple[Services, ...], question: dict[str, Any]
) -> None:
    replies = [one.answer(question, mode) for one in stacks for mode in ("on", "off")]
    tokens = [reply["output_ids"] for reply in replies]
    assert len(tokens[0]) > 8
    assert tokens == [tokens[0]] * 4
    for drafted in (replies[0], replies[2]):
        assert drafted["meta_info"]["spec_accept_length"] > 1.2, "the draft took part"


def test_they_agree_on_the_earlier_protocol(stacks: tuple[Services, ...]) -> None:
    for services in stacks:
        _draft, target, _gateway = services.processes
        assert "with protocol version 2" in target.output


def test_a_checkout_without_the_history_is_named() -> None:
    with pytest.raises(SCRIPT.HistoryError, match="git fetch --unshallow"):
        SCRIPT.build_wheel("0123456789abcdef0123456789abcdef01234567", ROOT)
