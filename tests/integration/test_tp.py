"""A target spread over two processes (gloo on the CPU): the same numbers and tokens as one process, and an end when a rank ends."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2
from support.parallel_ranks import exit_codes
from support.stack import OUTRIDER, Process, assert_ranks_serve, child_pids, free_port, health_changes
from support.target_harness import (
    FakeDrafter,
    assert_same_tokens,
    load_toy,
    make_harness,
    oracle_plan,
    random_plan,
)
from support.toys import make_toy_eagle3, make_toy_target

from outrider.common.v1 import common_pb2
from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.parallel.group import RankGroup, start_group
from outrider.services.target.settings import TargetSettings
from outrider.shared.attn.base import build_batch
from outrider.shared.attn.create import create_backend
from outrider.shared.base.errors import ConfigurationError, OutriderError
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.nn.decoder import LM_HEAD, Decoder
from outrider.shared.nn.feature_projector import FeatureProjector
from outrider.shared.spec.drafter import FeatureSpec
from outrider.target.v1 import target_pb2, target_pb2_grpc

torch.set_num_threads(1)
VOCAB, HIDDEN = 97, 128
TARGET_SERVICE = "outrider.target.v1.Target"
END_S = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # One K/V head for two ranks; a vocabulary that needs padding.
    return make_toy_target(
        tmp_path_factory.mktemp("tp"),
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_heads=4,
        num_kv_heads=1,
        planted=2.5,
        seed=5,
    )


@pytest.fixture(scope="module")
def whole(folder: Path) -> Decoder:
    return load_toy(folder)


@pytest.fixture(scope="module")
def group(folder: Path) -> Iterator[RankGroup]:
    failures: list[OutriderError] = []
    group = start_group(TargetSettings(model=folder, device="cpu", tp=2, threads=1), failures.append)
    yield group
    pids = group.process_ids
    group.close()
    assert exit_codes(group) == [0], "it left by itself"
    assert failures == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def prompts(count: int = 3) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(3, 40))] for _ in range(count)]


def test_logits_and_captured_states_are_those_of_one_process(whole: Decoder, group: RankGroup) -> None:
    found = []
    for decoder in (whole, group.decoder):
        pool, attention = decoder.make_pool(16, 16), create_backend("auto", "cpu")
        leases = [lease for lease in (pool.lease(48), pool.lease(48)) if lease is not None]
        tokens = [prompts(2)[0][:3] * 3, prompts(2)[1][:3] * 11]
        attention.plan(build_batch(pool, leases, [0, 0], [9, 33]))
        positions = torch.cat([torch.arange(9), torch.arange(33)])
        output = decoder.forward(torch.tensor(tokens[0] + tokens[1]), positions, attention, pool, (1, 3))
        spec = FeatureSpec(aux_layer_ids=(1, 3), feature_size=2 * HIDDEN)
        features = FeatureProjector(spec, "cpu", torch.float32, hidden_size=HIDDEN, num_layers=8)(output)
        found.append((decoder.logits(output.hidden), decoder.logits(output.hidden[[8, 41]]), features))
        attention.plan(build_batch(pool, leases, [9, 33], [1, 1]))  # behind what the ranks have stored
        step = decoder.forward(torch.tensor([1, 2]), torch.tensor([9, 33]), attention, pool)
        found[-1] += (decoder.logits(step.hidden),)
    for want, got in zip(*found, strict=True):
        assert got.shape == want.shape
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4), float((got - want).abs().max())


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=9),
    ],
    ids=["greedy", "sampled", "filtered"],
)
def test_tokens_are_those_of_one_process_with_and_without_speculation(
    sampling: SamplingParams, whole: Decoder, group: RankGroup
) -> None:
    expected = []
    for prompt in prompts():
        alone = make_harness(whole, NoDrafter())
        alone.submit(prompt, 40, request_id="plain", mode=SpeculationMode.OFF, sampling=sampling)
        alone.run()
        expected.append(alone.sink.tokens["plain"])
    truth = [prompt + answer for prompt, answer in zip(prompts(), expected, strict=True)]
    for plan in (oracle_plan(truth, VOCAB, 0.7), random_plan(VOCAB)):
        harness = make_harness(
            group.decoder,
            FakeDrafter(plan, FeatureSpec(aux_layer_ids=(1,), feature_size=HIDDEN)),
            num_pages=64,
        )
        for index, prompt in enumerate(prompts()):
            harness.submit(prompt, 40, request_id=f"off {index}", mode=SpeculationMode.OFF, sampling=sampling)
            harness.submit(prompt, 40, request_id=f"on {index}", shape=(5, 3, 12), sampling=sampling)
        harness.run()
        for index, prompt in enumerate(prompts()):
            for kind in ("off", "on"):
                assert_same_tokens(
                    whole, prompt, expected[index], harness.sink.tokens[f"{kind} {index}"], sampling
                )
    assert harness.sink.finished["on 0"].speculation.rounds > 0


def test_a_head_on_rank_0_drafts_as_it_does_for_one_process(
    whole: Decoder, group: RankGroup, folder: Path, tmp_path: Path
) -> None:
    head = make_toy_eagle3(
        tmp_path / "head", folder, planted=2.5, aux_layers=[1, 3, 4], intermediate_size=128
    )
    found = []
    for decoder in (whole, group.decoder):
        drafter = drafter_beside(
            decoder, DraftSettings.load({"draft": head, "target_weights": folder, "device": "cpu"})
        )
        harness = make_harness(decoder, drafter)
        for index, prompt in enumerate(prompts()):
            harness.submit(prompt, 40, request_id=str(index), shape=(4, 2, 9))
        harness.run()
        drafter.shutdown()
        finished = [harness.sink.finished[str(index)].speculation for index in range(3)]
        found.append((harness.sink.tokens, [(report.rounds, report.accepted_tokens) for report in finished]))
    assert found[0] == found[1]
    assert sum(accepted for _, accepted in found[0][1]) > 0


def test_weights_that_a_draft_borrows_are_whole(whole: Decoder, group: RankGroup) -> None:
    for name in ("model.embed_tokens.weight", LM_HEAD):
        assert torch.equal(group.decoder.weight(name), whole.weight(name))


def test_pages_are_scrubbed_on_every_rank(group: RankGroup) -> None:
    decoder = group.decoder
    pool, attention = decoder.make_pool(4, 16), create_backend("auto", "cpu")
    lease = pool.lease(16)
    assert lease is not None

    def logits(tokens: list[int], start: int) -> torch.Tensor:
        attention.plan(build_batch(pool, [lease], [start], [len(tokens)]))
        return decoder.logits(
            decoder.forward(
                torch.tensor(tokens), torch.arange(start, start + len(tokens)), attention, pool
            ).hidden
        )

    fresh = logits([7], 4)  # over four tokens of zeros
    logits([1, 2, 3, 4], 0)
    assert not torch.equal(logits([7], 4), fresh)
    pool.scrub(torch.tensor(lease.pages))
    assert torch.equal(logits([7], 4), fresh)


@pytest.mark.parametrize(
    ("tp", "field"), [(3, "num_attention_heads 4 of the model"), (8, "num_attention_heads 4 of the model")]
)
def test_heads_that_do_not_divide_are_refused_before_anything_starts(
    tp: int, field: str, folder: Path
) -> None:
    with pytest.raises(ConfigurationError, match=field):
        start_group(TargetSettings(model=folder, device="cpu", tp=tp))


def serve(model: Path, log: Path, *arguments: str, environment: dict[str, str] | None = None) -> Process:
    flags = ("--model", str(model), "--device", "cpu", "--threads", "1", "--tp", "2")
    return Process("serve", "target", *flags, *arguments, log=log, environment=environment)


def as_torchrun(rank: int, port: str) -> dict[str, str]:
    """Return what torchrun sets for a rank of two on one host."""
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


@contextlib.contextmanager
def serving(
    model: Path, log: Path, *arguments: str
) -> Iterator[tuple[Process, target_pb2_grpc.TargetStub, int]]:
    """A target of two processes; yields it, its API, and the process of rank 1."""
    address = f"unix:{log}/t.sock"
    process = serve(model, log / "target.log", "--listen", address, *arguments)
    try:
        process.wait_serving(address, TARGET_SERVICE)
        (rank,) = child_pids(process.popen.pid, "tp_worker")
        with grpc.insecure_channel(address) as channel:
            yield process, target_pb2_grpc.TargetStub(channel), rank
    except BaseException:
        print(process.output[-8000:])
        raise
    finally:
        process.stop()


def assert_gone(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_killed_rank_ends_the_target_with_an_error(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path) as (process, stub, rank):
        replies = stub.Generate(long_request(), timeout=60)
        next(replies)
        os.kill(rank, signal.SIGKILL)
        with contextlib.suppress(grpc.RpcError):  # cut, or told that it failed
            last = list(replies)[-1]
            assert last.WhichOneof("event") == "error"
        assert process.popen.wait(END_S) not in (0, None)
        assert "rank 1 is lost" in process.output


@pytest.mark.parametrize("told_to_end", [False, True])
def test_a_stopped_rank_ends_the_target_with_an_error_that_names_it(
    told_to_end: bool, folder: Path, tmp_path: Path
) -> None:
    with serving(folder, tmp_path, "--tp-timeout-s", "3") as (process, stub, rank):
        replies = stub.Generate(long_request(), timeout=60)
        next(replies)
        os.kill(rank, signal.SIGSTOP)
        if told_to_end:
            process.popen.terminate()
        with pytest.raises(grpc.RpcError) as told:
            list(replies)
        assert told.value.code() is grpc.StatusCode.UNAVAILABLE, "no fault of the request"
        assert "tp: rank 1 is lost: it has been silent" in str(told.value)
        assert "Timed out waiting" not in str(told.value)
        assert process.popen.wait(END_S) not in (0, None)
        assert "error: tp: rank 1 is lost" in process.output
        assert_gone(rank)


def test_a_killed_rank_ends_an_idle_target_too(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path) as (process, _stub, rank):
        os.kill(rank, signal.SIGKILL)
        assert process.popen.wait(END_S) not in (0, None)
        assert "error: tp: rank 1 is lost" in process.output


def test_the_other_rank_ends_with_a_killed_target(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path) as (process, stub, rank):
        replies = stub.Generate(long_request(), timeout=60)
        next(replies)
        descriptor = os.pidfd_open(rank)
        process.popen.kill()
        readable, _, _ = select.select([descriptor], [], [], END_S)
        os.close(descriptor)
        assert readable, "rank 1 outlives rank 0"


def test_sigterm_drains_and_leaves_no_rank_behind(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path) as (process, stub, rank):
        replies = stub.Generate(
            target_pb2.GenerateRequest(request_id="a", prompt_ids=[1, 2], max_new_tokens=50, ignore_eos=True),
            timeout=60,
        )
        next(replies)
        os.kill(rank, signal.SIGTERM)  # a supervisor that signals all processes of a group
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


def test_torchrun_on_two_hosts_serves_and_starts_all_ranks_anew_when_one_dies(
    folder: Path, tmp_path: Path
) -> None:
    """torchrun itself, once for each of two hosts that are one here. After a restart its store still holds what the first ranks left."""
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
        assert [len(pids) for pids in ranks] == [1, 1], "a rank on each host"
        os.kill(ranks[1][0], signal.SIGKILL)
        statuses = health_changes(address, TARGET_SERVICE)
        while next(statuses) == health_pb2.HealthCheckResponse.SERVING:
            pass
        hosts[0].wait_serving(address, TARGET_SERVICE)
        assert generated(address) == tokens
        anew = [child_pids(host.popen.pid, "serve") for host in hosts]
        assert all(len(pids) == 1 and pids != before for pids, before in zip(anew, ranks, strict=True)), (
            "both ranks are new"
        )
        for host in hosts:
            host.popen.terminate()
        for host in hosts:
            host.popen.wait(30)
        for pids in anew:
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
    """Rank 1 finds another checkpoint under the path, as it could on another host."""
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
