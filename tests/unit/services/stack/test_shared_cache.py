"""The KV cache size that `outrider up` gives to a target and a draft in two processes on one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.toys import make_toy_eagle3, make_toy_target
from support.services.nvidia_smi import fake_nvidia_smi

from outrider.services.doctor.memory import estimate_memory
from outrider.services.doctor.pair import Pair
from outrider.services.stack import launch, shared_cache
from outrider.services.stack.options import StackOptions, Transport
from outrider.services.stack.shared_cache import (
    CONTEXTS_BYTES,
    DRAFT_WORK_BYTES,
    shared_kv_tokens,
)
from outrider.services.target.settings import TargetSettings
from outrider.shared.spec.algorithm import Algorithm

GIB = 1 << 30


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> StackOptions:
    folder = tmp_path_factory.mktemp("pair")
    target = make_toy_target(folder / "target")
    return StackOptions(
        target=target,
        draft=make_toy_eagle3(folder / "head", target),
        device="cuda:1",
        transport=Transport.GRPC,
    )


def changed(options: StackOptions, **values: object) -> StackOptions:
    return launch.replace(options, **values)  # type: ignore[arg-type]


def test_both_caches_get_the_size_of_the_in_process_plan(
    options: StackOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = fake_nvidia_smi(monkeypatch, tmp_path, "8000, 10000")
    tokens = shared_kv_tokens(options)
    assert asked.read_text().strip().endswith("--id=1")
    pair = Pair(options.target, options.draft, Algorithm.AUTO, torch.device("cuda:1"), torch.bfloat16)  # type: ignore[arg-type]
    settings = TargetSettings.load({"model": options.target, "device": "cuda:1"})
    config = pair.target_config
    borrowed = 2 * 2 * config.vocab_size * config.hidden_size
    plan = estimate_memory(
        pair, settings, ((8000 << 20) - CONTEXTS_BYTES - DRAFT_WORK_BYTES - borrowed, 10000 << 20)
    )
    assert tokens == plan.kv_tokens > 0
    used = tokens * (plan.target_kv_per_token + plan.draft_kv_per_token)
    assert used + CONTEXTS_BYTES < 0.85 * (10000 << 20) - (2000 << 20)
    narrow = shared_kv_tokens(changed(options, target_settings={"kv_cache_dtype": "fp8_e4m3"}))
    assert narrow is not None
    assert narrow > 1.2 * tokens
    half = shared_kv_tokens(changed(options, mem_fraction_static=0.425))
    assert half is not None
    assert half < 0.6 * tokens


def test_there_is_no_common_size_without_a_shared_gpu(
    options: StackOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared_cache, "nvidia_smi_memory", lambda index: (8 * GIB, 10 * GIB))
    assert shared_kv_tokens(options)
    for apart in (
        {"kv_tokens": 4096},
        {"tp": 2},
        {"device": "cpu"},
        {"draft": None},
        {"draft_device": "cuda:0"},
        {"draft": None, "algorithm": Algorithm.NGRAM},
    ):
        assert shared_kv_tokens(changed(options, **apart)) is None, apart
    monkeypatch.setattr(torch.version, "cuda", None)
    assert shared_kv_tokens(changed(options, device="auto")) is None, (
        "torch built for CPUs does not use the GPU"
    )
    monkeypatch.setattr(shared_cache, "nvidia_smi_memory", lambda index: (GIB // 2, 10 * GIB))
    assert shared_kv_tokens(options) is None, "the services themselves report that nothing fits"
    monkeypatch.setattr(shared_cache, "nvidia_smi_memory", lambda index: None)
    assert shared_kv_tokens(options) is None


def test_a_stack_of_two_processes_starts_with_that_size(
    options: StackOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[StackOptions] = []

    class Planned(Exception):
        pass

    def plan_stack(options: StackOptions, *_: object) -> None:
        planned.append(options)
        raise Planned

    monkeypatch.setattr(launch, "plan_stack", plan_stack)
    monkeypatch.setattr(launch, "check_options", lambda _: None)
    monkeypatch.setattr(launch, "shared_kv_tokens", lambda _: 12345)
    for given in (options, changed(options, transport=Transport.INPROC), changed(options, kv_tokens=4096)):
        with pytest.raises(Planned), launch.running_stack(given, print, print):
            pass
    assert [one.kv_tokens for one in planned] == [12345, None, 4096]


def test_a_large_memory_fraction_leaves_room_for_the_draft_process(
    options: StackOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_cache, "nvidia_smi_memory", lambda index: (8 * GIB, 8 * GIB))
    greedy = changed(options, mem_fraction_static=0.99)
    tokens = shared_kv_tokens(greedy)
    assert tokens
    pair = Pair(options.target, options.draft, Algorithm.AUTO, torch.device("cuda:1"), torch.bfloat16)  # type: ignore[arg-type]
    plan = estimate_memory(
        pair, TargetSettings.load({"model": options.target, "device": "cuda:1"}), (8 * GIB, 8 * GIB)
    )
    used = (
        plan.target_weights
        + plan.draft_weights
        + tokens * (plan.target_kv_per_token + plan.draft_kv_per_token)
    )
    assert used + plan.reserve + CONTEXTS_BYTES + (400 << 20) <= 8 * GIB
