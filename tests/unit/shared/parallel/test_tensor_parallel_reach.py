"""Tests of the check that a rank's GPU can access other ranks' memory, for GPUs visible to the process."""

from __future__ import annotations

import pytest
import torch

from outrider.shared.parallel.peer import reaches_all


class Machine:
    """The GPUs that a process sees. Like the CUDA binding, it rejects queries about any other GPU."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, visible: int, apart: frozenset[int] = frozenset()
    ) -> None:
        self.visible, self.apart = visible, apart
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", self.reaches)

    def reaches(self, device: int, peer: int) -> bool:
        assert 0 <= device < self.visible
        assert 0 <= peer < self.visible
        return not {device, peer} & self.apart


@pytest.mark.parametrize(("first", "visible"), [(0, 2), (0, 8), (3, 5)])
@pytest.mark.parametrize("rank", [0, 1])
def test_consecutive_gpus_of_one_process_reach_each_other(
    first: int, visible: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, visible)
    assert reaches_all(torch.device("cuda", first + rank), rank, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gpu_without_peer_access_does_not(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, 2, frozenset({1}))
    assert not reaches_all(torch.device("cuda", rank), rank, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_sees_its_own_gpu_alone_says_no(
    rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Machine(monkeypatch, 1)
    assert not reaches_all(torch.device("cuda", 0), rank, 2)
    printed = capfd.readouterr()
    assert "sums use NCCL" in printed.out + printed.err
