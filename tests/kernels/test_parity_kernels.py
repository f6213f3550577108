"""The parity check at start on the Triton kernels of rounds: faults in work lists are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.outputs.parity_faults import FAULTS, check, planted, random_model, runner_of

from outrider.kernels._dispatch import force_backend
from outrider.kernels.tree_attention import WorkList, plan_attention
from outrider.services.target.model.model_runner import ModelRunner
from outrider.shared.attn import triton as backend
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.base.errors import UnavailableError

torch.set_num_threads(1)


def small_runner() -> ModelRunner:
    return runner_of(random_model(0, "cpu", torch.float32, layers=2, hidden=128), KernelAttention())


def one_token_less(work: WorkList) -> None:
    work.items[:, 7] -= (work.items[:, 7] > 0).to(torch.int32)


def first_page_table(work: WorkList) -> None:
    work.items[:, 4] = work.items[0, 4]


def longer_prefix(work: WorkList) -> None:
    work.items[:, 3] += 1


def test_the_kernels_of_rounds_are_accepted_and_checked() -> None:
    runner = small_runner()
    with force_backend("triton"):
        result = check(runner)
        assert result is not None
        assert result.passed
        with planted(runner, FAULTS["no mask"]), pytest.raises(UnavailableError):
            check(runner)


@pytest.mark.parametrize("spoil", [one_token_less, first_page_table, longer_prefix])
def test_a_wrong_work_list_is_refused(
    spoil: Callable[[WorkList], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planning(*args: Any, **sizes: Any) -> WorkList:
        work = plan_attention(*args, **sizes)
        work = replace(work, items=work.items.clone())
        spoil(work)
        return work

    monkeypatch.setattr(backend, "plan_attention", planning)
    with force_backend("triton"), pytest.raises(UnavailableError, match="explains at most"):
        check(small_runner())
