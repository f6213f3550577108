"""Strict reading of a checkpoint folder: every tensor is taken or named as ignored, every shape is checked before anything is allocated."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.json_config import read_json
from outrider.shared.nn.checkpoint.read_ahead import ReadAhead
from outrider.shared.nn.checkpoint.tensor_file import Shape, TensorFile, TensorInfo, open_tensor_file
from outrider.shared.nn.checkpoint.weight_staging import WeightStaging, make_staging
from outrider.shared.obs.logging import get_logger

__all__ = ["CheckpointReader", "ExpectedTensors", "Shape", "TensorSource", "dtype_name", "is_weight"]

LAYOUTS = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
FINGERPRINT_SAMPLE_BYTES = 4096
STAGED_BYTES = 1 << 20
"""Smaller tensors are copied as they are."""
TOLD_BYTES = 256 << 20
"""The log says how fast so much was loaded."""
MAX_NAMED = 12  # names listed per kind of problem
WRONG_TYPE = "of a type that is not fp32, fp16 or bf16"

_log = get_logger("outrider.loader")


class TensorSource(Protocol):
    """Where the functions that load parts take their tensors from."""

    def take(
        self, name: str, shape: Shape, *, dtype: torch.dtype | None = None, to: torch.dtype | None = None
    ) -> torch.Tensor:
        """See `CheckpointReader.take`."""
        ...

    def take_rows(
        self,
        parts: Sequence[tuple[str, Shape]],
        *,
        dtype: torch.dtype | None = None,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See `CheckpointReader.take_rows`."""
        ...


class ExpectedTensors:
    """A `TensorSource` without a file: loading from it tells what a checkpoint must hold, on the meta device.

    Attributes:
        shapes: Name → shape of everything that was taken.
        dtypes: Name → exact type of what was taken with one.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def take(
        self, name: str, shape: Shape, *, dtype: torch.dtype | None = None, to: torch.dtype | None = None
    ) -> torch.Tensor:
        """Note one tensor."""
        return self.take_rows([(name, shape)], dtype=dtype, to=to)

    def take_rows(
        self,
        parts: Sequence[tuple[str, Shape]],
        *,
        dtype: torch.dtype | None = None,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Note several tensors that become one."""
        self.shapes |= dict(parts)
        if dtype is not None:
            self.dtypes |= {name: dtype for name, _ in parts}
        rows = sum(shape[0] for _, shape in parts)
        return torch.empty((rows, *parts[0][1][1:]), dtype=dtype or to or torch.float32, device="meta")


