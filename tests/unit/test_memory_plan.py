"""Who gets how much of a GPU's memory: every part is counted, and what does not fit is refused with what would."""

from __future__ import annotations

import re

import pytest
import torch

from outrider.bench.shapes import named_shape
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.memory import Memory, draft_tokens, graphs_bytes, plan_memory, working_bytes
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.errors import ConfigurationError

GIB = 1 << 30
PER_TOKEN = 128 * 1024 + 8192
H200 = Memory(total=140 * GIB, free=122 * GIB, weights=15 * GIB, draft=2 * GIB)


def settings(**fields: object) -> TargetSettings:
    return TargetSettings.load({"model": "m", **fields})


def test_the_cache_gets_what_the_fraction_leaves() -> None:
    plan = plan_memory(settings(mem_fraction_static=0.5), PER_TOKEN, 4096, H200, reserve=3 * GIB)
    assert plan.kv == pytest.approx(70 * GIB - 18 * GIB, abs=16 * PER_TOKEN)
    numbers = plan.numbers()
    assert numbers["elsewhere_gib"] == 1.0
    parts = [numbers[f"{name}_gib"] for name in ("elsewhere", "weights", "draft", "kv", "reserve", "unused")]
    assert sum(parts) == pytest.approx(140, abs=0.05), "every byte has an owner"
    assert numbers["kv_tokens"] == plan.pages * 16


def test_graphs_and_activations_come_before_the_fraction() -> None:
    plan = plan_memory(settings(mem_fraction_static=0.99), PER_TOKEN, 4096, H200, reserve=10 * GIB)
    assert plan.kv == pytest.approx(112 * GIB, abs=16 * PER_TOKEN)


def test_a_draft_and_other_processes_shrink_the_cache() -> None:
    alone = Memory(total=140 * GIB, free=124 * GIB, weights=15 * GIB)
    with_draft = Memory(total=140 * GIB, free=122 * GIB, weights=15 * GIB, draft=2 * GIB)
    difference = plan_memory(settings(), PER_TOKEN, 4096, alone).kv - plan_memory(settings(), PER_TOKEN, 4096, with_draft).kv
    assert difference == pytest.approx(2 * GIB, abs=16 * PER_TOKEN)
    assert alone.elsewhere == with_draft.elsewhere == GIB


def test_too_small_a_fraction_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(ConfigurationError) as refused:
        plan_memory(settings(mem_fraction_static=0.12), PER_TOKEN, 4096, H200, reserve=GIB)
    assert refused.value.field == "mem_fraction_static"
    told = refused.value.message
    assert "140.0 GiB" in told
    assert "weights take 15.0" in told
    least = float(re.search(r"to at least ([0-9.]+)\.", told)[1])  # type: ignore[index]
    assert plan_memory(settings(mem_fraction_static=least), PER_TOKEN, 4096, H200, reserve=GIB).pages >= 130 // 16


def test_a_full_gpu_is_refused_whatever_the_fraction() -> None:
    full = Memory(total=24 * GIB, free=GIB, weights=16 * GIB)
    with pytest.raises(ConfigurationError, match=r"No --mem-fraction-static makes that room: free memory"):
        plan_memory(settings(), PER_TOKEN, 4096, full, reserve=2 * GIB)


def test_a_fraction_that_is_not_allowed_is_not_advised() -> None:
    tight = Memory(total=140 * GIB, free=int(1.1 * GIB), weights=140 * GIB - int(1.1 * GIB))
    reserve = int(0.6 * GIB)
    with pytest.raises(ConfigurationError) as refused:
        plan_memory(settings(), PER_TOKEN, 4096, tight, reserve)
    least = float(re.search(r"to at least ([0-9.]+)\.", refused.value.message)[1])  # type: ignore[index]
    assert least < 1, "the setting takes nothing else"
    assert plan_memory(settings(mem_fraction_static=least), PER_TOKEN, 4096, tight, reserve).pages >= 130 // 16
    last = Memory(total=140 * GIB, free=20 << 20, weights=140 * GIB - (20 << 20))
    with pytest.raises(ConfigurationError) as refused:
        plan_memory(settings(), PER_TOKEN, 4096, last, reserve=0)
    told = refused.value.message
    assert "Raise" not in told
    assert all(way in told for way in ("smaller model", "--quantization", "larger one", "--tp"))


