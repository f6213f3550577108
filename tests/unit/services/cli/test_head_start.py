"""Reading weights and opening the GPU, while the process imports torch."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from outrider.services.cli import head_start
from outrider.services.cli.head_start import begin, cuda_device, limit_bytes, open_gpu, read_files, values_of

CPU = ["--device", "cpu"]


class Driver:
    """NVIDIA's driver library. Records the calls, and fails at the call `fails`."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[str, int]] = []
        self._fails = fails

    def _call(self, name: str, value: int) -> int:
        self.calls.append((name, value))
        return int(name == self._fails)

    def cuInit(self, flags: int) -> int:
        return self._call("init", flags)

    def cuDeviceGet(self, handle: Any, number: int) -> int:
        handle._obj.value = 10 + number
        return self._call("device", number)

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: ctypes.c_int) -> int:
        return self._call("context", handle.value)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record (start, length) of each request to read ahead."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _file, start, length, _advice: calls.append((start, length))
    )
    return calls


def files_of(folder: Path, *sizes: int) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files = [folder / f"model-{index}.safetensors" for index in range(len(sizes))]
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(bytes(size))
    return files


def test_the_flags_are_read_in_both_spellings() -> None:
    given = ["--model=/m", "--tp", "2", "--draft", "inproc:/d", "--model"]
    assert values_of(given, "--model", "--draft") == ["/m", "inproc:/d"]


def test_files_are_read_from_their_beginning_up_to_the_limit(
    tmp_path: Path, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_start, "PIECE_BYTES", 100)
    assert read_files(files_of(tmp_path, 150, 150, 150), 270) == 270
    assert asked == [(0, 100), (100, 50), (0, 100), (100, 20)]


def test_the_limit_is_a_share_of_the_available_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:  4096 kB\n")
    assert limit_bytes(tmp_path / "meminfo") == 1 << 20
    (tmp_path / "meminfo").write_text(f"MemAvailable: {1 << 40} kB\n")
    assert limit_bytes(tmp_path / "meminfo") == head_start.MOST_BYTES


def test_both_models_of_a_target_are_read(tmp_path: Path, asked: list[tuple[int, int]]) -> None:
    files_of(tmp_path / "target", 30, 40)
    files_of(tmp_path / "draft", 50)
    given = ["--model", str(tmp_path / "target"), "--draft", f"inproc:{tmp_path / 'draft'}", *CPU]
    for thread in begin(given):
        thread.join()
    assert asked == [(0, 30), (0, 40), (0, 50)]


@pytest.mark.parametrize("arguments", [[], ["--model", "ORG/NAME"], ["--draft", "unix:/d.sock"]])
def test_without_a_folder_nothing_is_read(arguments: list[str]) -> None:
    assert begin([*arguments, *CPU]) == []


def test_an_error_is_left_to_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(head_start, "read_files", fails)
    files_of(tmp_path, 10)
    raised: list[object] = []
    monkeypatch.setattr("threading.excepthook", raised.append)
    (thread,) = begin(["--model", str(tmp_path), *CPU])
    thread.join()
    assert raised == []


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        ([], None),
        (["--device", "auto"], 0),
        (["--device", "cuda"], 0),
        (["--device", "cuda:3"], 3),
        (CPU, None),
    ],
)
def test_the_gpu_is_the_one_of_the_device_flag(
    arguments: list[str], device: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(head_start, "torch_has_cuda", lambda: True)
    assert cuda_device(arguments) == device
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cuda_device(arguments) is None, "a rank learns its GPU later"
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(head_start, "torch_has_cuda", lambda: False)
    assert cuda_device(arguments) is None, "torch for CPUs uses no GPU"


def test_the_context_of_the_gpu_is_created() -> None:
    driver = Driver()
    open_gpu(3, lambda _name: driver)  # type: ignore[arg-type,return-value]
    assert driver.calls == [("init", 0), ("device", 3), ("context", 13)]


def test_no_context_is_created_without_a_gpu() -> None:
    driver = Driver(fails="device")
    open_gpu(9, lambda _name: driver)  # type: ignore[arg-type,return-value]
    assert driver.calls == [("init", 0), ("device", 9)]
