"""Row-parallel linear layers and MLPs: each rank multiplies its columns, and the ranks sum the products."""

from __future__ import annotations

import torch

from outrider.shared.nn.layers.latent_attention import LatentAttention
from outrider.shared.nn.layers.modules import Attention, DecoderLayer, GatedMLP, Linear, MLPBlock
from outrider.shared.parallel.reduce import Reduce


class RowParallelLinear(Linear):
    """A row-parallel linear layer: each rank has some columns of the weight ``[out, in]``.

    A call returns the whole product on every rank.

    Args:
        inner: Layer with this rank's columns of the weight, ``[out, in / ranks]``, and the whole bias. The
            bias is moved from `inner` to this object, and is added after the sum over the ranks.
        reduce: Computes the sum over the ranks.
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
        """This rank's columns (see `Linear.weight`)."""
        return self._inner.weight

    @property
    def scales(self) -> torch.Tensor | None:
        """The scales of this rank's columns (see `Linear.scales`)."""
        return self._inner.scales

    @property
    def inner(self) -> Linear:
        """This rank's columns, without the bias."""
        return self._inner

    def release(self) -> Linear:
        """Return a plain layer with this rank's columns and the bias. Do not use this object afterwards."""
        self._inner.bias = self.bias
        return self._inner

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the product, before the sum (see `Linear.product`)."""
        return self._inner.product(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, out]`` for this rank's ``x [rows, in / ranks]``."""
        out = self._reduce(self._inner(x))
        return out if self.bias is None else out.add_(self.bias)

    def plus(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``residual + self(x)``. Every rank has the whole residual."""
        return self(x).add_(residual)


class RowParallelMLP:
    """An MLP or experts whose intermediate dimension is split over the ranks. The ranks sum their outputs.

    Args:
        inner: This rank's part of the MLP or of the experts.
        reduce: Computes the sum over the ranks.
    """

    __slots__ = ("_inner", "_reduce")

    def __init__(self, inner: MLPBlock, reduce: Reduce) -> None:
        self._inner = inner
        self._reduce = reduce

    @property
    def inner(self) -> MLPBlock:
        """This rank's part."""
        return self._inner

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's matrices."""
        return self._inner.nbytes

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return ``residual + mlp(x)``, ``[rows, hidden]``."""
        return self._reduce(self._inner(x, torch.zeros_like(residual))).add_(residual)


def parallelise(layer: DecoderLayer, reduce: Reduce) -> DecoderLayer:
    """Make a layer sum its results over the ranks. The layer must have been loaded with this rank's sizes.

    The layer is modified in place and returned.
    """
    assert isinstance(layer.attention, Attention | LatentAttention)
    layer.attention.o = RowParallelLinear(layer.attention.o, reduce)
    if isinstance(layer.mlp, GatedMLP):
        layer.mlp.down = RowParallelLinear(layer.mlp.down, reduce)
    else:
        layer.mlp = RowParallelMLP(layer.mlp, reduce)
    return layer


def unparallelise(layer: DecoderLayer) -> DecoderLayer:
    """Undo `parallelise` in place, so that this rank's matrices can be replaced. Return the layer.

    The layer no longer sums over the ranks. Its results are wrong until `parallelise` is called again.
    """
    assert isinstance(layer.attention, Attention | LatentAttention)
    if isinstance(layer.attention.o, RowParallelLinear):
        layer.attention.o = layer.attention.o.release()
    if isinstance(layer.mlp, RowParallelMLP):
        layer.mlp = layer.mlp.inner
    elif isinstance(layer.mlp, GatedMLP) and isinstance(layer.mlp.down, RowParallelLinear):
        layer.mlp.down = layer.mlp.down.release()
    return layer
