"""Tests of a target over several GPUs, with peer memory and with NCCL.

Numbers and tokens equal those of one GPU, both eagerly and in CUDA graphs. Failures end the target.

Each case runs in its own process, because a process can join only one group in its life.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from support.parallel_ranks import exit_codes
from support.stack import PROMPTS, Process, assert_ranks_serve, child_pids, free_port, supervised
from support.toys import make_toy_target
from test_families_cuda import SMALL as SMALL_MODEL
from test_families_cuda import TINY, write_checkpoint

from outrider.common.v1 import common_pb2
from outrider.kernels.verify import SamplingTensors
from outrider.services.target.parallel.group import RankGroup, end_soon, start_group
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.numerics import prepare_decoder
from outrider.shared.attn.base import AttentionBatch, build_batch
from outrider.shared.attn.create import create_backend
from outrider.shared.base.errors import OutriderError
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.open import load_decoder
from outrider.shared.parallel.lead_decoder import graph_observer
from outrider.target.v1 import target_pb2, target_pb2_grpc

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(300)]

SIZES = [2, 4] if torch.cuda.device_count() >= 4 else [2]
PROMPT, NODES = 300, 24
REPLAYS = 20
CASE_S = 240
END_S = 30
STEP_S = 15
TARGET_SERVICE = "outrider.target.v1.Target"
SMALL = ("--max-running-requests", "2", "--cuda-graph-max-bs", "2", "--kv-tokens", "16384")
"""Settings with few graphs and a small cache, to leave memory for other processes."""


def in_a_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of this module in a fresh process and return its result.

    Raises:
        EOFError: The process ended without a result.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    try:
        assert ours.poll(CASE_S), f"{work.__name__} did not end within {CASE_S} s"
        problem, result = ours.recv()
        assert not problem, problem
        return result
    finally:
        process.kill()  # Its ranks end by themselves.
        process.join()


def _answer(pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(("", work(*arguments)))
    except Exception:
        pipe.send((traceback.format_exc(), None))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tp")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    return make_toy_target(path, vocab_size=1000, num_layers=6, seed=5, **sizes)


class Session:
    """A prompt followed by steps of some rows, on one GPU or on several."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.device = decoder.device
        self.pool: KVPool = decoder.make_pool(64, 16)
        self.attention = create_backend("auto", self.device)
        self.lease = self.pool.lease(PROMPT + 2 * NODES)
        assert self.lease is not None
        numbers = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, decoder.config.vocab_size, (PROMPT + NODES,), generator=numbers).to(
            self.device
        )

    def batch(self, start: int, rows: int) -> AttentionBatch:
        assert self.lease is not None
        return build_batch(self.pool, [self.lease], [start], [rows])

    def run(
        self, start: int, rows: int, batch: AttentionBatch, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and greedy tokens of rows that start at index `start`."""
        self.attention.plan(batch)
        positions = torch.arange(start, start + rows, device=self.device)
        output = self.decoder.forward(tokens, positions, self.attention, self.pool)
        return self.decoder.logits(output.hidden).float(), self.decoder.choose(
            output.hidden, greedy(rows, self.device), positions + 1
        )


def greedy(rows: int, device: torch.device) -> SamplingTensors:
    zeros = torch.zeros(rows, device=device)
    ints = zeros.int()
    return SamplingTensors(
        zeros, ints, zeros + 1, zeros, zeros.long(), ints, all_greedy=True, any_filter=False
    )


def close(group: RankGroup) -> None:
    """Make all ranks leave together, so that none waits for another until it is killed."""
    begun = time.monotonic()
    group.close()
    print(f"closed in {time.monotonic() - begun:.1f} s")
    assert set(exit_codes(group)) == {0}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of three steps: the prompt, one row after it, and `NODES` rows after it.

    Lists have one entry per step.

    Attributes:
        errors: Relative errors of the ranks' logits against one GPU without quantisation.
        of_one: The same for one GPU with the ranks' settings.
        distances: Gaps of the ranks' greedy tokens to the best logits.
        differing: Graph replays that differ from the eager step.
        summed_by: The class with which the ranks sum.
    """

    errors: list[float]
    of_one: list[float]
    distances: list[float]
    differing: int
    summed_by: str


@torch.inference_mode()
def compare(folder: Path, size: int, dtype: str, reduce: str, quantization: str = "none") -> Comparison:
    """Run the same steps on one GPU and on several. Steps that never wait for the host also run in graphs.

    Only experts in fp32 wait for the host.
    """
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = TargetSettings.load(
        {
            "model": folder,
            "device": "cuda",
            "dtype": dtype,
            "tp": size,
            "tp_all_reduce": reduce,
            "quantization": quantization,
        }
    )
    group = start_group(settings)
    try:
        plain, one = (load_decoder(folder, "cuda:0", getattr(torch, dtype)) for _ in range(2))
        spread = Session(prepare_decoder(settings, group.decoder))
        sessions = (Session(plain), Session(prepare_decoder(settings, one)), spread)
        graphs = GraphCache(spread.device, observer=graph_observer(group.decoder))
        errors, of_one, distances, differing = [], [], [], 0
        for start, rows in ((0, PROMPT), (PROMPT, 1), (PROMPT, NODES)):
            found = []
            for session in sessions:
                tokens = session.tokens[start : start + rows].clone()
                found.append(session.run(start, rows, session.batch(start, rows), tokens))
            (want, _), (alone, _), (got, chosen) = found
            errors.append(float((got - want).norm() / want.norm()))
            of_one.append(float((alone - want).norm() / want.norm()))
            distances.append(float((got.amax(-1) - got.gather(1, chosen[:, None])[:, 0]).max()))
            if start == 0 or (plain.config.experts and dtype == "float32"):
                continue
            batch, tokens = spread.batch(start, rows), spread.tokens[start : start + rows].clone()

            def record(
                start: int = start,
                rows: int = rows,
                batch: AttentionBatch = batch,
                tokens: torch.Tensor = tokens,
            ) -> Any:
                return spread.run(start, rows, batch, tokens)

            for _ in range(REPLAYS):
                logits, token_ids = graphs.run((start, rows), record)
                differing += not (
                    torch.allclose(logits, got, rtol=1e-2, atol=1e-2) and torch.equal(token_ids, chosen)
                )
            # Run another prompt at the same addresses: the other ranks must read rank 0's new inputs.
            tokens.copy_(tokens.flip(0))
            logits, _ = graphs.run((start, rows), record)
            eager, _ = spread.run(start, rows, spread.batch(start, rows), tokens)
            differing += not torch.allclose(logits, eager, rtol=1e-2, atol=1e-2)
        graphs.clear()
        return Comparison(errors, of_one, distances, differing, type(group.decoder.reduce).__name__)
    finally:
        close(group)


@pytest.mark.parametrize(("dtype", "tolerance", "reduce"), [
    ("bfloat16", 3e-2, "auto"), ("float32", 1e-4, "auto"), ("float32", 1e-4, "one-shot"), ("bfloat16", 3e-2, "group"),
])  # fmt: skip
@pytest.mark.parametrize("size", SIZES)
def test_numbers_are_those_of_one_gpu_eager_and_in_graphs(
    folder: Path, size: int, dtype: str, tolerance: float, reduce: str
) -> None:
    found = in_a_process(compare, folder, size, dtype, reduce)
    assert found.summed_by == {"group": "GroupReduce", "one-shot": "OneShotReduce"}.get(reduce, "PeerReduce")
    print(
        f"{size} GPUs, {dtype}, {reduce}: relative errors {found.errors}, greedy tokens below the best by {found.distances}"
    )
    assert max(found.errors) < tolerance
    assert max(found.distances) <= (0 if dtype == "float32" else 0.1)
    assert found.differing == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 1.0)])
