"""Loading checkpoints: all file layouts, staging in pinned memory, and an error for each kind of damage."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint import checkpoint_reader as loader
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.checkpoint.weight_staging import WeightStaging

TENSORS = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "b.weight": torch.arange(8.0).view(2, 4).to(torch.bfloat16),
    "c.bias": torch.arange(5.0).to(torch.float16),
    "d2t": torch.arange(6),
    "t2d": torch.tensor([True, False, True]),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
WEIGHTS = {name: shape for name, shape in SHAPES.items() if name not in ("d2t", "t2d")}


def write_sharded(folder: Path, suffix: str, save: Callable[[dict[str, torch.Tensor], Path], object]) -> None:
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names = sorted(TENSORS)
    weight_map = {}
    for number, part in enumerate((names[:2], names[2:])):
        file = f"{stem}-{number + 1:05}-of-00002.{suffix}"
        save({name: TENSORS[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))


LAYOUTS: dict[str, Callable[[Path], object]] = {
    "safetensors": lambda folder: save_file(TENSORS, folder / "model.safetensors"),
    "another name": lambda folder: save_file(TENSORS, folder / "head.safetensors"),
    "sharded": lambda folder: write_sharded(folder, "safetensors", save_file),
    "bin": lambda folder: torch.save(TENSORS, folder / "pytorch_model.bin"),
    "old bin": lambda folder: torch.save(
        TENSORS, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False
    ),
    "sharded bin": lambda folder: write_sharded(folder, "bin", torch.save),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_layout_gives_the_same_tensors(tmp_path: Path, layout: str) -> None:
    LAYOUTS[layout](tmp_path)
    with CheckpointReader(tmp_path, dtype=torch.float32) as reader:
        reader.check(WEIGHTS, ignored=["?2?"])
        taken = {name: reader.take(name, shape) for name, shape in WEIGHTS.items()}
        taken["d2t"] = reader.take("d2t", (6,), dtype=torch.int64)
        taken["t2d"] = reader.take("t2d", (3,), dtype=torch.bool)
        reader.finish()
    for name, tensor in taken.items():  # the files are closed now
        want = TENSORS[name]
        assert torch.equal(tensor, want.float() if want.is_floating_point() else want)


def test_the_fingerprint_depends_on_the_weights_and_not_on_the_layout(tmp_path: Path) -> None:
    prints = set()
    for layout, write in LAYOUTS.items():
        folder = tmp_path / layout
        folder.mkdir()
        write(folder)
        with CheckpointReader(folder) as reader:
            prints.add(reader.fingerprint)
    assert len(prints) == 1
    save_file({**TENSORS, "a.weight": TENSORS["a.weight"] + 1}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        assert reader.fingerprint not in prints


def test_rows_of_several_tensors_are_fused_in_order(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path, dtype=torch.float32) as reader:
        fused = reader.take_rows([("b.weight", (2, 4)), ("a.weight", (3, 4))])
    assert torch.equal(fused, torch.cat([TENSORS["b.weight"].float(), TENSORS["a.weight"]]))


def test_the_stored_type_is_kept_without_a_dtype(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path / "model.safetensors") as reader:
        assert reader.take("b.weight", (2, 4)).dtype is torch.bfloat16


def test_progress_counts_stored_bytes_up_to_all_of_them(tmp_path: Path) -> None:
    weights = {name: TENSORS[name] for name in WEIGHTS}
    save_file(weights, tmp_path / "model.safetensors")
    seen: list[tuple[int, int]] = []
    with CheckpointReader(
        tmp_path, dtype=torch.float32, progress=lambda done, total: seen.append((done, total))
    ) as reader:
        for name, shape in WEIGHTS.items():
            reader.take(name, shape)
    total = sum(tensor.nbytes for tensor in weights.values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_one_error_names_everything_that_does_not_fit(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader, pytest.raises(CheckpointError) as caught:
        reader.check({"a.weight": (3, 5), "c.bias": (5,), "d2t": (6,), "lost.weight": (1,)}, ignored=["t2d"])
    message = caught.value.message
    assert "1 tensor missing: lost.weight" in message
    assert "1 tensor unexpected: b.weight" in message
    assert "a.weight is [3, 4], must be [3, 5]" in message
    assert "d2t is int64" in message
    assert "t2d" not in message
    assert caught.value.field == "lost.weight"


def test_a_long_list_of_faults_is_cut_and_counted(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    expected = {f"layers.{index}.weight": (1,) for index in range(40)}
    with (
        CheckpointReader(tmp_path) as reader,
        pytest.raises(CheckpointError, match=r"40 tensors missing: .* and 28 more"),
    ):
        reader.check(expected, ignored=["*"])


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "says"),
    [
        ("lost", (1,), None, "1 tensor missing: lost"),
        ("a.weight", (4, 3), None, r"a.weight is \[3, 4\], must be \[4, 3\]"),
        ("d2t", (6,), None, "not fp32, fp16 or bf16: d2t is int64"),
        ("a.weight", (3, 4), torch.int64, "not int64: a.weight is float32"),
    ],
)
def test_take_refuses_tensors_that_differ_from_the_request(
    tmp_path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype | None, says: str
) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader, pytest.raises(CheckpointError, match=says) as caught:
        reader.take(name, shape, dtype=dtype)
    assert caught.value.field == name


def test_finish_names_every_tensor_that_was_not_taken(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        reader.take("a.weight", (3, 4))
        with pytest.raises(CheckpointError, match=r"2 tensors unexpected: b\.weight, c\.bias"):
            reader.finish(ignored=["?2?"])
        reader.finish(ignored=["?2?", "b.weight", "c.*"])


def header_of(entries: dict[str, Any], data: bytes = bytes(8)) -> bytes:
    raw = json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(begin: int = 0, end: int = 8, shape: Any = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BROKEN: dict[str, tuple[bytes, str, str | None]] = {
    "empty": (b"", "0 bytes long", None),
    "seven bytes": (b"1234567", "7 bytes long", None),
    "header longer than the file": (
        struct.pack("<Q", 10**6) + b"{}",
        "announces a header of 1000000 bytes",
        None,
    ),
    "header longer than memory": (struct.pack("<Q", 2**63) + b"{}", "announces a header", None),
    "not JSON": (struct.pack("<Q", 4) + b"{{{{", "not JSON", None),
    "not an object": (struct.pack("<Q", 2) + b"[]", "not a JSON object", None),
    "no shape": (header_of({"x": {"dtype": "F32"}}), "describes x incompletely", "x"),
    "negative size": (header_of({"x": entry(shape=[-2])}), "whole number", "x"),
    "fractional offset": (header_of({"x": entry(end=8.0)}), "whole number", "x"),  # type: ignore[arg-type]
    "wrong size": (header_of({"x": entry(shape=[3])}), "takes 12", "x"),
    "unknown type": (header_of({"x": entry(dtype="F4")}), "stores x as 'F4'", "x"),
    "truncated data": (header_of({"x": entry()}, bytes(5)), "ends 3 bytes before the end of x", "x"),
    "overlap": (header_of({"x": entry(), "y": entry(4, 12)}, bytes(12)), "y at byte 4, which overlaps", "y"),
    "hole": (header_of({"x": entry(), "y": entry(12, 20)}, bytes(20)), "leaves a gap", "y"),
    "trailing bytes": (header_of({"x": entry()}, bytes(11)), "3 bytes after its last tensor", None),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_broken_safetensors_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, says, field = BROKEN[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        CheckpointReader(tmp_path)
    assert caught.value.field == (field or str(path))
    assert str(path) in caught.value.message


def test_every_truncation_of_a_real_file_is_noticed(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    path = tmp_path / "cut" / "model.safetensors"
    path.parent.mkdir()
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            CheckpointReader(path.parent)


def test_an_unpadded_header_is_read(tmp_path: Path) -> None:
    value = struct.pack("<2f", 1.5, -2.5)
    for padding in range(4):
        (tmp_path / "model.safetensors").write_bytes(header_of({"x" * (padding + 1): entry()}, value))
        with CheckpointReader(tmp_path) as reader:
            assert reader.take("x" * (padding + 1), (2,)).tolist() == [1.5, -2.5]


class Malicious:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        import os

        return os.system, ("echo the checkpoint ran code",)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"x": Malicious()}, "without running code"),
        ({"x": 3}, "'x' is a int, not a tensor"),
        ([torch.zeros(1)], "not a mapping"),
    ],
)
def test_a_bin_file_holds_tensors_only(tmp_path: Path, content: object, says: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=says):
        CheckpointReader(tmp_path)


def test_a_truncated_bin_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, path)
    content = path.read_bytes()
    for size in (0, 3, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError) as caught:
            CheckpointReader(tmp_path)
        assert caught.value.field == str(path)


def test_a_missing_shard_and_a_wrong_index_are_named(tmp_path: Path) -> None:
    write_sharded(tmp_path, "safetensors", save_file)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard} does not exist"):
        CheckpointReader(tmp_path)
    shard.write_bytes(content)
    index = tmp_path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    for change, says in (
        ({"extra": shard.name}, "lists extra under .* does not contain it"),
        ({"a.weight": shard.name}, "lists a.weight under .* does not contain it"),
        ({"a.weight": "../model.safetensors"}, "outside the model folder"),
        ({"a.weight": 3}, "no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": {**raw["weight_map"], **change}}))
        with pytest.raises(CheckpointError, match=says):
            CheckpointReader(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path, "safetensors", save_file)
    save_file({name: TENSORS[name] for name in TENSORS}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"a.weight is in .*00001.* and in .*00002"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("files", "says"),
    [([], "contains no weights"), (["a.safetensors", "b.safetensors"], "2 safetensors files without")],
)
def test_a_folder_without_a_clear_checkpoint_is_refused(tmp_path: Path, files: list[str], says: str) -> None:
    for name in files:
        save_file(TENSORS, tmp_path / name)
    with pytest.raises(CheckpointError, match=says):
        CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        CheckpointReader(tmp_path / "nowhere")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("count", [1, 63, 64, 1000])
def test_staged_copies_are_plain_copies(stored: torch.dtype, count: int) -> None:
    staging = WeightStaging(torch.device("cpu"), buffer_bytes=256)
    source = (torch.arange(count * 3) % 97).to(stored).view(count, 3)
    wanted = stored if stored is torch.int64 else torch.float32
    out = torch.full((count + 2, 3), -1, dtype=wanted)
    staging.copy(out[1 : count + 1], source)
    staging.copy(out[:1], source[-1:])
    staging.close()
    assert torch.equal(out, torch.cat([source[-1:], source, torch.full((1, 3), -1)]).to(wanted))


def test_buffers_serve_in_and_out_of_inference_mode() -> None:
    with torch.inference_mode():
        staging = WeightStaging(torch.device("cpu"), 64)
        staging.copy(torch.empty(100), torch.ones(100))
    out = torch.empty(100)
    staging.copy(out, torch.ones(100))
    assert torch.equal(out, torch.ones(100))


def test_a_strided_tensor_is_staged_as_it_reads() -> None:
    source = torch.arange(60.0).view(6, 10).t()
    out = torch.empty(10, 6)
    WeightStaging(torch.device("cpu"), buffer_bytes=64).copy(out, source)
    assert torch.equal(out, source)


def test_large_tensors_are_staged_and_nan_is_found_when_the_reader_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, act like a reader for a GPU: results are checked for NaN only after everything is taken."""
    staged: list[int] = []

    class Noted(WeightStaging):
        def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
            staged.append(source.numel())
            super().copy(out, source)

    broken = torch.ones(40, 10)
    broken[7, 3] = float("inf")
    save_file(
        {"small": torch.ones(4), "large": torch.arange(400.0).view(40, 10), "broken": broken},
        tmp_path / "model.safetensors",
    )
    monkeypatch.setattr(loader, "STAGED_BYTES", 1000)
    told = mock.MagicMock()
    monkeypatch.setattr(loader, "_log", told)
    monkeypatch.setattr(loader, "LOGGED_BYTES", 1600)

    def reader() -> CheckpointReader:
        made = CheckpointReader(tmp_path)
        made._staging, made._started, made._checks_each = Noted(torch.device("cpu"), 64), 0.0, False
        return made

    with reader() as whole:
        small, large = whole.take("small", (4,)), whole.take("large", (40, 10))
    assert staged == [400]
    assert torch.equal(small, torch.ones(4))
    assert torch.equal(large, torch.arange(400.0).view(40, 10))
    (call,) = told.info.call_args_list
    assert call.args == ("weights loaded",)
    assert call.kwargs["gb_per_s"] >= 0

    taken: list[torch.Tensor] = []

    def take_all(error: Exception | None = None) -> None:
        with reader() as damaged:
            taken.extend([damaged.take("large", (40, 10)), damaged.take("broken", (40, 10))])
            if error is not None:
                raise error

    with pytest.raises(CheckpointError, match="broken contains NaN or infinite") as caught:
        take_all()
    assert caught.value.field == "broken"
    assert len(taken) == 2, "taking a tensor does not wait for the check"
    with pytest.raises(KeyError, match="an earlier error is not hidden"):
        take_all(KeyError("an earlier error is not hidden"))
