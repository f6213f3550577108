"""Where the draft of `outrider up` runs, with a faked list of GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.services.nvidia_smi import fake_nvidia_smi

from outrider.services.stack import placement
from outrider.services.stack.options import StackOptions, Transport
from outrider.services.stack.placement import (
    IDLE_BYTES,
    Gpu,
    nvidia_smi_memory,
    place_draft,
    torch_has_cuda,
    usable_gpus,
)
from outrider.shared.spec.algorithm import Algorithm

GIB = 1 << 30
INPROC, IPC, GRPC = Transport.INPROC, Transport.IPC, Transport.GRPC


def gpu(index: int, used: int = 0) -> Gpu:
    return Gpu(index, 140 * GIB - used, 140 * GIB)


BUSY = IDLE_BYTES + 1
ONE, TWO, TWO_BUSY = [gpu(0)], [gpu(0), gpu(1)], [gpu(0), gpu(1, BUSY)]


@pytest.mark.parametrize(
    ("given", "gpus", "transport", "device"),
    [
        ({}, ONE, INPROC, "auto"),
        ({}, TWO, INPROC, "cuda:1"),
        ({"max_running_requests": 1}, TWO, IPC, "cuda:1"),
        ({"max_running_requests": 1}, TWO_BUSY, INPROC, "auto"),
        ({"max_running_requests": 1}, ONE, INPROC, "auto"),
        ({"max_running_requests": 1, "device": "cuda:1"}, TWO, IPC, "cuda:0"),
        ({"max_running_requests": 1, "tp": 2}, [*TWO, gpu(2)], INPROC, "cuda:2"),
        ({"max_running_requests": 1, "algorithm": Algorithm.NGRAM}, TWO, INPROC, "cuda:1"),
        ({}, [], GRPC, "auto"),
        ({"device": "cpu"}, TWO, GRPC, "cpu"),
        ({"device": "cpu", "tp": 2}, [], INPROC, "cpu"),
        ({"transport": GRPC}, TWO, GRPC, "cuda:1"),
        ({"transport": IPC, "device": "cuda:0"}, ONE, IPC, "cuda:0"),
        ({"transport": IPC, "tp": 2}, [*TWO, gpu(2)], IPC, "cuda:2"),
        ({"transport": GRPC, "device": "cpu", "tp": 2}, [], GRPC, "cpu"),
        ({"transport": INPROC}, TWO, INPROC, "cuda:1"),
        ({"draft_device": "cuda:1"}, TWO_BUSY, IPC, "cuda:1"),
        ({"transport": GRPC, "draft_device": "cuda:0"}, TWO, GRPC, "cuda:0"),
        ({"mps": True}, TWO, IPC, "auto"),
        ({"mps": True, "transport": GRPC}, TWO, GRPC, "auto"),
    ],
    ids=str,
)
def test_the_draft_runs_where_it_is_known_to_be_fastest(
    given: dict[str, Any], gpus: list[Gpu], transport: Transport, device: str
) -> None:
    placed = place_draft(StackOptions(**given), gpus)
    assert placed.transport is transport
    assert placed.inproc is (transport is INPROC)
    if not placed.inproc:
        assert placed.draft_device == device


def test_the_log_says_where_the_draft_runs_and_why() -> None:
    assert str(place_draft(StackOptions(), ONE)) == (
        "the draft runs in the target's process: no other GPU is idle"
    )
    assert "--transport ipc" in str(place_draft(StackOptions(), TWO))
    assert "on GPU 1 (cuda:1), over ipc: " in str(place_draft(StackOptions(max_running_requests=1), TWO))
    own_process = "the draft runs in its own process on"
    for device in ("auto", "cpu"):
        assert str(place_draft(StackOptions(device=device), [])) == (
            f"{own_process} the CPU, over grpc: on a CPU, two processes use more cores"
        )
    by_flag = StackOptions(transport=GRPC)
    assert str(place_draft(by_flag, ONE)) == f"{own_process} the GPU, over grpc: --transport grpc"
    by_demo = replace(by_flag, why_transport="the demo shows all three services")
    assert str(place_draft(by_demo, [])).endswith("the CPU, over grpc: the demo shows all three services")


def machine(
    monkeypatch: pytest.MonkeyPatch, memories: list[tuple[int, int] | None], *, cuda: bool = True
) -> None:
    """Fake the GPUs of this machine."""
    devices = [Path(f"/dev/nvidia{index}") for index in range(len(memories))]
    folder = SimpleNamespace(glob=lambda _pattern: devices)
    monkeypatch.setattr(placement, "Path", lambda _path: folder)
    monkeypatch.setattr(placement, "torch_has_cuda", lambda: cuda)
    monkeypatch.setattr(placement, "nvidia_smi_memory", lambda index: memories[index])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_found_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, [(10, 20), (20, 20)])
    assert usable_gpus() == [Gpu(0, 10, 20), Gpu(1, 20, 20)]
    machine(monkeypatch, [(10, 20), None])
    assert usable_gpus() == [Gpu(0, 10, 20)]
    machine(monkeypatch, [])
    assert usable_gpus() == []
    machine(monkeypatch, [(10, 20)], cuda=False)
    assert usable_gpus() == [], "torch for CPUs uses no GPU"


def test_without_nvidia_smi_no_gpu_counts_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, [None, None])
    (only,) = usable_gpus()
    assert not only.is_idle
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert usable_gpus() == [], "an empty list hides all GPUs"


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
        ("cuda = None\nhip = '6.4'\n", True),
        ("nothing known", True),
        (None, True),
    ],
)
def test_the_build_of_torch_is_read_from_its_version_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, cuda: bool
) -> None:
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: spec)
    if text is not None:
        (tmp_path / "version.py").write_text(text)
    assert torch_has_cuda() is cuda
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert not torch_has_cuda()


def test_gpu_memory_respects_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = fake_nvidia_smi(monkeypatch, tmp_path, "100, 200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-ab")
    assert nvidia_smi_memory(1) == (100 << 20, 200 << 20)
    assert asked.read_text().strip().endswith("--id=GPU-ab")
    assert nvidia_smi_memory(2) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert nvidia_smi_memory(0) is None, "an empty list hides all GPUs"
    fake_nvidia_smi(monkeypatch, tmp_path, "No devices were found")
    assert nvidia_smi_memory(0) is None
