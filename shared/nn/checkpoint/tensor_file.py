"""Reads safetensors files with a full check of the header, and torch ``.bin`` files without running code."""

from __future__ import annotations

import json
import mmap
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from outrider.shared.base.errors import CheckpointError
from outrider.shared.base.model_paths import dangling_link

TensorShape = tuple[int, ...]

MAX_HEADER_BYTES = 100_000_000  # the limit that the format defines
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of a stored tensor. For a safetensors file, also the byte range of the tensor."""

    shape: TensorShape
    dtype: torch.dtype
    begin: int = 0
    end: int = 0

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class TensorFile(Protocol):
    """A tensor file with a checked header. Tensors are read one at a time."""

    @property
    def path(self) -> Path:
        """Path of the file."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Maps the name of every tensor to its shape and dtype."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return a host tensor, which may share the file's memory. To keep it, copy it before `close`."""
        ...

    def close(self) -> None:
        """Unmap the file."""
        ...


def open_tensor_file(path: Path) -> TensorFile:
    """Open a file that contains the tensors of a checkpoint, or of one shard of a checkpoint.

    A ``.safetensors`` file is parsed. Any other file is unpickled by torch with ``weights_only``.

    Raises:
        CheckpointError: The file is missing, truncated or corrupt, or unpickling it would run code. The
            error's `field` is the file's path or the tensor's name.
    """
    if not path.is_file():
        if link := dangling_link(path):
            raise CheckpointError(link, field=str(path))
        raise CheckpointError(
            f"{path} does not exist; download the checkpoint again, with all its shards.", field=str(path)
        )
    return SafetensorsFile(path) if path.suffix == ".safetensors" else PickledFile(path)


class SafetensorsFile(TensorFile):
    """A memory-mapped safetensors file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        size = path.stat().st_size
        if size < 8:
            raise self._corrupt(f"is {size} bytes long, too short for a safetensors header")
        with path.open("rb") as file:
            # Make a private mapping, because torch needs writable memory but must never write to the file.
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            self._tensors = self._read_header(size)
        except CheckpointError:
            self._memory.close()
            raise

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Maps the name of every tensor to its shape and dtype."""
        return self._tensors

    def read(self, name: str) -> torch.Tensor:
        """Return a host tensor, which shares the mapping unless misaligned. Copy it before `close`."""
        info = self._tensors[name]
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        raw = torch.frombuffer(self._memory, dtype=torch.uint8, count=info.nbytes, offset=info.begin)
        if raw.data_ptr() % info.dtype.itemsize:  # the header was not padded to 8 bytes
            raw = raw.clone()
        return raw.view(info.dtype).view(info.shape)

    def close(self) -> None:
        """Drop the mapping. The memory is unmapped when no tensor shares it any longer."""
        del self._memory

    def _corrupt(self, problem: str, field: str | None = None) -> CheckpointError:
        message = f"{self._path} {problem}; the file is truncated or corrupt: download it again."
        return CheckpointError(message, field=field or str(self._path))

    def _read_header(self, file_size: int) -> dict[str, TensorInfo]:
        (length,) = struct.unpack("<Q", self._memory[:8])
        if length > MAX_HEADER_BYTES or 8 + length > file_size:
            raise self._corrupt(f"announces a header of {length} bytes but is {file_size} bytes long")
        try:
            header = json.loads(self._memory[8 : 8 + length].decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise self._corrupt(f"has a header that is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._corrupt("has a header that is not a JSON object")
        header.pop("__metadata__", None)
        data_start = 8 + length
        tensors = {name: self._entry(name, entry, data_start, file_size) for name, entry in header.items()}
        position = data_start
        for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
            if info.begin != position:
                kind = "overlaps the tensor before it" if info.begin < position else "leaves a gap before it"
                raise self._corrupt(
                    f"stores {name} at byte {info.begin - data_start}, which {kind}", field=name
                )
            position = info.end
        if position != file_size:
            raise self._corrupt(f"has {file_size - position} bytes after its last tensor")
        return tensors

    def _entry(self, name: str, entry: Any, data_start: int, file_size: int) -> TensorInfo:
        try:
            dtype_name, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            whole = all(
                isinstance(number, int) and not isinstance(number, bool) and number >= 0
                for number in (*shape, begin, end)
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._corrupt(f"describes {name} incompletely ({error!r})", field=name) from error
        if not whole:
            raise self._corrupt(
                f"describes {name} with a shape or offset that is not a whole number", field=name
            )
        if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
            raise CheckpointError(
                f"{self._path} stores {name} as {dtype_name!r}, which is not supported; "
                f"supported: {', '.join(DTYPES)}.",
                field=name,
            )
        info = TensorInfo(shape, DTYPES[dtype_name], data_start + begin, data_start + end)
        if info.nbytes != end - begin:
            raise self._corrupt(
                f"stores {name} in {end - begin} bytes, but {list(shape)} {dtype_name} takes {info.nbytes}",
                field=name,
            )
        if info.end > file_size:
            raise self._corrupt(f"ends {info.end - file_size} bytes before the end of {name}", field=name)
        return info


class PickledFile(TensorFile):
    """A pickled torch file that maps tensor names to tensors.

    torch unpickles the file with ``weights_only=True``, so the file cannot run code.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        content = self._load(path)
        if not isinstance(content, Mapping):
            raise CheckpointError(
                f"{path} contains a {type(content).__name__}, not a mapping of names to tensors; "
                "save the model's state_dict() alone.",
                field=str(path),
            )
        for name, value in content.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{path}: {name!r} is a {type(value).__name__}, not a tensor; "
                    "save the model's state_dict() alone.",
                    field=str(name),
                )
        self._content: dict[str, torch.Tensor] = dict(content)
        self._tensors = {
            name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in self._content.items()
        }

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Maps the name of every tensor to its shape and dtype."""
        return self._tensors

    def read(self, name: str) -> torch.Tensor:
        """Return a host tensor, which may map the file. To keep it, copy it before `close`."""
        return self._content[name]

    def close(self) -> None:
        """Drop the tensors."""
        self._content.clear()

    @staticmethod
    def _load(path: Path) -> object:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=_starts_as_zip(path))
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path} cannot be loaded without running code from it, or it is corrupt; if you trust it, "
                f"convert it to safetensors yourself ({str(error).splitlines()[0]}).",
                field=str(path),
            ) from error
        except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path} is truncated or corrupt: download it again ({error}).", field=str(path)
            ) from error


def _starts_as_zip(path: Path) -> bool:
    """True if torch can map the file. Torch can map only zip archives, its format since version 1.6."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
