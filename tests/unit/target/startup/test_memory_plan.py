"""Tests of dividing a GPU's memory: all parts are counted, and refusals name settings that would work."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models.toys import make_toy_target

from outrider.bench.stacks.shapes import named_shape
from outrider.services.draft.build import Build
from outrider.services.draft.settings import DraftSettings
from outrider.services.target import app
from outrider.services.target.engine.recordings import Recordings
from outrider.services.target.model.prefill_graph import PREFILL_SIZES
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup import cache_planner
from outrider.services.target.startup.cache_planner import CachePlanner
from outrider.services.target.startup.graph_plan import list_graphs, plan_graphs
from outrider.services.target.startup.memory_plan import (
    GRAPH_BYTES_PER_LAYER,
    GRAPHS_PER_BATCH_SIZE,
    MASKED_GRAPHS,
    MIXED_GRAPHS,
    DraftCache,
    Memory,
    graphs_bytes,
    least_tokens,
    plan_memory,
    working_bytes,
)
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.engine.buckets import row_buckets

GIB = 1 << 30
CPU = torch.device("cpu")
PER_TOKEN = 128 * 1024 + 8192
H200 = Memory(total=140 * GIB, free=122 * GIB, weights=15 * GIB, draft=2 * GIB)


def settings(**fields: object) -> TargetSettings:
    return TargetSettings.load({"model": "m"} | fields)


def test_the_cache_gets_what_the_fraction_leaves() -> None:
    plan = plan_memory(settings(mem_fraction_static=0.5), PER_TOKEN, 4096, H200, reserve=3 * GIB)
    assert plan.kv == pytest.approx(70 * GIB - 18 * GIB, abs=16 * PER_TOKEN)
    numbers = plan.numbers()
    assert numbers["elsewhere_gib"] == 1.0
    parts = [numbers[f"{name}_gib"] for name in ("elsewhere", "weights", "draft", "kv", "reserve", "unused")]
    assert sum(parts) == pytest.approx(140, abs=0.05), "the parts must add up to the total"
    assert numbers["kv_tokens"] == plan.pages * 16


def test_graphs_and_activations_come_before_the_fraction() -> None:
    plan = plan_memory(settings(mem_fraction_static=0.99), PER_TOKEN, 4096, H200, reserve=10 * GIB)
    assert plan.kv == pytest.approx(112 * GIB, abs=16 * PER_TOKEN)


def test_a_draft_and_other_processes_shrink_the_cache() -> None:
    alone = Memory(total=140 * GIB, free=124 * GIB, weights=15 * GIB)
    with_draft = Memory(total=140 * GIB, free=122 * GIB, weights=15 * GIB, draft=2 * GIB)
    difference = (
        plan_memory(settings(), PER_TOKEN, 4096, alone).kv
        - plan_memory(settings(), PER_TOKEN, 4096, with_draft).kv
    )
    assert difference == pytest.approx(2 * GIB, abs=16 * PER_TOKEN)
    assert alone.elsewhere == with_draft.elsewhere == GIB


def test_too_small_a_fraction_is_refused_with_the_minimum() -> None:
    with pytest.raises(ConfigurationError) as refused:
        plan_memory(settings(mem_fraction_static=0.12), PER_TOKEN, 4096, H200, reserve=GIB)
    assert refused.value.field == "mem_fraction_static"
    message = refused.value.message
    assert "140.0 GiB" in message
    assert "weights take 15.0" in message
    least = float(re.search(r"to at least ([0-9.]+)\.", message)[1])  # type: ignore[index]
    assert (
        plan_memory(settings(mem_fraction_static=least), PER_TOKEN, 4096, H200, reserve=GIB).pages * 16
        >= 2048 + 130
    )


def test_a_full_gpu_is_refused_whatever_the_fraction() -> None:
    full = Memory(total=24 * GIB, free=GIB, weights=16 * GIB)
    with pytest.raises(
        ConfigurationError, match=r"No --mem-fraction-static leaves enough room\. Free memory"
    ):
        plan_memory(settings(), PER_TOKEN, 4096, full, reserve=2 * GIB)


def test_an_invalid_fraction_is_not_suggested() -> None:
    tight = Memory(total=140 * GIB, free=int(1.1 * GIB), weights=140 * GIB - int(1.1 * GIB))
    reserve = int(0.6 * GIB)
    with pytest.raises(ConfigurationError) as refused:
        plan_memory(settings(), PER_TOKEN, 4096, tight, reserve)
    least = float(re.search(r"to at least ([0-9.]+)\.", refused.value.message)[1])  # type: ignore[index]
    assert least < 1, "the setting accepts only values below 1"
    assert (
        plan_memory(settings(mem_fraction_static=least), PER_TOKEN, 4096, tight, reserve).pages * 16
        >= 2048 + 130
    )
    last = Memory(total=140 * GIB, free=20 << 20, weights=140 * GIB - (20 << 20))
    with pytest.raises(ConfigurationError) as refused:
        plan_memory(settings(), PER_TOKEN, 4096, last, reserve=0)
    message = refused.value.message
    assert "Raise" not in message
    assert all(way in message for way in ("smaller model", "--quantization", "larger one", "--tp"))


def test_an_explicit_size_is_used_or_refused_with_the_maximum() -> None:
    assert plan_memory(settings(kv_tokens=3000), PER_TOKEN, 4096, H200).pages == 188
    with pytest.raises(ConfigurationError) as refused:
        plan_memory(settings(kv_tokens=10_000_000), PER_TOKEN, 4096, H200, reserve=2 * GIB)
    most = int(re.search(r"at most ([0-9]+) tokens", refused.value.message)[1])  # type: ignore[index]
    assert plan_memory(settings(kv_tokens=most), PER_TOKEN, 4096, H200, reserve=2 * GIB).pages * 16 == most
    with pytest.raises(ConfigurationError):
        plan_memory(settings(kv_tokens=most + 1), PER_TOKEN, 4096, H200, reserve=2 * GIB)
    with pytest.raises(ConfigurationError, match=r"not even 2192 tokens fit\. Free memory"):
        plan_memory(
            settings(kv_tokens=4096), PER_TOKEN, 4096, Memory(24 * GIB, 2 * GIB, 17 * GIB), reserve=2 * GIB
        )


@pytest.mark.parametrize(("longest", "least"), [(10, 144), (8192, 2192)])
def test_there_is_one_minimum_however_the_cache_is_sized(longest: int, least: int) -> None:
    assert least_tokens(settings(), longest) == least
    assert plan_memory(settings(kv_tokens=least), 1, longest, None).pages * 16 == least
    with pytest.raises(ConfigurationError, match=rf"at least {least} are needed") as refused:
        plan_memory(settings(kv_tokens=least - 16), 1, longest, None)
    assert refused.value.field == "kv_tokens"
    room = Memory(total=100 * GIB, free=15 * GIB + least * PER_TOKEN, weights=85 * GIB - least * PER_TOKEN)
    assert plan_memory(settings(), PER_TOKEN, longest, room).pages * 16 == least
    less = Memory(total=100 * GIB, free=room.free - PER_TOKEN, weights=room.weights + PER_TOKEN)
    with pytest.raises(ConfigurationError, match=rf"The minimum of {least} tokens"):
        plan_memory(settings(), PER_TOKEN, longest, less)


def test_on_a_cpu_the_cache_has_a_bound_of_its_own() -> None:
    assert plan_memory(settings(), 100, 2048, None).pages == 64 * 1024 // 16
    assert plan_memory(settings(), 1 << 20, 2048, None).pages == 1024 // 16, "at most 1 GiB on a CPU"
    assert plan_memory(settings(), 100, 1 << 20, None).pages == 2 * (1 << 20) // 16, (
        "the cache must hold two sequences of full length"
    )


def test_the_reserve_covers_logits_and_activations() -> None:
    config = named_shape("llama3.1-8b").model_config()
    small = working_bytes(settings(max_running_requests=1, prefill_chunk=16), config, torch.bfloat16)
    large = working_bytes(
        settings(max_running_requests=64, num_draft_tokens=32, prefill_chunk=16), config, torch.bfloat16
    )
    graphs = graphs_bytes(settings(max_running_requests=1), config.num_layers)
    assert graphs < small < graphs + 64 * (1 << 20)
    assert large - small > 2000 * config.vocab_size * 6, "bf16 logits of all verified rows and an fp32 copy"
    assert large < 5 * GIB


def test_a_gpu_prefills_more_tokens_a_step_and_they_are_counted() -> None:
    assert settings(device="cpu").prefill_tokens() == 512
    assert settings(device="cuda").prefill_tokens() == 8192
    assert settings(device="cuda", prefill_chunk=100).prefill_tokens() == 100
    config = named_shape("llama3.1-8b").model_config()
    narrow, wide = (
        working_bytes(settings(device="cuda", prefill_chunk=chunk), config, torch.bfloat16)
        for chunk in (512, None)
    )
    residual_and_mlp = (3 * config.intermediate_size + 2 * config.hidden_size) * 2
    assert wide - narrow > (8192 + 2048 - 512 - 512) * residual_and_mlp, "recorded passes keep their own"


def test_graphs_are_counted_by_batch_sizes_and_layers() -> None:
    default, wide = (graphs_bytes(settings(max_running_requests=requests), 32) for requests in (16, 64))
    assert 520 << 20 < default < 610 << 20, (
        "94 graphs took 350 MiB on an H200; graphs of mixed rounds and later ones come in addition"
    )
    assert wide - default == 4 * GRAPHS_PER_BATCH_SIZE * 32 * GRAPH_BYTES_PER_LAYER, (
        "sizes 24, 32, 48 and 64 in addition to 1, 2, 4, 8, 16"
    )
    assert graphs_bytes(settings(max_running_requests=64, cuda_graph_max_bs=16), 32) == default


@pytest.mark.parametrize("requests", [1, 16, 64, 256])
@pytest.mark.parametrize("shape", [{}, {"num_steps": 8, "topk": 8, "num_draft_tokens": 64}], ids=str)
def test_all_graphs_that_are_recorded_are_counted(requests: int, shape: dict[str, int]) -> None:
    given = settings(max_running_requests=requests, prefill_chunk=8192, **shape)
    plan = plan_graphs(given, cuda=True, waits=False)
    assert plan.prefills == PREFILL_SIZES
    made: set[object] = set()
    rows = max(requests, min(plan.loop.max_packed_rows, requests * plan.loop.max_nodes))
    step_runner: Any = SimpleNamespace(buckets=row_buckets(rows), max_rows=rows, capture=made.add)
    runner: Any = SimpleNamespace(
        captures=True, capture_prefill=lambda *size: made.add(size), graphs=SimpleNamespace(observed=False)
    )
    drafts: Any = SimpleNamespace(recording=lambda *draft: lambda: made.add(draft))
    recordings = Recordings(runner, step_runner, drafts, drafting=True, refresh=lambda: None)
    listed = list_graphs(recordings, plan)
    for _, record in [*listed.first, *listed.further]:
        record()
    assert len(listed.first) <= 14, "the server must soon be ready"
    masked = recordings.masked()
    assert len(masked) <= MASKED_GRAPHS
    assert len(made) - len(masked) <= len(plan.batch_sizes) * GRAPHS_PER_BATCH_SIZE + MIXED_GRAPHS
    assert len(made) <= 464, "recording must end soon"


@pytest.mark.parametrize("draft_per_token", [4096, 112 * 1024])
def test_both_caches_hold_the_same_texts(monkeypatch: pytest.MonkeyPatch, draft_per_token: int) -> None:
    """For any draft size, no memory is left over, and neither cache is larger than the other allows."""
    target = settings(max_running_requests=64)
    config = named_shape("llama3.1-8b").model_config()
    decoder = SimpleNamespace(
        config=config,
        device="the GPU",
        dtype=torch.bfloat16,
        weight_bytes=15 * GIB,
        token_bytes=lambda _: PER_TOKEN,
    )
    free = [124 * GIB]
    monkeypatch.setattr(cache_planner, "gpu_memory", lambda device: (free[0], 140 * GIB))
    planner = CachePlanner(target, decoder, drafts=True)  # type: ignore[arg-type]
    free[0] -= 6 * GIB  # the draft's weights
    tokens = planner.draft_tokens(draft_per_token)
    free[0] -= tokens * draft_per_token
    plan = planner.plan()
    held = plan.pages * plan.page_size
    assert held == pytest.approx(tokens - 64 * (16 * 16 + 16), abs=16), (
        "every sequence must also have room for a growing tree"
    )
    assert plan.kv + tokens * draft_per_token == pytest.approx(
        (0.85 * 140 - 1 - 15 - 6) * GIB, abs=32 * PER_TOKEN
    )
    assert plan.memory is not None
    assert plan.memory.elsewhere == GIB


def test_a_refusal_with_a_draft_counts_both_caches() -> None:
    large = DraftCache(112 * 1024, 1000)
    with pytest.raises(ConfigurationError, match=r"in the caches of target and draft") as refused:
        plan_memory(settings(kv_tokens=600_000), PER_TOKEN, 4096, H200, GIB, large)
    most = int(re.search(r"at most ([0-9]+) tokens", refused.value.message)[1])  # type: ignore[index]
    assert most == pytest.approx(((122 - 1) * GIB - 1000 * 112 * 1024) / (PER_TOKEN + 112 * 1024), abs=16)
    assert plan_memory(settings(kv_tokens=most), PER_TOKEN, 4096, H200, GIB, large).pages * 16 == most
    with pytest.raises(ConfigurationError) as refused:
        plan_memory(settings(mem_fraction_static=0.13), PER_TOKEN, 4096, H200, GIB, large)
    least = float(re.search(r"to at least ([0-9.]+)\.", refused.value.message)[1])  # type: ignore[index]
    assert (
        plan_memory(settings(mem_fraction_static=least), PER_TOKEN, 4096, H200, GIB, large).pages * 16 >= 2192
    )


def test_a_draft_asks_for_its_size_when_its_weights_are_there() -> None:
    asked: list[int] = []
    build = Build(
        DraftSettings.load({}), None, CPU, torch.float32, None, False, lambda size: asked.append(size) or 5000
    )  # type: ignore[arg-type]
    assert build.num_pages(1000) == 313
    assert asked == [1000]
    named = Build(
        DraftSettings.load({"kv_tokens": 640}), None, CPU, torch.float32, None, False, lambda _: 5000
    )  # type: ignore[arg-type]
    assert named.num_pages(1000) == 40
    assert DraftSettings.load({}).sized(10).kv_tokens == 16 * 16 + 16


def test_attention_allocates_its_workspace_before_memory_is_divided(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FlashInfer's workspace is 128 MiB, which the cache must not get."""
    seen: list[str] = []
    monkeypatch.setattr(app, "prepare_attention", lambda settings, decoder: seen.append("attention"))

    class Stop(Exception):
        pass

    def planner(*args: object, **options: object) -> None:
        seen.append("memory")
        raise Stop

    monkeypatch.setattr(app, "CachePlanner", planner)
    with pytest.raises(Stop):
        app.Target(settings(model=make_toy_target(tmp_path), device="cpu"))
    assert seen == ["attention", "memory"]
