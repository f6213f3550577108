"""Tests of `outrider up --mps` with NVIDIA's real multi-process service.

The target and the draft are clients of the MPS service, which ends with the stack. The tests need
`nvidia-cuda-mps-control`, which is part of the driver.
"""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from support.services.stack import PROMPTS, START_TIMEOUT_S, Stack, child_pid, supervised

from outrider.common.v1 import common_pb2
from outrider.services.stack.mps import PROGRAM

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ON, OFF = common_pb2.SPECULATION_MODE_ON, common_pb2.SPECULATION_MODE_OFF
FLAGS = ("--mps", "--dtype", "float32", "--kv-tokens", "65536")
PIPES = "CUDA_MPS_PIPE_DIRECTORY"


def pipes_of(pid: int) -> str:
    """Return the directory in which a process looks for the service."""
    variables = dict(
        line.split("=", 1) for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if line
    )
    return variables[PIPES]


def tell(pipes: str, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM],
        input=command + "\n",
        env=os.environ | {PIPES: pipes},
        capture_output=True,
        text=True,
        timeout=20,
    )


def answers(stack: Stack, mode: int) -> list[list[int]]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        chat = partial(stack.client.chat, mode=mode, max_tokens=96)
        return [result.token_ids for result in pool.map(chat, PROMPTS)]


def test_both_processes_are_clients_of_a_service_that_ends_with_them() -> None:
    with supervised(*FLAGS, device="cuda") as stack:
        up = stack.processes[0].popen.pid
        pids = {child_pid(up, service) for service in ("target", "draft")}
        pipes = {pipes_of(pid) for pid in pids}
        assert len(pipes) == 1
        (pipe,) = pipes
        servers = tell(pipe, "get_server_list").stdout.split()
        clients = {
            int(pid) for server in servers for pid in tell(pipe, f"get_client_list {server}").stdout.split()
        }
        print(f"servers {servers}, clients {sorted(clients)}, target and draft {sorted(pids)}")
        assert pids <= clients
        assert answers(stack, ON) == answers(stack, OFF)
        stack.assert_no_page_held()
    assert tell(pipe, "get_server_list").returncode != 0, "the service must end with the stack"


def test_a_draft_that_is_killed_comes_back() -> None:
    with supervised(*FLAGS, device="cuda") as stack:
        plain = answers(stack, OFF)
        os.kill(child_pid(stack.processes[0].popen.pid, "draft"), signal.SIGKILL)
        assert answers(stack, ON) == plain
        stack.wait_drafting(START_TIMEOUT_S)
        assert answers(stack, ON) == plain
        stack.assert_no_page_held()
