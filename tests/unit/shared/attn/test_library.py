"""Tests of the decision at startup whether a library attends from prompt chunks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.kernels.tile_attention import Recorder

from outrider.shared.attn.chunks import ChunkAttention
from outrider.shared.attn.library import Library, prepare_within
from outrider.shared.attn.tiles import TileShape, shapes_of

SIZES = (128, 64, 32, 16)
CPU = torch.device("cpu")


def library_of(attend: Any) -> Library:
    return Library(4, 2, 16, torch.float32, CPU, 64, attend=attend, sizes=SIZES)


def prepare(attend: Any, **options: Any) -> ChunkAttention | None:
    """Return the attention that is used after the preparation."""
    used: list[ChunkAttention | None] = [None]
    prepare_within(library_of(attend), used.append, **options)
    return used[-1]


def test_a_library_that_agrees_is_used_with_all_its_shapes() -> None:
    attend = Recorder()
    chunks = prepare(attend)
    assert chunks is not None
    wanted = shapes_of(64, SIZES)
    assert attend.shapes[-len(wanted) :] == wanted


def test_the_check_covers_every_kind_of_tile() -> None:
    attend = Recorder()
    prepare(attend, limit_s=-1.0)
    checked = set(attend.shapes)
    assert {TileShape(16, 16, True), TileShape(16, 16, False), TileShape(16, 64, False)} <= checked


@pytest.mark.parametrize("wrong", [float("nan"), "base", "unmerged"])
def test_a_library_that_disagrees_is_not_used(wrong: float | str) -> None:
    """Check faults of the log-sum-exp alone: a NaN, base 2, and another layout of heads and rows."""
    right = Recorder()

    def attend(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(*args)
        if wrong == "base":
            return out, lse * 1.4427
        if wrong == "unmerged":
            return out, lse.reshape(lse.shape[1], lse.shape[0]).t()
        return out, lse + float(wrong)

    assert prepare(attend) is None


def test_an_offset_of_all_log_sum_exps_is_no_fault_but_a_changed_scale_is() -> None:
    assert prepare(Recorder(wrong=2.0)) is not None
    right = Recorder()
    assert prepare(lambda q, k, v, causal, scale: right(q, k, v, causal, 2 * scale)) is None


def test_a_library_that_fails_is_not_used() -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("cuDNN is too old")

    assert prepare(fail) is None


def test_plans_that_take_too_long_are_left_out() -> None:
    attend = Recorder()
    ticks = itertools.count()
    chunks = prepare(attend, limit_s=4.5, clock=lambda: float(next(ticks)))
    assert chunks is not None
    wanted = shapes_of(64, SIZES)
    assert attend.shapes[-4:] == wanted[:4]
    assert chunks._shapes == set(wanted[:4])


def test_a_shape_is_used_once_its_plan_exists() -> None:
    used: list[ChunkAttention | None] = []
    pieces = library_of(Recorder()).prepare(used.append)
    assert next(pieces) is None
    (chunks,) = used
    assert chunks is not None
    assert not chunks._shapes
    wanted = shapes_of(64, SIZES)
    for count, shape in enumerate(pieces, 1):
        assert shape == wanted[count - 1]
        assert chunks._shapes == set(wanted[:count])
    assert chunks._shapes == set(wanted)


def test_a_library_that_fails_after_the_check_is_no_longer_used() -> None:
    attend = Recorder()
    pieces = library_of(attend)
    used: list[ChunkAttention | None] = []
    work = pieces.prepare(used.append)
    next(work)
    attend.fails = True
    assert not list(work)
    assert used[0] is not None
    assert used[1:] == [None]


def test_without_a_gpu_there_is_no_library() -> None:
    assert not list(Library(4, 2, 64, torch.bfloat16, CPU, 64).prepare(lambda chunks: None))
