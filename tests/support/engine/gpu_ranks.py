"""Runs the work of several GPU ranks in a fresh process. A `Session` is one sequence on one or more GPUs."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from outrider.kernels.verify import SamplingTensors
from outrider.shared.attn.base import AttentionBatch, build_batch
from outrider.shared.attn.create import create_backend
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import Decoder
from support.models.toys import make_toy_target

PROMPT, NODES = 300, 24
CASE_S = 240
"""Time limit for the work of one process, in seconds."""


def make_ranks_target(path: Path) -> Path:
    """Save a toy target whose heads and sizes can be split over four ranks, and return `path`."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    return make_toy_target(path, vocab_size=1000, num_layers=6, seed=5, **sizes)


def in_a_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a module-level function in a fresh process and return its result.

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
        process.kill()  # The ranks that it started end by themselves.
        process.join()


def _answer(pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(("", work(*arguments)))
    except Exception:
        pipe.send((traceback.format_exc(), None))


class Session:
    """A prompt followed by steps of some rows, on one GPU or on several GPUs."""

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
