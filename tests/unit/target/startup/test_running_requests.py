"""The default number of running requests: as many as the memory of the GPU allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.bench.stacks.shapes import named_shape
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.memory_plan import NO_DRAFT_CACHE, Memory, plan_memory, working_bytes
from outrider.services.target.startup.running_requests import (
    TOKENS_PER_REQUEST,
    draft_cache,
    with_running_requests,
)

GIB = 1 << 30
PER_TOKEN, DRAFT_PER_TOKEN = 128 * 1024 + 8192, 4096
CONFIG = named_shape("llama3.1-8b").model_config()


def chosen(total: int, *, longest: int = 131072, **fields: Any) -> TargetSettings:
    """Return the settings for an 8B model on a GPU with `total` GiB."""
    settings = TargetSettings.load({"model": "m", "device": "cuda"} | fields)
    memory = Memory(total=total * GIB, free=(total - 17) * GIB, weights=16 * GIB)
    return with_running_requests(
        settings, CONFIG, torch.bfloat16, PER_TOKEN, longest, memory, DRAFT_PER_TOKEN
    )


@pytest.mark.parametrize(
    ("total", "number"), [(140, 256), (80, 256), (48, 128), (40, 96), (24, 24), (20, 16)]
)
def test_more_memory_runs_more_requests(total: int, number: int) -> None:
    settings = chosen(total)
    assert settings.running_requests == number
    if number == 16:
        return
    memory = Memory(total=total * GIB, free=(total - 17) * GIB, weights=16 * GIB)
    reserve = working_bytes(settings, CONFIG, torch.bfloat16)
    draft = draft_cache(settings, DRAFT_PER_TOKEN)
    plan = plan_memory(settings, PER_TOKEN, 131072, memory, reserve, draft)
    assert plan.pages * plan.page_size >= number * TOKENS_PER_REQUEST, "few requests may be preempted"


def test_a_given_number_is_kept() -> None:
    assert chosen(140, max_running_requests=7).max_running_requests == 7
    assert chosen(24, max_running_requests=300).max_running_requests == 300


def test_short_texts_need_less_memory() -> None:
    assert chosen(24, longest=64).running_requests > chosen(24).running_requests


def test_a_small_cache_that_was_asked_for_limits_the_number() -> None:
    assert chosen(140, kv_tokens=100 * 1024).running_requests == 96


def test_a_cpu_keeps_its_default() -> None:
    settings = TargetSettings.load({"model": "m", "device": "cpu"})
    kept = with_running_requests(settings, CONFIG, torch.float32, PER_TOKEN, 4096, None, 0)
    assert kept.running_requests == 16


def test_without_a_draft_no_cache_is_needed_for_it() -> None:
    settings = TargetSettings.load({"model": "m"})
    assert draft_cache(settings, 0) == NO_DRAFT_CACHE
    assert draft_cache(settings, 10).more > 0
