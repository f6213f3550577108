"""Reader of checkpoints: checks the name, shape and type of every tensor before memory is allocated.

The reader also rejects NaN and infinite weights, logs the load speed, and computes a fingerprint of the
weights.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType

import torch

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.checkpoint_files import CheckpointFiles
from outrider.shared.nn.checkpoint.read_ahead import ReadAhead
from outrider.shared.nn.checkpoint.tensor_file import TensorFile, TensorInfo, TensorShape
from outrider.shared.nn.checkpoint.tensor_source import TensorSource
from outrider.shared.nn.checkpoint.weight_staging import WeightStaging, make_staging
from outrider.shared.obs.logging import get_logger

__all__ = ["CheckpointReader", "TensorShape", "dtype_name", "is_weight"]

FINGERPRINT_SAMPLE_BYTES = 4096
STAGED_BYTES = 1 << 20
"""Tensors of at least this size are copied to a GPU through pinned memory. Smaller tensors are copied
directly."""
LOGGED_BYTES = 256 << 20
"""Loads of at least this size are logged with their speed."""
MAX_NAMED = 12  # An error lists at most this many tensor names per kind of problem.
WRONG_TYPE = "of a type that is not fp32, fp16 or bf16"

_log = get_logger("outrider.loader")


class CheckpointReader(TensorSource):
    """Reader of the tensors in a model folder, from one tensor file or from the shards that an index lists.

    Opening a reader reads only the headers of the files. `check` compares all headers with the expected
    tensors, and reports every problem in one error. `take` copies a tensor to the device. Use the reader in a
    ``with`` statement. The end of this statement unmaps the files.

    Args:
        path: A tensor file or a folder. The folder must contain ``model.safetensors``,
            ``model.safetensors.index.json``, ``pytorch_model.bin``, ``pytorch_model.bin.index.json``, or
            exactly one ``*.safetensors`` file.
        device: Device to copy tensors to. On ``meta``, headers are checked but no data is read.
        dtype: Type to which floating-point tensors are converted. With None, they keep their stored type.
        progress: Called after each tensor with the number of bytes copied so far and the total number.

    Attributes:
        files: The tensor files.
        tensors: Maps the name of every tensor in all files to its shape, type and location.
        fingerprint: sha256 over the names, shapes and dtypes of all tensors, and over a sample of every
            tensor's bytes.

    Raises:
        CheckpointError: A file is missing, truncated or corrupt, or the shards do not match their index.
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
        self._files = CheckpointFiles(self.path)
        self._taken: set[str] = set()
        self._ignored: set[str] = set()
        self._ahead: ReadAhead | None = None
        self._staging: WeightStaging | None = None
        self._started: float | None = None
        # A CUDA device runs asynchronously. Reading the result of each check would make every copy wait.
        self._checks_each = self.device.type != "cuda"
        # Tensors that have been copied but not yet checked. An entry contains the tensors' names, their type
        # after conversion, and a ``[] bool`` on the device that is True if all numbers are finite.
        self._unchecked: list[tuple[Sequence[str], torch.dtype, torch.Tensor]] = []
        self.tensors: dict[str, TensorInfo] = {
            name: file.tensors[name] for name, file in self._files.file_of.items()
        }
        self._taken_bytes = 0
        self._all_bytes = sum(info.nbytes for info in self.tensors.values())

    @property
    def files(self) -> list[TensorFile]:
        """The tensor files."""
        return self._files.files

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self.tensors.keys()

    @property
    def fingerprint(self) -> str:
        """Hash of the weights. To save time, it covers only a sample of each tensor's bytes."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            info = self.tensors[name]
            digest.update(f"{name} {info.shape} {info.dtype}\n".encode())
            sample = (
                self._files.file_of[name]
                .read(name)
                .reshape(-1)[: FINGERPRINT_SAMPLE_BYTES // info.dtype.itemsize]
            )
            digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def check(
        self,
        expected: Mapping[str, TensorShape],
        *,
        ignored: Collection[str] = (),
        floating: bool = True,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """Compare the files' headers with the expected tensors, before any memory is allocated.

        Args:
            expected: Maps the name of every tensor that must be present to its shape.
            ignored: Names of unused tensors that may be present. A name may be a pattern with ``*``.
            floating: True if expected tensors must have a floating-point type.
            dtypes: Maps names of tensors to the exact type that they must have. `floating` does not apply to
                these tensors.

        Raises:
            CheckpointError: A tensor is missing or unexpected, or its shape or type is wrong. The message
                lists all such tensors. The error's `field` is the first of them.
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
        """Start background threads that read these tensors into the page cache before `take` needs them.

        Args:
            names: Tensor names, roughly in the order in which `take` will be called.
        """
        if self.device.type != "meta" and self._ahead is None:
            self._ahead = ReadAhead(self._files.file_of[name].read(name) for name in names)

    def take_rows(
        self,
        parts: Sequence[tuple[str, TensorShape]],
        *,
        dtype: torch.dtype | None = None,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Copy several tensors into one tensor; see `TensorSource.take_rows`.

        On a GPU, NaN and infinite numbers are reported later, by `check_finite`.
        """
        infos = [self._require(name, shape, dtype) for name, shape in parts]
        target = dtype or to or self.dtype or infos[0].dtype
        rows = sum(shape[0] for _, shape in parts)
        out = torch.empty((rows, *parts[0][1][1:]), dtype=target, device=self.device)
        position = 0
        for name, shape in parts:
            self._copy(out[position : position + shape[0]], self._files.file_of[name].read(name))
            position += shape[0]
            self._taken.add(name)
            self._taken_bytes += self.tensors[name].nbytes
            if self._ahead is not None:
                self._ahead.used(self.tensors[name].nbytes)
        if out.numel() and out.dtype.is_floating_point and not out.is_meta:
            self._unchecked.append(([name for name, _ in parts], target, _finite(out)))
            if self._checks_each:
                self.check_finite()
        if self._progress is not None:
            self._progress(self._taken_bytes, self._all_bytes)
        return out

    def check_finite(self) -> None:
        """Wait for the copies of all tensors, and reject tensors that contain NaN or infinite numbers.

        On a CPU, every `take` calls this method. On a GPU, each call waits for the device. The method is
        therefore called only once, at the end of the reader's ``with`` block.

        Raises:
            CheckpointError: A tensor contains NaN or infinite numbers, in the file or after its conversion.
        """
        unchecked, self._unchecked = self._unchecked, []
        if unchecked and not bool(torch.stack([finite for _, _, finite in unchecked]).all()):
            names, dtype, _ = next(one for one in unchecked if not bool(one[2]))
            raise self._not_finite(names, dtype)

    def number(self, name: str) -> float:
        """Return the value of a tensor with a single number, such as a scale. Call `check` first."""
        self._taken.add(name)
        return float(self._files.file_of[name].read(name).float())

    def finish(self, *, ignored: Collection[str] = ()) -> None:
        """Check that every tensor of the checkpoint has been taken with `take`.

        Args:
            ignored: Names of tensors that need not be taken. A name may be a pattern with ``*``.

        Raises:
            CheckpointError: A tensor was not taken and is not ignored. The message lists all such tensors.
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
        self._files.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.check_finite()
                self._log_speed()
        finally:
            self.close()

    def _copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a stored tensor to its destination. Copy large tensors to a GPU through pinned memory."""
        if self._started is None:
            self._started = time.monotonic()
            if self.device.type == "cuda":
                self._staging = make_staging(self.device)
        if self._staging is None or source.nbytes < STAGED_BYTES:
            out.copy_(source)
        else:
            self._staging.copy(out, source)

    def _log_speed(self) -> None:
        """Log the speed of the load if the load is large."""
        if self._started is not None and self._taken_bytes >= LOGGED_BYTES:
            seconds = time.monotonic() - self._started
            rate = self._taken_bytes / 1e9 / max(seconds, 1e-9)
            _log.info(
                "weights loaded",
                checkpoint=str(self.path),
                gb=round(self._taken_bytes / 1e9, 2),
                seconds=round(seconds, 2),
                gb_per_s=round(rate, 2),
            )

    def _require(self, name: str, shape: TensorShape, dtype: torch.dtype | None) -> TensorInfo:
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
        """Return the error for NaN or infinite numbers, which a damaged file or a too narrow dtype causes."""
        broken = [
            name
            for name in names
            if self.tensors[name].nbytes and not _is_finite(self._files.file_of[name].read(name))
        ]
        if broken:
            return CheckpointError(
                f"{self.path}: {', '.join(broken)} contains NaN or infinite numbers; the weights are "
                "damaged: download the checkpoint again.",
                field=broken[0],
            )
        return CheckpointError(
            f"{self.path}: {', '.join(names)} contains numbers beyond {dtype_name(dtype)}; "
            "serve with --dtype bfloat16 or float32.",
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
            plural = "s" if len(names) > 1 else ""
            lists.append(f"{len(names)} tensor{plural} {kind}: {', '.join(names[:MAX_NAMED])}{more}")
        return CheckpointError(
            f"{self.path}: {'; '.join(lists)}. The weights do not belong to this config.json, "
            "or the download is incomplete: download the checkpoint again.",
            field=field,
        )


def _matches(name: str, patterns: Collection[str]) -> bool:
    return name in patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def is_weight(dtype: torch.dtype) -> bool:
    """True if weights of this stored type can be converted. Integers cannot. FP8 cannot without scales."""
    return dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _is_finite(tensor: torch.Tensor) -> bool:
    """True if no number is NaN or infinite."""
    return bool(_finite(tensor))


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    """Return a ``[] bool`` tensor on the device: the result of `_is_finite`. Do not wait for the device.

    The function reads the tensor once. It makes a copy only if the tensor is FP8.
    """
    # FP8 tensors cannot be compared, so they are converted first.
    low, high = torch.aminmax(tensor.half() if tensor.dtype.itemsize == 1 else tensor)
    return torch.isfinite(low) & torch.isfinite(high)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as configuration files spell it (``float16``)."""
    return str(dtype).removeprefix("torch.")
