"""Defines `TensorSource`, which supplies tensors to layers, and `ExpectedTensors`, a list of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from outrider.shared.nn.checkpoint.tensor_file import TensorShape

__all__ = ["ExpectedTensors", "TensorShape", "TensorSource"]


class TensorSource(Protocol):
    """Supplies named tensors to the functions that load layers."""

    def take(
        self,
        name: str,
        shape: TensorShape,
        *,
        dtype: torch.dtype | None = None,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return one tensor of the model on this source's device.

        Args:
            name: The tensor's name.
            shape: The shape that the tensor must have.
            dtype: The exact stored type that an index or mask tensor must have (for example int64 for d2t).
                With None, the tensor is a floating-point weight.
            to: Type to which a floating-point weight is converted. With None, it is converted to this
                source's dtype.

        Raises:
            CheckpointError: The tensor is missing, has another shape or type, or contains NaN or infinite
                numbers.
        """
        return self.take_rows([(name, shape)], dtype=dtype, to=to)

    def take_rows(
        self,
        parts: Sequence[tuple[str, TensorShape]],
        *,
        dtype: torch.dtype | None = None,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return several tensors as one tensor, concatenated along the first dimension.

        For example, q, k and v become one weight. Gate and up become one weight too.

        Args:
            parts: Name and shape of each tensor.
            dtype: The exact stored type of the tensors; see `take`.
            to: Type to which the tensors are converted; see `take`.

        Raises:
            CheckpointError: A tensor is not valid; see `take`.
        """
        ...


class ExpectedTensors(TensorSource):
    """A `TensorSource` that has no file and records which tensors a model needs.

    The tensors that it returns are on torch's meta device, so they contain no data.

    Attributes:
        shapes: Maps the name of every requested tensor to its shape.
        dtypes: Maps names to exact types, for the tensors that were requested with an exact type.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, TensorShape] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def take_rows(
        self,
        parts: Sequence[tuple[str, TensorShape]],
        *,
        dtype: torch.dtype | None = None,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Record several tensors that are concatenated into one tensor."""
        self.shapes |= dict(parts)
        if dtype is not None:
            self.dtypes |= {name: dtype for name, _ in parts}
        rows = sum(shape[0] for _, shape in parts)
        return torch.empty((rows, *parts[0][1][1:]), dtype=dtype or to or torch.float32, device="meta")