@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v3"])
def test_experts_and_latents_are_those_of_one_gpu(
    family: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    """In bf16, near-ties of a router send rows to other experts, so graphs are compared with eager steps.

    On a CPU, such flips change the result by 0.16 of its norm.
    """
    path = write_checkpoint(tmp_path / "model", SMALL_MODEL | TINY[family], "cpu")
    found = in_a_process(compare, path, 2, dtype, "auto")
    print(
        f"2 GPUs, {family}, {dtype}: relative errors {found.errors}, greedy tokens below the best by {found.distances}"
    )
    assert max(found.errors) < tolerance
    assert max(found.distances) <= (0 if dtype == "float32" else 0.1)
    assert found.differing == 0


def test_ranks_round_to_fp8_as_finely_as_one_gpu(folder: Path) -> None:
    """The scales of a part are never coarser than those of the whole, so the errors have the same size.

    The roundings differ. For one row, the ratio of the errors scatters by 0.07 around 1 in this model; for 24
    rows by 0.02 (rounded on a CPU, over 10 prompts).
    """
    found = in_a_process(compare, folder, 2, "bfloat16", "auto", "fp8")
    print(f"2 GPUs, FP8: relative errors {found.errors}, of one GPU {found.of_one}")
    assert min(found.of_one) > 0.05, "rounding must be visible"
    for rows, error, of_one in zip((PROMPT, 1, NODES), found.errors, found.of_one, strict=True):
        scatter = 0.3 if rows == 1 else 0.1
        assert 1 - scatter < error / of_one < 1 + scatter
    assert found.differing == 0


@torch.inference_mode()
def moved_rows(folder: Path, size: int, reduce: str) -> tuple[float, float]:
    """Return the change of one GPU's logits by a compaction, and the ranks' distance from these logits."""
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = TargetSettings.load(
        {"model": folder, "device": "cuda", "dtype": "float32", "tp": size, "tp_all_reduce": reduce}
    )
    group = start_group(settings)
    try:
        found = []
        for session in (
            Session(load_decoder(folder, "cuda:0", torch.float32)),
            Session(prepare_decoder(settings, group.decoder)),
        ):
            session.run(0, PROMPT + 4, session.batch(0, PROMPT + 4), session.tokens[: PROMPT + 4])
            before, _ = session.run(PROMPT + 2, 1, session.batch(PROMPT + 2, 1), session.tokens[:1])
            batch = session.batch(PROMPT, 4)
            path = torch.tensor(
                [[0, 3, -1, -1]], dtype=torch.int32, device=session.device
            )  # Node 3 moves to the place of node 1.
            session.pool.compact(
                batch.page_table,
                batch.prefix_lens,
                path,
                torch.ones(1, dtype=torch.int32, device=session.device),
            )
            after, _ = session.run(PROMPT + 2, 1, session.batch(PROMPT + 2, 1), session.tokens[:1])
            found.append((before, after))
        return float((found[0][1] - found[0][0]).norm()), float(
            (found[1][1] - found[0][1]).norm() / found[0][1].norm()
        )
    finally:
        close(group)


@pytest.mark.parametrize("reduce", ["auto", "group"])
@pytest.mark.parametrize("size", SIZES)
def test_accepted_rows_move_on_every_rank(folder: Path, size: int, reduce: str) -> None:
    change, error = in_a_process(moved_rows, folder, size, reduce)
    assert change > 1e-3, "the compaction must change the logits"
    assert error < 1e-4


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


@contextlib.contextmanager
def serving(
    folder: Path, log: Path, *arguments: str
) -> Iterator[tuple[Process, target_pb2_grpc.TargetStub, int]]:
    """Start a target over two GPUs. Yield it, its API, and the process of rank 1."""
    address = f"unix:{log}/t.sock"
    flags = ("--model", str(folder), "--tp", "2", "--listen", address, *SMALL)
    process = Process("serve", "target", *flags, *arguments, log=log / "log")
    try:
        process.wait_serving(address, TARGET_SERVICE)
        (rank,) = child_pids(process.popen.pid, "rank_main")
        with grpc.insecure_channel(address) as channel:
            yield process, target_pb2_grpc.TargetStub(channel), rank
    except BaseException:
        print(process.output[-8000:])
        raise
    finally:
        process.stop()


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
    with serving(folder, tmp_path) as (process, stub, rank):
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