def test_a_given_size_is_taken_or_refused_with_the_most_that_fits() -> None:
    assert plan_memory(settings(kv_tokens=1000), PER_TOKEN, 4096, H200).pages == 63
    with pytest.raises(ConfigurationError) as refused:
        plan_memory(settings(kv_tokens=10_000_000), PER_TOKEN, 4096, H200, reserve=2 * GIB)
    most = int(re.search(r"at most ([0-9]+) tokens", refused.value.message)[1])  # type: ignore[index]
    assert plan_memory(settings(kv_tokens=most), PER_TOKEN, 4096, H200, reserve=2 * GIB).pages * 16 == most
    with pytest.raises(ConfigurationError):
        plan_memory(settings(kv_tokens=most + 1), PER_TOKEN, 4096, H200, reserve=2 * GIB)
    with pytest.raises(ConfigurationError, match=r"at least 144 are needed"):
        plan_memory(settings(kv_tokens=100), 1, 10, None)


def test_on_a_cpu_the_cache_has_a_bound_of_its_own() -> None:
    assert plan_memory(settings(), 100, 2048, None).pages == 64 * 1024 // 16
    assert plan_memory(settings(), 1 << 20, 2048, None).pages == 1024 // 16, "at most 1 GiB on a CPU"
    assert plan_memory(settings(), 100, 1 << 20, None).pages == 2 * (1 << 20) // 16, "two sequences of full length"


def test_the_reserve_covers_logits_and_activations() -> None:
    config = named_shape("llama3.1-8b").model_config()
    small = working_bytes(settings(max_running_requests=1, prefill_chunk=16), config, torch.bfloat16)
    large = working_bytes(settings(max_running_requests=64, num_draft_tokens=32, prefill_chunk=16), config, torch.bfloat16)
    graphs = graphs_bytes(settings(max_running_requests=1), config.num_layers)
    assert graphs < small < graphs + 64 * (1 << 20)
    assert large - small > 2000 * config.vocab_size * 6, "bf16 logits of all verified rows, and an fp32 copy"
    assert large < 5 * GIB


def test_a_gpu_prefills_more_tokens_a_step_and_they_are_counted() -> None:
    assert settings(device="cpu").prefill_tokens() == 512
    assert settings(device="cuda").prefill_tokens() == 8192
    assert settings(device="cuda", prefill_chunk=100).prefill_tokens() == 100
    config = named_shape("llama3.1-8b").model_config()
    narrow, wide = (working_bytes(settings(device="cuda", prefill_chunk=chunk), config, torch.bfloat16) for chunk in (512, None))
    residual_and_mlp = (3 * config.intermediate_size + 2 * config.hidden_size) * 2
    assert wide - narrow > (8192 - 512) * residual_and_mlp


def test_graphs_are_counted_by_batch_sizes_and_layers() -> None:
    default, wide = (graphs_bytes(settings(max_running_requests=requests), 32) for requests in (16, 64))
    assert 350 << 20 < default < 420 << 20, "94 graphs took 350 MiB on an H200, and filtered rows have theirs"
    assert wide - default == 2 * (default - graphs_bytes(settings(max_running_requests=16), 0)) // 5, "two batch sizes more than five"
    assert graphs_bytes(settings(max_running_requests=64, cuda_graph_max_bs=16), 32) == default


def test_the_draft_beside_follows_what_the_target_holds() -> None:
    target = settings(max_running_requests=64)
    plan = plan_memory(target, PER_TOKEN, 4096, H200)
    tokens = draft_tokens(target, plan)
    assert tokens >= plan.pages * 16 + 64 * 16 * 16
    assert DraftSettings.load({}).sized(tokens).kv_tokens == tokens
    assert DraftSettings.load({"kv_tokens": 5000}).sized(tokens).kv_tokens == 5000
    assert DraftSettings.load({}).sized(10).kv_tokens == 16 * 16 + 16
