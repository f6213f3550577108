"""Row-parallel pieces of a layer: each rank multiplies its columns, and the products are summed before the residual is added."""

from __future__ import annotations

import torch

from outrider.shared.nn.layers import Attention, DecoderLayer, GatedMLP, Linear, MLPBlock
from outrider.shared.parallel.reduce import Reduce


class RowParallelLinear(Linear):
    """A rank's columns of a matrix; the result is the whole product on every rank.

    Args:
        inner: ``[out, in / ranks]``; its bias, whole on every rank, is taken over and added after the sum.
        reduce: Sums over the ranks.
    """

    __slots__ = ("_inner", "_reduce")

    def __init__(self, inner: Linear, reduce: Reduce) -> None:
        self._inner = inner
        self._reduce = reduce
        self.out_features, self.in_features = inner.out_features, inner.in_features
        self.nbytes = inner.nbytes
        self.bias, inner.bias = inner.bias, None

    @property
    def weight(self) -> torch.Tensor:
        """This rank's columns, see `Linear.weight`."""
        return self._inner.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, out]`` for this rank's ``x [rows, in / ranks]``."""
        out = self._reduce(self._inner(x))
        return out if self.bias is None else out.add_(self.bias)

    def plus(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``residual + self(x)``; every rank holds the residual whole."""
        return self(x).add_(residual)


class RowParallelMLP:
    """An MLP of which each rank has a part of every expert's intermediate size, summed over the ranks.

    Args:
        inner: This rank's part.
        reduce: Sums over the ranks.
    """

    __slots__ = ("_inner", "_reduce")

    def __init__(self, inner: MLPBlock, reduce: Reduce) -> None:
        self._inner = inner
        self._reduce = reduce

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return self._inner.nbytes

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return ``residual + mlp(x)``, ``[rows, hidden]``."""
        return self._reduce(self._inner(x, torch.zeros_like(residual))).add_(residual)


def parallelise(layer: DecoderLayer, reduce: Reduce) -> DecoderLayer:
    """Make a layer that was loaded with a rank's sizes sum what the ranks compute; returns it."""
    assert isinstance(layer.attention, Attention), "latent attention is refused before"
    layer.attention.o = RowParallelLinear(layer.attention.o, reduce)
    if isinstance(layer.mlp, GatedMLP):
        layer.mlp.down = RowParallelLinear(layer.mlp.down, reduce)
    else:
        layer.mlp = RowParallelMLP(layer.mlp, reduce)
    return layer