class CheckpointReader:
    """The tensors of a model folder: one file, or shards named by an index.

    Opening reads headers only. `check` compares all of them with what is expected and raises one error for everything that is wrong;
    `take` copies a tensor to the device. Use it as a context manager: leaving it unmaps the files.

    Args:
        path: A folder with ``model.safetensors``, ``model.safetensors.index.json``, ``pytorch_model.bin`` or its index, or with exactly
            one ``*.safetensors``; or one tensor file.
        device: Where taken tensors go; on ``meta`` they have shapes only, so that headers are checked and nothing is read.
        dtype: Type of taken floating-point tensors; None keeps what is stored.
        progress: Called with (bytes taken, bytes in all) after each tensor.

    Attributes:
        files: The tensor files.
        tensors: Name → info, of all files.
        fingerprint: sha256 over names, shapes, dtypes and a sample of every tensor's bytes.

    Raises:
        CheckpointError: A file is missing, truncated or corrupt; shards and index disagree.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.path = Path(path)
        self.device = torch.device(device)
        self.dtype = dtype
        self._progress = progress
        self.files: list[TensorFile] = []
        self._file_of: dict[str, TensorFile] = {}
        self._taken: set[str] = set()
        self._ignored: set[str] = set()
        self._ahead: ReadAhead | None = None
        self._staging: WeightStaging | None = None
        self._started: float | None = None
        self._at_once = self.device.type != "cuda"
        self._unsettled: list[
            tuple[Sequence[str], torch.dtype, torch.Tensor]
        ] = []  # names, their type here, and whether all is finite
        try:
            self._open()
        except CheckpointError:
            self.close()
            raise
        self.tensors: dict[str, TensorInfo] = {
            name: file.tensors[name] for name, file in self._file_of.items()
        }
        self._taken_bytes = 0
        self._all_bytes = sum(info.nbytes for info in self.tensors.values())

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self.tensors.keys()

    @property
    def fingerprint(self) -> str:
        """Identify the weights without reading all of them."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            info = self.tensors[name]
            digest.update(f"{name} {info.shape} {info.dtype}\n".encode())
            sample = (
                self._file_of[name].read(name).reshape(-1)[: FINGERPRINT_SAMPLE_BYTES // info.dtype.itemsize]
            )
            digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def check(
        self,
        expected: Mapping[str, Shape],
        *,
        ignored: Collection[str] = (),
        floating: bool = True,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """Compare the headers with what will be taken, before anything is allocated.

        Args:
            expected: Name → shape of every tensor that must be there.
            ignored: Names, or patterns with ``*``, that may be there and will not be taken.
            floating: Whether expected tensors must have a floating-point type.
            dtypes: Name → exact type, of expected tensors for which that rule does not hold.

        Raises:
            CheckpointError: Naming every missing, unexpected, misshaped and wrongly typed tensor; `field` is the first of them.
        """
        problems: list[tuple[str, list[str]]] = [
            ("missing", [name for name in expected if name not in self.tensors]),
            (
                "unexpected",
                [name for name in self.tensors if name not in expected and not _matches(name, ignored)],
            ),
        ]
        shared = [
            (name, shape, self.tensors[name]) for name, shape in expected.items() if name in self.tensors
        ]
        problems.append(
            (
                "misshaped",
                [
                    f"{name} is {list(info.shape)}, must be {list(shape)}"
                    for name, shape, info in shared
                    if info.shape != shape
                ],
            )
        )
        if floating:
            exact = dtypes or {}
            wrong = [
                f"{name} is {dtype_name(info.dtype)}"
                for name, _, info in shared
                if name not in exact and not is_weight(info.dtype)
            ]
            problems.append((WRONG_TYPE, wrong))
            for name, _, info in shared:
                if name in exact and info.dtype != exact[name]:
                    problems.append(
                        (
                            f"of a type that is not {dtype_name(exact[name])}",
                            [f"{name} is {dtype_name(info.dtype)}"],
                        )
                    )
        self._raise(problems)
        self._ignored |= {name for name in self.tensors if name not in expected}

    def read_ahead(self, names: Iterable[str]) -> None:
        """Read the files of these tensors, several parts at a time, ahead of `take`, which will ask for them in about this order."""
        if self.device.type != "meta" and self._ahead is None:
            self._ahead = ReadAhead(self._file_of[name].read(name) for name in names)

    def take(
        self, name: str, shape: Shape, *, dtype: torch.dtype | None = None, to: torch.dtype | None = None
    ) -> torch.Tensor:
        """Copy one tensor to the device.

        Args:
            name: Of the tensor.
            shape: What it must be.
            dtype: The exact stored type of an index or mask tensor (d2t: int64); None for a floating-point weight, which is converted
                to the reader's dtype.
            to: What a floating-point weight is converted to instead of the reader's dtype.

        Raises:
            CheckpointError: It is missing, misshaped, of another type, or holds NaN or infinite numbers (on a GPU `settle` says so).
        """
        return self.take_rows([(name, shape)], dtype=dtype, to=to)

    def take_rows(
        self,
        parts: Sequence[tuple[str, Shape]],
        *,
        dtype: torch.dtype | None = None,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Copy several tensors into one, concatenated along their first dimension (fused q-k-v, gate-up); see `take`."""
        infos = [self._require(name, shape, dtype) for name, shape in parts]
        target = dtype or to or self.dtype or infos[0].dtype
        rows = sum(shape[0] for _, shape in parts)
        out = torch.empty((rows, *parts[0][1][1:]), dtype=target, device=self.device)
        position = 0
        for name, shape in parts:
            self._copy(out[position : position + shape[0]], self._file_of[name].read(name))
            position += shape[0]
            self._taken.add(name)
            self._taken_bytes += self.tensors[name].nbytes
            if self._ahead is not None:
                self._ahead.used(self.tensors[name].nbytes)
        if out.numel() and out.dtype.is_floating_point and not out.is_meta:
            self._unsettled.append(([name for name, _ in parts], target, _finite(out)))
            if self._at_once:
                self.settle()
        if self._progress is not None:
            self._progress(self._taken_bytes, self._all_bytes)
        return out

    def settle(self) -> None:
        """Wait for what was taken and look at its numbers: of a GPU, which would be waited for, all at once when the reader is left.

        Raises:
            CheckpointError: See `take`.
        """
        unsettled, self._unsettled = self._unsettled, []
        if unsettled and not bool(torch.stack([finite for _, _, finite in unsettled]).all()):
            names, dtype, _ = next(one for one in unsettled if not bool(one[2]))
            raise self._not_finite(names, dtype)

    def number(self, name: str) -> float:
        """Return the value of a tensor that `check` knew of and that holds one number, such as a scale."""
        self._taken.add(name)
        return float(self._file_of[name].read(name).float())

    def finish(self, *, ignored: Collection[str] = ()) -> None:
        """Raise for every tensor that was neither taken nor is ignored (names, or patterns with ``*``).

        Raises:
            CheckpointError: Naming them all.
        """
        left = [
            name
            for name in self.tensors
            if name not in self._taken | self._ignored and not _matches(name, ignored)
        ]
        self._raise([("unexpected", left)])

    def close(self) -> None:
        """Unmap the files. Taken tensors stay valid."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        for file in self.files:
            file.close()
        self.files = []
        self._file_of = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.settle()
                self._tell()
        finally:
            self.close()

    def _copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a stored tensor to its place, a large one that a GPU wants by way of pinned memory."""
        if self._started is None:
            self._started = time.monotonic()
            if self.device.type == "cuda":
                self._staging = make_staging(self.device)
        if self._staging is None or source.nbytes < STAGED_BYTES:
            out.copy_(source)
        else:
            self._staging.copy(out, source)

    def _tell(self) -> None:
        """Say in the log how fast much was loaded."""
        if self._started is not None and self._taken_bytes >= TOLD_BYTES:
            seconds = time.monotonic() - self._started
            rate = self._taken_bytes / 1e9 / max(seconds, 1e-9)
            _log.info("weights loaded", checkpoint=str(self.path), gb=round(self._taken_bytes / 1e9, 2), seconds=round(seconds, 2),
                      gb_per_s=round(rate, 2))  # fmt: skip

    def _open(self) -> None:
        if self.path.is_file():
            self._add_file(self.path)
            return
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path} does not exist; give a Hugging Face model folder.", field=str(self.path)
            )
        for index_name, single_name in LAYOUTS:
            if (self.path / index_name).is_file():
                self._open_shards(self.path / index_name)
                return
            if (self.path / single_name).is_file():
                self._add_file(self.path / single_name)
                return
        candidates = sorted(self.path.glob("*.safetensors"))
        if len(candidates) != 1:
            found = (
                f"{len(candidates)} safetensors files without model.safetensors.index.json"
                if candidates
                else "no weights"
            )
            raise CheckpointError(
                f"{self.path} holds {found}; expected model.safetensors, its index with shards, or pytorch_model.bin.",
                field=str(self.path),
            )
        self._add_file(candidates[0])

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(
                f"{index} has no weight_map from tensor names to files; download it again.", field=str(index)
            )
        for shard in sorted(set(weight_map.values())):
            if Path(shard).name != shard:
                raise CheckpointError(
                    f"{index} points to {shard!r}, outside the model folder.", field=str(index)
                )
            self._add_file(self.path / shard)
        for name, shard in weight_map.items():
            if name not in self._file_of or self._file_of[name].path.name != shard:
                raise CheckpointError(
                    f"{index} says that {shard} holds {name}, which it does not; download both again.",
                    field=name,
                )

    def _add_file(self, path: Path) -> None:
        file = open_tensor_file(path)
        self.files.append(file)
        for name in file.tensors:
            if name in self._file_of:
                raise CheckpointError(
                    f"{name} is in {self._file_of[name].path} and in {path}; remove the wrong shard.",
                    field=name,
                )
            self._file_of[name] = file

    def _require(self, name: str, shape: Shape, dtype: torch.dtype | None) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise self._error([("missing", [name])], field=name)
        if info.shape != shape:
            raise self._error(
                [("misshaped", [f"{name} is {list(info.shape)}, must be {list(shape)}"])], field=name
            )
        if info.dtype != dtype if dtype else not is_weight(info.dtype):
            wanted = dtype_name(dtype) if dtype else "fp32, fp16 or bf16"
            raise self._error(
                [(f"of a type that is not {wanted}", [f"{name} is {dtype_name(info.dtype)}"])], field=name
            )
        return info

    def _not_finite(self, names: Sequence[str], dtype: torch.dtype) -> CheckpointError:
        """Return the error for a copy with NaN or infinite numbers: the file holds them, or they are beyond what the dtype can hold."""
        broken = [
            name
            for name in names
            if self.tensors[name].nbytes and not _is_finite(self._file_of[name].read(name))
        ]
        if broken:
            return CheckpointError(
                f"{self.path}: {', '.join(broken)} holds NaN or infinite numbers; the weights are damaged: download the checkpoint again.",
                field=broken[0],
            )
        return CheckpointError(
            f"{self.path}: {', '.join(names)} holds numbers beyond {dtype_name(dtype)}; serve with --dtype bfloat16 or float32.",
            field=names[0],
        )

    def _raise(self, problems: Sequence[tuple[str, list[str]]]) -> None:
        found = [(kind, names) for kind, names in problems if names]
        if found:
            raise self._error(found, field=found[0][1][0].split(" ", 1)[0])

    def _error(self, problems: Sequence[tuple[str, Sequence[str]]], field: str) -> CheckpointError:
        lists = []
        for kind, names in problems:
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            lists.append(
                f"{len(names)} tensor{'s' if len(names) > 1 else ''} {kind}: {', '.join(names[:MAX_NAMED])}{more}"
            )
        return CheckpointError(
            f"{self.path}: {'; '.join(lists)}. The weights do not belong to this config.json, or the download is incomplete.",
            field=field,
        )


def _matches(name: str, patterns: Collection[str]) -> bool:
    return name in patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def is_weight(dtype: torch.dtype) -> bool:
    """Whether a stored type is one that weights are converted from: FP8 needs its scales, and integers are no weights."""
    return dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite."""
    return bool(_finite(tensor))


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same as ``[] bool`` on the tensor's device: one pass, no copy but of FP8, which has no comparisons."""
    low, high = torch.aminmax(tensor.half() if tensor.dtype.itemsize == 1 else tensor)
    return torch.isfinite(low) & torch.isfinite(high)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as configurations spell it (``float16``)."""
    return str(dtype).removeprefix("torch.")
