"""Tests of the trials of sums and messages: correct sums pass, and every rank detects any rank's fault."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine.parallel_ranks import Meeting, ThreadCollectives

from outrider.kernels.stream import ResidualStream
from outrider.shared.parallel.reduce import GroupReduce
from outrider.shared.parallel.trial import MESSAGES, TRIALS, messages_arrive, sums_agree

torch.set_num_threads(1)
WIDTH = 48


class Faulty(GroupReduce):
    """Sums, one of which is wrong on one rank."""

    def __init__(
        self, collectives: ThreadCollectives, spoil: Callable[[torch.Tensor], torch.Tensor], call: int
    ) -> None:
        super().__init__(collectives)
        self._spoil, self._call, self._calls = spoil, call, 0

    def add(self, *args: Any, **kwargs: Any) -> ResidualStream:
        stream = super().add(*args, **kwargs)
        self._calls += 1
        return replace(stream, residual=self._spoil(stream.residual)) if self._calls == self._call else stream


def verdicts(
    size: int,
    dtype: torch.dtype,
    faulty: int | None,
    spoil: Callable[[torch.Tensor], torch.Tensor],
    call: int,
) -> list[bool]:
    meeting = Meeting(size)

    def judged(rank: int) -> bool:
        collectives = ThreadCollectives(meeting, rank)
        reduce = Faulty(collectives, spoil, call) if faulty in (rank, -1) else GroupReduce(collectives)
        return sums_agree(reduce, collectives, WIDTH, dtype, torch.device("cpu"))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(judged, range(size)))


def next_number(numbers: torch.Tensor) -> torch.Tensor:
    """Change one number by the smallest possible amount."""
    changed = numbers.clone()
    changed[0, 3] = torch.nextafter(changed[0, 3], torch.tensor(float("inf"), dtype=changed.dtype))
    return changed


def missing(numbers: torch.Tensor) -> torch.Tensor:
    return torch.full_like(numbers, float("nan"))


def half(numbers: torch.Tensor) -> torch.Tensor:
    """Return half of the numbers, roughly the result of a rank that received only its own part."""
    return numbers / 2


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_sums_pass(size: int, dtype: torch.dtype) -> None:
    assert verdicts(size, dtype, None, missing, 1) == [True] * size


@pytest.mark.parametrize("spoil", [next_number, missing, half])
@pytest.mark.parametrize(("faulty", "call"), [(0, 1), (1, 2), (1, len(TRIALS))])
def test_one_rank_that_is_wrong_once_fails_all(
    spoil: Callable[[torch.Tensor], torch.Tensor], faulty: int, call: int
) -> None:
    assert verdicts(2, torch.float32, faulty, spoil, call) == [False, False]


@pytest.mark.parametrize("spoil", [missing, half])
def test_ranks_that_agree_on_something_wrong_fail(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert verdicts(3, torch.bfloat16, -1, spoil, 3) == [False] * 3


class LossyMessages(ThreadCollectives):
    """Collectives that drop the last word of one message in one direction."""

    def __init__(self, meeting: Meeting, rank: int, direction: str, call: int) -> None:
        super().__init__(meeting, rank)
        self._left = {direction: call}

    def _spoils(self, direction: str) -> bool:
        self._left[direction] = self._left.get(direction, 0) - 1
        return self._left[direction] == 0

    def broadcast(self, tensor: torch.Tensor) -> None:
        before = tensor[-1].clone()
        super().broadcast(tensor)
        if self._spoils("down"):
            tensor[-1] = before

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        sent = tensor.clone()
        if self._spoils("up"):
            sent[-1] = -1
        return super().gather(sent)


def arrivals(size: int, direction: str, call: int) -> list[bool]:
    trusted, tried = Meeting(size), Meeting(size)

    def judged(rank: int) -> bool:
        messages = LossyMessages(tried, rank, direction, call if rank == size - 1 else 0)
        return messages_arrive(messages, ThreadCollectives(trusted, rank), torch.device("cpu"))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(judged, range(size)))


@pytest.mark.parametrize("size", [2, 4])
def test_messages_that_arrive_pass(size: int) -> None:
    assert arrivals(size, "down", 0) == [True] * size


@pytest.mark.parametrize("direction", ["down", "up"])
@pytest.mark.parametrize("call", [1, 2, len(MESSAGES)])
def test_one_word_that_does_not_come_fails_all(direction: str, call: int) -> None:
    assert arrivals(3, direction, call) == [False] * 3
