"""A process ends after an error that has made its GPU unusable, and continues after any other error."""

from __future__ import annotations

import pytest
import torch

from outrider.shared.base.errors import UnavailableError
from outrider.shared.engine.device_health import device_is_lost, ending_if_lost

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("fails", [True, False])
def test_the_process_ends_if_cuda_calls_fail(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    def mem_get_info(_device: torch.device) -> tuple[int, int]:
        if fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return 1, 2

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    ended: list[UnavailableError] = []
    ending_if_lost(CUDA, ended.append)(ValueError("a round failed"))
    assert [error.message for error in ended] == (
        ["The GPU cannot be used any more after this error: a round failed"] if fails else []
    )


def test_a_cpu_is_never_lost() -> None:
    assert not device_is_lost(torch.device("cpu"))
