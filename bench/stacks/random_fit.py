"""Checks before any allocation that the random weights of a named shape fit into free memory."""

from __future__ import annotations

from math import prod

import torch

from outrider.bench.stacks.random_head import head_shapes
from outrider.bench.stacks.shapes import SHAPES, NamedShape
from outrider.services.doctor.memory import device_memory
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.checkpoint.weight_sizes import gib
from outrider.shared.nn.open import expected_tensors


def target_bytes(shape: NamedShape, dtype: torch.dtype) -> int:
    """Return the bytes of a random target's weights.

    Raises:
        CheckpointError: The target needs `transformers`, which is not installed.
    """
    return sum(prod(one) for one in expected_tensors(shape.model_config()).values()) * dtype.itemsize


def head_bytes(shape: NamedShape, dtype: torch.dtype) -> int:
    """Return the bytes of a random head's weights."""
    return sum(prod(one) for one in head_shapes(shape).values()) * dtype.itemsize


def check_shape_fits(
    shape: NamedShape, device: torch.device, dtype: torch.dtype, *, with_head: bool, ranks: int = 1
) -> None:
    """Check that the random weights of a shape fit into the free memory of a device.

    Args:
        shape: Sizes of the target and the head.
        device, dtype: Where the weights will be, and their type.
        with_head: True if there is a draft on the same device.
        ranks: Number of GPUs among which the target is split. On a CPU, all ranks share the memory.

    Raises:
        ConfigurationError: The weights do not fit. The message names shapes that fit, and other fixes.
        CheckpointError: The target needs `transformers`, which is not installed.
    """
    free, total = device_memory(device)
    split = ranks if device.type == "cuda" else 1

    def needed(one: NamedShape, as_dtype: torch.dtype = dtype) -> int:
        head = head_bytes(one, as_dtype) if with_head else 0
        return target_bytes(one, as_dtype) // split + head

    if needed(shape) <= free:
        return
    # Other families may need a package that is not installed, so only shapes of this family are named.
    family = [one for one in SHAPES.values() if one.target["model_type"] == shape.target["model_type"]]
    fitting = sorted((one for one in family if needed(one) <= free), key=needed, reverse=True)
    fixes = [f"use --shape {one.name} ({gib(needed(one))})" for one in fitting[:1]]
    if dtype is torch.float32 and needed(shape, torch.bfloat16) <= free:
        fixes.append(f"use --dtype bfloat16 ({gib(needed(shape, torch.bfloat16))})")
    fixes.append("use another --device, or stop other processes on this one")
    raise ConfigurationError(
        f"--shape {shape.name} does not fit: its random weights need {gib(needed(shape))} as "
        f"{str(dtype).removeprefix('torch.')}, and {device} has {gib(free)} free of {gib(total)}. "
        f"Possible fixes: {'; '.join(fixes)}.",
        field="--shape",
    )
