"""Loads the weights of a `transformers` model. No code from the model folder is run.

Checkpoints are rejected if a parameter has no tensor, or if a tensor is unused, has a wrong type, or contains
NaN or infinite numbers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.checkpoint_reader import (
    MAX_NAMED,
    WRONG_TYPE,
    CheckpointReader,
    dtype_name,
    is_weight,
)
from outrider.shared.nn.checkpoint.tensor_file import TensorInfo
from outrider.shared.nn.config.model_config import CONFIG_FILE, ConfigReader, read_json
from outrider.shared.nn.decoder import OnProgress
from outrider.shared.nn.generic.attention import PAGED
from outrider.shared.nn.generic.config import find_class
from outrider.shared.nn.generic.layout import GenericConfig

_NOT_FUSED = re.compile(
    r"^(\S+)\s*\|\s*(?:\x1b\[[0-9;]*m)*CONVERSION", re.MULTILINE
)  # A row of the loading report.
_BUFFERS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Patterns of names of buffers that old exports contain and that `transformers` ignores."""


def load_weights(
    path: Path | str,
    config: GenericConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: OnProgress | None,
) -> tuple[PreTrainedModel, str]:
    """Load the weights of a `transformers` model whose configuration has been probed.

    `transformers` fills the model in host memory. The weights are then copied to the device.

    Returns:
        The model and the fingerprint of its weights.

    Raises:
        CheckpointError: A file is damaged, or a tensor is missing, unexpected, misshaped or not finite. The
            error's `field` is the first such tensor.
    """
    folder = Path(path)
    with CheckpointReader(folder) as files:  # Check every header before `transformers` opens a file.
        if any(file.path.suffix != ".safetensors" for file in files.files):
            raise CheckpointError(
                f"{folder} contains .bin files, but models of type {config.model_type} need safetensors: "
                "save them again with save_pretrained.",
                field=str(folder),
            )
        stored = files.tensors
        fingerprint, size = files.fingerprint, sum(info.nbytes for info in files.tensors.values())
    model_class: Any
    model_class, settings = find_class(ConfigReader(read_json(folder / CONFIG_FILE), folder / CONFIG_FILE))
    model, report = _fill(model_class, folder, settings, dtype)
    _check(folder, report, wrong_types(stored, model))
    _check_finite(folder, model)
    model = model.to(device).eval().requires_grad_(False)
    if progress is not None:
        progress(size, size)
    return model, fingerprint


def _fill(model_class: Any, folder: Path, settings: Any, dtype: torch.dtype) -> Any:
    """Return the model and the loading report of `transformers`."""
    with _collected_messages() as messages:
        try:
            return model_class.from_pretrained(
                folder,
                config=settings,
                dtype=dtype,
                attn_implementation=PAGED,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # `_check` reports wrong sizes together with all other problems
                output_loading_info=True,
            )
        except Exception as error:  # If a model class does not expect these files, it may raise any error.
            fused = [name for message in messages for name in _NOT_FUSED.findall(message)]
            if not fused:
                raise CheckpointError(
                    f"{folder}: transformers cannot load the weights: {error}", field=str(folder)
                ) from error
            raise CheckpointError(
                f"{folder}: tensors that become {', '.join(fused[:MAX_NAMED])} are missing or misshaped. "
                "The weights do not belong to this config.json, or the download is incomplete: "
                "download the checkpoint again.",
                field=fused[0],
            ) from error


class _Messages(logging.Handler):
    """Collects log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store one message."""
        self.messages.append(record.getMessage())


@contextmanager
def _collected_messages() -> Iterator[list[str]]:
    """Collect the log messages of `transformers` instead of logging them.

    The messages are its report on loading, whose problems the caller turns into errors.
    """
    log: Any = transformers_logging
    bars, collector = log.is_progress_bar_enabled(), _Messages()
    log.disable_progress_bar()
    log.disable_default_handler()
    log.add_handler(collector)
    try:
        yield collector.messages
    finally:
        log.remove_handler(collector)
        log.enable_default_handler()
        if bars:
            log.enable_progress_bar()


def wrong_types(stored: Mapping[str, TensorInfo], model: PreTrainedModel) -> dict[str, torch.dtype]:
    """Return the names and types of a checkpoint's tensors whose type cannot be that of weights.

    `transformers` would silently convert these tensors to weights. The allowed types are those of
    `is_weight`. The result excludes integer buffers of the model, and tensors that the model ignores (masks
    of old exports).

    Args:
        stored: Maps the names of the stored tensors to their shapes and types.
        model: The model to which the tensors belong. It may be on the meta device.
    """
    ignored = [
        re.compile(pattern) for pattern in (*(model._keys_to_ignore_on_load_unexpected or ()), *_BUFFERS)
    ]
    kept = model.state_dict()
    integers = tuple(f".{name}" for name, tensor in kept.items() if not tensor.is_floating_point())
    return {
        name: info.dtype
        for name, info in stored.items()
        if not is_weight(info.dtype)
        and not f".{name}".endswith(integers)
        and (name in kept or not any(pattern.search(name) for pattern in ignored))
    }


def _check(folder: Path, report: Mapping[str, Collection[Any]], wrong: Mapping[str, torch.dtype]) -> None:
    misshaped = {str(name): (file, wanted) for name, file, wanted in report["mismatched_keys"]}
    problems = {
        "missing": sorted(str(name) for name in report["missing_keys"] if name not in misshaped),
        "unexpected": sorted(map(str, report["unexpected_keys"])),
        "misshaped": [
            f"{name} is {list(file)}, must be {list(wanted)}"
            for name, (file, wanted) in sorted(misshaped.items())
        ],
        WRONG_TYPE: [f"{name} is {dtype_name(dtype)}" for name, dtype in sorted(wrong.items())],
        "unreadable": sorted(map(str, report["error_msgs"])),
    }
    found = {kind: names for kind, names in problems.items() if names}
    if found:
        lists = [
            f"{len(names)} tensor{'s' if len(names) > 1 else ''} {kind}: {', '.join(names[:MAX_NAMED])}"
            + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
            for kind, names in found.items()
        ]
        raise CheckpointError(
            f"{folder}: {'; '.join(lists)}. The weights do not belong to this config.json, "
            "or the download is incomplete: download the checkpoint again.",
            field=next(iter(found.values()))[0].split(" ", 1)[0],
        )


def _check_finite(folder: Path, model: PreTrainedModel) -> None:
    broken = [
        name
        for name, weight in model.named_parameters()
        if weight.numel() and not bool(torch.isfinite(torch.stack(weight.aminmax())).all())
    ]
    if broken:
        raise CheckpointError(
            f"{folder}: {', '.join(broken[:MAX_NAMED])} contains NaN or infinite numbers; "
            "the weights are damaged, or beyond the dtype: download the checkpoint again, "
            "or serve with --dtype bfloat16 or float32.",
            field=broken[0],
        )
