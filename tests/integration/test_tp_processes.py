"""A target of two ranks as real processes: lost and stopped ranks, SIGTERM, torchrun, and refused starts."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from support.models.toys import make_toy_target
from support.services.rank_pair import TARGET_SERVICE, running_ranks
from support.services.stack import (
    OUTRIDER,
    Process,
    assert_ranks_serve,
    child_pids,
    free_port,
    health_changes,
)

from outrider.common.v1 import common_pb2
from outrider.target.v1 import target_pb2, target_pb2_grpc

VOCAB, HIDDEN = 97, 128
CPU = ("--device", "cpu", "--threads", "1")
END_S = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model whose single KV head is shared by both ranks, with a vocabulary that needs padding."""
    return make_toy_target(
        tmp_path_factory.mktemp("tp"),
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_heads=4,
        num_kv_heads=1,
        planted=2.5,
        seed=5,
    )


def serve(model: Path, log: Path, *arguments: str, environment: dict[str, str] | None = None) -> Process:
    flags = ("--model", str(model), "--tp", "2", *CPU)
    return Process("serve", "target", *flags, *arguments, log=log, environment=environment)


def as_torchrun(rank: int, port: str) -> dict[str, str]:
    """Return the environment variables that torchrun sets for one of two ranks on one host."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    return {
        **{name: str(number) for name, number in numbers.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def long_request() -> target_pb2.GenerateRequest:
    return target_pb2.GenerateRequest(
        request_id="long", prompt_ids=[1, 2, 3], max_new_tokens=900, ignore_eos=True
    )


def assert_gone(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_killed_rank_ends_the_target_with_an_error(folder: Path, tmp_path: Path) -> None:
    with running_ranks(folder, tmp_path, *CPU) as (process, stub, rank):
        replies = stub.Generate(long_request(), timeout=60)
        next(replies)
        os.kill(rank, signal.SIGKILL)
        with contextlib.suppress(grpc.RpcError):  # the stream is cut, or ends with an error event
            last = list(replies)[-1]
            assert last.WhichOneof("event") == "error"
        assert process.popen.wait(END_S) not in (0, None)
        assert "rank 1 is lost" in process.output


@pytest.mark.parametrize("terminated", [False, True])
def test_a_stopped_rank_ends_the_target_with_an_error_that_names_it(
    terminated: bool, folder: Path, tmp_path: Path
) -> None:
    with running_ranks(folder, tmp_path, *CPU, "--tp-timeout-s", "3") as (process, stub, rank):
        replies = stub.Generate(long_request(), timeout=60)
        next(replies)
        os.kill(rank, signal.SIGSTOP)
        if terminated:
            process.popen.terminate()
        with pytest.raises(grpc.RpcError) as error:
            list(replies)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE, "the request is not to blame"
        assert "tp: rank 1 is lost: it has been silent" in str(error.value)
        assert "Timed out waiting" not in str(error.value)
        assert process.popen.wait(END_S) not in (0, None)
        assert "error: tp: rank 1 is lost" in process.output
        assert_gone(rank)


def test_a_killed_rank_ends_an_idle_target_too(folder: Path, tmp_path: Path) -> None:
    with running_ranks(folder, tmp_path, *CPU) as (process, _stub, rank):
        os.kill(rank, signal.SIGKILL)
        assert process.popen.wait(END_S) not in (0, None)
        assert "error: tp: rank 1 is lost" in process.output


def test_rank_1_ends_with_a_killed_rank_0(folder: Path, tmp_path: Path) -> None:
    with running_ranks(folder, tmp_path, *CPU) as (process, stub, rank):
        replies = stub.Generate(long_request(), timeout=60)
        next(replies)
        descriptor = os.pidfd_open(rank)
        process.popen.kill()
        readable, _, _ = select.select([descriptor], [], [], END_S)
        os.close(descriptor)
        assert readable, "rank 1 outlived rank 0"


def test_sigterm_drains_and_leaves_no_rank_behind(folder: Path, tmp_path: Path) -> None:
    with running_ranks(folder, tmp_path, *CPU) as (process, stub, rank):
        replies = stub.Generate(
            target_pb2.GenerateRequest(request_id="a", prompt_ids=[1, 2], max_new_tokens=50, ignore_eos=True),
            timeout=60,
        )
        next(replies)
        os.kill(rank, signal.SIGTERM)  # like a supervisor that signals the whole process group
        process.popen.terminate()
        assert list(replies)[-1].WhichOneof("event") == "finish"
        assert process.popen.wait(END_S) == 0
        assert_gone(rank)


def test_ranks_that_torchrun_starts_serve_together(folder: Path, tmp_path: Path) -> None:
    address, port = f"unix:{tmp_path}/t.sock", str(free_port())

    first, second = (
        serve(folder, tmp_path / f"{rank}.log", "--listen", address, environment=as_torchrun(rank, port))
        for rank in range(2)
    )
    assert_ranks_serve(first, second, address, 8)


def generated(address: str) -> list[int]:
    greedy = common_pb2.SamplingOptions(temperature=0.0)
    request = target_pb2.GenerateRequest(
        request_id="a", prompt_ids=[1, 2, 3], max_new_tokens=8, ignore_eos=True, sampling=greedy
    )
    with grpc.insecure_channel(address) as channel:
        replies = target_pb2_grpc.TargetStub(channel).Generate(request, timeout=60)
        return [token for reply in replies for token in reply.delta.token_ids]


def test_torchrun_on_two_hosts_restarts_all_ranks_when_one_dies(folder: Path, tmp_path: Path) -> None:
    """Run torchrun twice, as if on two hosts.

    After a restart, its store still contains the entries of the first ranks.
    """
    address, endpoint = f"unix:{tmp_path}/t.sock", f"127.0.0.1:{free_port()}"
    hosts = [
        Process(
            *(
                "--nnodes",
                "2",
                "--nproc-per-node",
                "1",
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                endpoint,
                "--rdzv-id",
                "outrider",
            ),
            *(
                "--max-restarts",
                "1",
                "--monitor-interval",
                "0.2",
                "--no-python",
                *OUTRIDER,
                "serve",
                "target",
                "--model",
                str(folder),
            ),
            *("--device", "cpu", "--threads", "1", "--tp", "2", "--listen", address),
            log=tmp_path / f"{host}.log",
            command=(sys.executable, "-m", "torch.distributed.run"),
            environment={"OMP_NUM_THREADS": "1"},
        )
        for host in range(2)
    ]
    try:
        hosts[0].wait_serving(address, TARGET_SERVICE)
        tokens = generated(address)
        assert len(tokens) == 8
        ranks = [child_pids(host.popen.pid, "serve") for host in hosts]
        assert [len(pids) for pids in ranks] == [1, 1], "each host runs one rank"
        os.kill(ranks[1][0], signal.SIGKILL)
        statuses = health_changes(address, TARGET_SERVICE)
        while next(statuses) == health_pb2.HealthCheckResponse.SERVING:
            pass
        hosts[0].wait_serving(address, TARGET_SERVICE)
        assert generated(address) == tokens
        restarted = [child_pids(host.popen.pid, "serve") for host in hosts]
        assert all(
            len(pids) == 1 and pids != before for pids, before in zip(restarted, ranks, strict=True)
        ), "both ranks must be new processes"
        for host in hosts:
            host.popen.terminate()
        for host in hosts:
            host.popen.wait(30)
        for pids in restarted:
            assert_gone(pids[0])
    except BaseException:
        print(*(host.output[-4000:] for host in hosts), sep="\n---\n")
        raise
    finally:
        for host in hosts:
            host.stop()


def test_a_world_of_another_size_is_refused(folder: Path) -> None:
    environment = os.environ | {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_PORT": "1",
    }
    command = [*OUTRIDER, "serve", "target", "--model", str(folder), "--device", "cpu", "--tp", "2"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "WORLD_SIZE is 4" in ended.stderr


def test_a_rank_that_cannot_load_ends_the_start_with_its_reason(folder: Path, tmp_path: Path) -> None:
    """Rank 1 finds a different checkpoint at the path, which can happen on another host."""
    other = make_toy_target(
        tmp_path / "other", vocab_size=VOCAB, hidden_size=HIDDEN, num_heads=4, num_kv_heads=1, seed=6
    )
    port = str(free_port())

    first, second = (
        serve(
            model,
            tmp_path / f"{rank}.log",
            "--listen",
            f"unix:{tmp_path}/t.sock",
            environment=as_torchrun(rank, port),
        )
        for rank, model in enumerate((folder, other))
    )
    try:
        assert first.popen.wait(60) == 2
        assert "rank 1 has other weights than rank 0" in first.output
        assert second.popen.wait(END_S) is not None
    finally:
        first.stop()
        second.stop()
