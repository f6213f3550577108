"""Tests of the compiled exchange_add and peer_words on one GPU, with ranks in turn or on parallel streams."""

from __future__ import annotations

import pytest
import torch
from exchange_cases import check_exchange, check_lost_rank
from guards import Guards
from words_cases import check_lost_words, check_words

from outrider.kernels.exchange_add import ABSENT, Boxes, exchange_add, inbox_shape
from outrider.kernels.stream import ResidualStream

pytestmark = pytest.mark.gpu

F32, BF16 = torch.float32, torch.bfloat16
WIDTH, EPS = 1536, 1e-5
CALLS = [(1, 0), (8, 2), (1, 0), (33, 0), (64, 2), (2, 4), (64, 0)]
"""Rows and splits of each call."""
REPLAYS = 100
PATIENCE = 20_000_000


@pytest.mark.parametrize(
    ("dtype", "ranks", "bias"), [(F32, 2, True), (BF16, 2, False), (BF16, 4, True), (BF16, 8, False)]
)
def test_ranks_add_up_and_leave_nothing_behind(dtype: torch.dtype, ranks: int, bias: bool) -> None:
    check_exchange(
        "cuda",
        dtype,
        ranks,
        [(1, 0), (7, 2), (1, 0), (33, 1), (64, 0), (64, 4)],
        1100,
        Guards(pad=64),
        bias=bias,
    )


def test_a_rank_that_sends_nothing_is_waited_for_once() -> None:
    check_lost_rank("cuda", Guards(pad=64))


@pytest.mark.parametrize("ranks", [2, 4])
def test_messages_arrive_one_after_the_other(ranks: int) -> None:
    check_words("cuda", ranks, [3, 700, 3, 512, 1, 1025, 0, 2, 64 * 512], Guards(pad=64))


def test_a_message_that_does_not_come_is_waited_for_once() -> None:
    check_lost_words("cuda", Guards(pad=64))


class Rank:
    """One of two ranks on one GPU: a stream and the inputs of all calls."""

    def __init__(self, rank: int, inboxes: list[torch.Tensor]) -> None:
        self.stream = torch.cuda.Stream()
        self.boxes = Boxes.of(rank, inboxes, PATIENCE)
        own, common = (torch.Generator("cuda").manual_seed(seed) for seed in (rank + 1, 7))
        self.norm = torch.rand(WIDTH, device="cuda", generator=common).to(BF16)
        self.parts, self.residuals = [], []
        for rows, splits in CALLS:
            shape = (splits, rows, WIDTH) if splits else (rows, WIDTH)
            self.parts.append(torch.randn(shape, device="cuda", generator=own).to(F32 if splits else BF16))
            self.residuals.append(torch.randn(rows, WIDTH, device="cuda", generator=common).to(BF16))

    def run(self) -> list[ResidualStream]:
        return [
            exchange_add(parts, residual, self.norm, EPS, self.boxes)
            for parts, residual in zip(self.parts, self.residuals, strict=True)
        ]


def test_ranks_that_run_at_once_agree_replay_after_replay() -> None:
    inboxes = [torch.empty(inbox_shape(2, WIDTH), dtype=torch.int32, device="cuda") for _ in range(2)]
    ranks = [Rank(rank, inboxes) for rank in range(2)]
    for rank in ranks:  # Compile before one rank waits for the other.
        rank.boxes.lost.fill_(1)
        rank.run()
        rank.boxes.lost.zero_()
        rank.boxes.slots.zero_()
    for inbox in inboxes:
        inbox.fill_(ABSENT)
    torch.cuda.synchronize()
    graphs, found = [], []
    for rank in ranks:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=rank.stream):
            found.append(rank.run())
        graphs.append(graph)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        for rank, graph in zip(ranks, graphs, strict=True):
            with torch.cuda.stream(rank.stream):
                graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(*found, strict=True):
            assert one.sums is not None
            assert other.sums is not None
            differing += (
                (one.residual != other.residual).sum()
                + (one.scaled != other.scaled).sum()
                + (one.sums != other.sums).sum()
            )
    assert int(differing) == 0
    assert [int(rank.boxes.lost) for rank in ranks] == [0, 0]
    for call, stream in enumerate(found[0]):
        whole = sum(
            (part.sum(0) if part.dim() == 3 else part.float())
            for part in (rank.parts[call] for rank in ranks)
        )
        want = ranks[0].residuals[call].float() + whole
        torch.testing.assert_close(stream.residual.float(), want, atol=0.05, rtol=1e-2)
