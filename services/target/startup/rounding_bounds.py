"""Bounds on rounding errors, i.e. on the differences between two passes that compute the same tokens.

`parity_check.py` uses this module at startup. The check computes the same tokens in three ways: one at a time
(plain decoding), as a path of a tree, and as an ordinary causal chunk with as many rows as the pass over the
tree. A pass
over several rows adds numbers in another order than a pass over one row, so the passes round differently.

An *error* compares a row of one pass with the same row of another pass. It is the root mean square of the
difference, divided by the root mean square of the row. The check compares errors with a *bound* at each
*stage*. The stages are the residual stream after each layer, and the logits.

The function `bounds` computes the bound of a stage:

- Usually, the bound is `Limits.slack` times the error of the causal chunk. This error depends on the model
  and its kernels, but not on trees.
- The bound is never below the *floor*, an error that rounding in a single layer can cause. A chunk that
  happens to round exactly like plain decoding would otherwise make the bound 0.
- The bound is never above the *ceiling*, because rounding does not cause larger errors. A fault in both the
  chunk and the tree would otherwise raise the bound and stay hidden.

The floor and the ceiling depend on the data types of the model (`limits_of`). They were chosen from errors
measured on a CPU, with random Llamas of 2 to 32 layers. In these models, each matrix product multiplies the
size of a row by 1.0 to 1.28. The columns of the table are:

- *layer 0* and *logits*: errors of correct models at these two stages, in per cent.
- *correct*: the largest error of a correct model with a single prompt, as a multiple of the bound.
- *faulty*: the least error of a model with a planted fault, as a multiple of the bound.
- *floor* and *ceiling*: the limits, in per cent.

=============================  ==========  ==========  =======  =======  =====  =======
type                           layer 0     logits      correct  faulty   floor  ceiling
=============================  ==========  ==========  =======  =======  =====  =======
fp32                           0.0001      0.0002      0.1      ≥ 5,000  0.002  1
bf16                           0.2 to 0.4  0.5 to 2.7  0.5      ≥ 4      1.5    25
FP8 products, as on a CPU      0 to 2.4    0 to 12     1.3      ≥ 1.2    5      70
FP8 products, as on a GPU      6 to 7      6 to 17     0.9      ≥ 1.1    5      70
FP8 cache                      0 to 0.1    0 to 1.7    0.5      ≥ 2      5      70
=============================  ==========  ==========  =======  =======  =====  =======

"As on a GPU" means that activations are rounded to 8 bits in the pass over the tree, but not in plain
decoding.

The planted faults are:

- one wrong bit in the attention mask: a node sees a node that is not its ancestor, or does not see an
  ancestor;
- a wrong position;
- doubled attention scores;
- two swapped layers;
- a wrong page of the K/V cache.

In FP8, the errors of two kinds of faults are hardly above the bound: wrong mask bits for tokens that get
little attention, and two swapped layers in a model of 32 layers.

A correct model may exceed the bound with one prompt, as the value 1.3 shows. The check therefore stops the
start only if the same row exceeds the bound at the same stage with several prompts.

The limits of fp16 were not measured. Its unit roundoff is an eighth of bf16's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.generic.layout import GenericConfig

OFFSET_SHARE = 0.25
"""Least divisor of the error of a row's logits, as a share of the logits' root mean square.

The usual divisor is the spread, i.e. the root mean square of the logits minus their mean. If all logits of a
row are nearly equal, the spread is too small, because rounding depends on the size of the logits.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the rounding errors of a model. Errors and bounds are fractions, so 0.05 is 5%.

    Attributes:
        name: Name of the data type that determines the limits, for messages.
        floor: Smallest bound on an error.
        ceiling: Largest bound on an error.
        slack: Factor by which the measured error of a causal chunk is multiplied. The bound is this product,
            limited by `floor` and `ceiling`.
        may_route: True if the model may be a mixture of experts, where rounding may select another expert.
    """

    name: str
    floor: float
    ceiling: float
    slack: float
    may_route: bool = False


_BY_TYPE = {
    torch.float32: Limits("float32", 2e-5, 1e-2, 4.0),
    torch.float16: Limits("float16", 2e-3, 0.1, 3.0),
    torch.bfloat16: Limits("bfloat16", 1.5e-2, 0.25, 3.0),
}
_FP8 = Limits("FP8", 5e-2, 0.7, 2.0)
_OTHER_EXPERTS = 1.0
"""Ceiling of a mixture of experts. If rounding selects another expert, most of a row changes."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Results of a forward pass for some rows, at all stages that the parity check compares.

    Attributes:
        layers: ``[rows, layers, hidden] fp32``, the residual stream after each layer.
        logits: ``[rows, vocab] fp32``.
    """

    layers: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def joined(cls, parts: Seq[Stages]) -> Stages:
        """Return the rows of all parts, one part after the other."""
        return cls(torch.cat([one.layers for one in parts]), torch.cat([one.logits for one in parts]))

    def rows(self, index: list[int]) -> Stages:
        """Return some of the rows."""
        return Stages(self.layers[index], self.logits[index])

    def equals(self, other: Stages) -> bool:
        """Return True if all numbers are equal."""
        return torch.equal(self.layers, other.layers) and torch.equal(self.logits, other.logits)


def limits_of(decoder: Decoder, pool: KVPool) -> Limits:
    """Return the limits for the types of the model's weights, products and cache."""
    narrow = decoder.rounded or pool.kv_dtype.itemsize == 1
    limits = _FP8 if narrow else _BY_TYPE[decoder.dtype]
    # The modules of transformers do not say whether they route tokens to experts.
    may_route = isinstance(decoder.config, GenericConfig) or decoder.config.experts is not None
    if may_route and limits.name != "float32":
        return replace(limits, ceiling=_OTHER_EXPERTS, may_route=True)
    return limits


def errors(expected: Stages, found: Stages) -> torch.Tensor:
    """Return the error of each row at each stage between two forward passes, ``[rows, layers + 1] fp32``.

    The stages are the residual stream after each layer, and then the logits. The mean of each row's logits is
    subtracted first, because a common offset does not change any probability.
    """
    layers = _rms(found.layers - expected.layers) / _rms(expected.layers).clamp(min=_tiny())
    size, spread = _rms(expected.logits), _rms(_centred(expected.logits))
    scale = torch.maximum(spread, OFFSET_SHARE * size).clamp(min=_tiny())
    logits = _rms(_centred(found.logits - expected.logits)) / scale
    return torch.cat([layers, logits[:, None]], dim=1)


def bounds(chunk: torch.Tensor, limits: Limits) -> torch.Tensor:
    """Return the largest allowed rounding error of each stage of the parity check, ``[stages] fp32``.

    Args:
        chunk: ``[rows, stages]``, the errors between a causal chunk and plain decoding.
        limits: The limits for the model's data types.
    """
    return (limits.slack * _rms(chunk.T)).clamp(limits.floor, limits.ceiling)


def _rms(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean(-1).sqrt()


def _centred(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.mean(-1, keepdim=True)


def _tiny() -> float:
    return torch.finfo(torch.float32).tiny
