"""Tests of a target on two GPUs: the answers of one GPU, lost ranks, stuck steps, and ranks on two hosts."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

import pytest
import torch
from support.engine.gpu_ranks import CASE_S, Session, in_a_process, make_ranks_target
from support.services.rank_pair import running_ranks
from support.services.stack import PROMPTS, Process, assert_ranks_serve, free_port, supervised

from outrider.common.v1 import common_pb2
from outrider.services.target.parallel.group import end_soon, start_group
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.numerics import prepare_decoder
from outrider.shared.base.errors import OutriderError
from outrider.target.v1 import target_pb2

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(300)]

END_S = 30
STEP_S = 15
SMALL = ("--max-running-requests", "2", "--cuda-graph-max-bs", "2", "--kv-tokens", "16384")
"""Settings with few graphs and a small cache, to leave memory for other processes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ranks_target(tmp_path_factory.mktemp("tp"))


def test_the_embedded_pair_over_two_gpus_answers_as_over_one() -> None:
    answers = []
    for ranks in ("1", "2"):
        with supervised(
            "--dtype", "float32", "--tp", ranks, "--transport", "inproc", *SMALL, device="cuda"
        ) as stack:
            for mode in (common_pb2.SPECULATION_MODE_OFF, common_pb2.SPECULATION_MODE_ON):
                answers.append(
                    [stack.client.chat(prompt, mode=mode, max_tokens=64).token_ids for prompt in PROMPTS]
                )
            sampled = stack.client.chat(
                PROMPTS[0], temperature=0.8, seed=5, mode=common_pb2.SPECULATION_MODE_ON, max_tokens=64
            )
            answers[-1].append(sampled.token_ids)
            stack.assert_no_page_held()
    assert answers[0] == answers[1][:-1] == answers[2]
    assert answers[1] == answers[3]


def assert_ends(pid: int) -> None:
    """Assert that a process, which need not be a child, ends within `END_S`."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            assert select.select([descriptor], [], [], END_S)[0], f"process {pid} still runs"
        finally:
            os.close(descriptor)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_in_cuda_graphs_ends_the_target(
    folder: Path, tmp_path: Path, how: signal.Signals
) -> None:
    """Meanwhile, rank 0's kernels wait for it, and rank 0's host waits for them."""
    with running_ranks(folder, tmp_path, *SMALL) as (process, stub, rank):
        request = target_pb2.GenerateRequest(
            request_id="long", prompt_ids=[1, 2, 3], max_new_tokens=900, ignore_eos=True
        )
        replies = stub.Generate(request, timeout=CASE_S)
        next(replies)
        os.kill(rank, how)
        assert process.popen.wait(END_S) not in (0, None)
        assert "rank 1 is lost" in process.output
        assert_ends(rank)


@torch.inference_mode()
def wait_for_what_does_not_come(folder: Path, told: Path) -> None:
    """Replay a sum in which rank 1 takes no part, and wait for it inside a step."""

    def failed(error: OutriderError) -> None:
        told.write_text(f"{group.process_ids[0]} {error.message}")
        end_soon(error)

    torch.cuda.set_device(0)
    settings = TargetSettings.load({"model": folder, "device": "cuda", "tp": 2, "tp_timeout_s": STEP_S})
    group = start_group(settings, failed)
    session = Session(prepare_decoder(settings, group.decoder))
    session.run(0, 4, session.batch(0, 4), session.tokens[:4])
    numbers = torch.zeros(1, dtype=torch.int32, device=session.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        group.decoder.collectives.all_reduce(numbers)
    with group.decoder.watched():
        graph.replay()
        torch.cuda.synchronize()


def test_a_step_that_does_not_come_back_from_the_gpu_ends_the_process(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EOFError):
        in_a_process(wait_for_what_does_not_come, folder, tmp_path / "told")
    rank, _, told = (tmp_path / "told").read_text().partition(" ")
    assert told.startswith(f"tp: a step has not returned for {STEP_S} s")
    assert_ends(int(rank))


def test_ranks_of_two_hosts_serve_together(folder: Path, tmp_path: Path) -> None:
    """Simulates torchrun with one rank on each of two hosts, each of which sees one GPU."""
    address, port = f"unix:{tmp_path}/t.sock", free_port()

    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")

    def start(rank: int) -> Process:
        numbers = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
        environment = {name: str(number) for name, number in numbers.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": gpus[rank]}
        flags = ("--model", str(folder), "--tp", "2", "--listen", address, *SMALL)
        return Process("serve", "target", *flags, log=tmp_path / f"{rank}.log", environment=environment)

    assert_ranks_serve(start(0), start(1), address, 40)
