"""How far rounding may move the numbers of a model when the same token is computed in another pass.

A pass over several rows adds in another order than a pass over one row, so the two passes round differently.
An *error* is the root mean square of a row's difference, divided by the root mean square of the row. Errors
are compared with a bound at each *stage*: the residual stream after each layer, and the logits.

The bound has three parts (`bounds`):

- The measured part is `Limits.slack` times the error of a pass without a tree: the same tokens as a causal
  chunk with as many rows as the tree. It follows the model's depth, its sensitivity and its kernels.
- The floor is what one layer's rounding explains, even if the chunk happens to round like plain decoding.
- The ceiling is what no rounding explains, even if the chunk has the same fault as the tree.

The floors and ceilings come from the model's types (`limits_of`). They were chosen from errors measured on a
CPU, with random Llamas of 2 to 32 layers whose products enlarge a row 1.0 to 1.28 times. The first two
columns are honest errors in per cent. The next two are errors as multiples of their bound, for the unluckiest
honest prompt and for the fault that is hardest to see.

=============================  ==========  ==========  =======  ==============  =====  =======
type                           layer 0     logits      honest   planted faults  floor  ceiling
=============================  ==========  ==========  =======  ==============  =====  =======
fp32                           0.0001      0.0002      0.1      ≥ 5,000         0.002  1
bf16                           0.2 to 0.4  0.5 to 2.7  0.5      ≥ 4             1.5    25
FP8 products, as on a CPU      0 to 2.4    0 to 12     1.3      ≥ 1.2           5      70
FP8 products, as on a GPU      6 to 7      6 to 17     0.9      ≥ 1.1           5      70
FP8 cache                      0 to 0.1    0 to 1.7    0.5      ≥ 2             5      70
=============================  ==========  ==========  =======  ==============  =====  =======

"As on a GPU" means that plain decoding does not round its activations to 8 bits, but the tree does. The
faults are a bit of the mask (visible decoy, invisible ancestor), a wrong position, doubled attention scores,
two swapped layers and a stale page. In FP8, the faults near 1 are bits of tokens that get little attention,
and layers swapped among 32. A refusal needs several prompts that exceed the bound in the same place.
The limits of fp16, whose unit roundoff is an eighth of bf16's, were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.generic.layout import GenericConfig

OFFSET_SHARE = 0.25
"""Logits whose spread is below this share of their size are measured by their size, which sets rounding."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Smallest and largest bound of a model, as errors.

    Attributes:
        name: The type that sets the bound, for messages.
        floor, ceiling: Smallest and largest bound.
        slack: Bound divided by the measured root mean square of honest errors.
        may_route: True if rounding may exchange an expert.
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
"""Ceiling of a mixture of experts: rounding may exchange an expert, which changes most of a row."""


@dataclass(frozen=True, slots=True)
class Stages:
    """What a pass computed for some rows.

    Attributes:
        layers: ``[rows, layers, hidden] fp32``, the residual stream after each layer.
        logits: ``[rows, vocab] fp32``.
    """

    layers: torch.Tensor
    logits: torch.Tensor

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
    """Return the error of each row at each stage, ``[rows, layers + 1] fp32``; the last stage is the logits.

    A common offset of a row's logits does not count, because it does not change any probability.
    """
    layers = _rms(found.layers - expected.layers) / _rms(expected.layers).clamp(min=_tiny())
    size, spread = _rms(expected.logits), _rms(_centred(expected.logits))
    scale = torch.maximum(spread, OFFSET_SHARE * size).clamp(min=_tiny())
    logits = _rms(_centred(found.logits - expected.logits)) / scale
    return torch.cat([layers, logits[:, None]], dim=1)


def bounds(chunk: torch.Tensor, limits: Limits) -> torch.Tensor:
    """Return the bound of each stage, ``[stages] fp32``.

    Args:
        chunk: ``[rows, stages]``, the errors of a causal chunk against plain decoding.
        limits: The model's limits.
    """
    return (limits.slack * _rms(chunk.T)).clamp(limits.floor, limits.ceiling)


def _rms(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean(-1).sqrt()


def _centred(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.mean(-1, keepdim=True)


def _tiny() -> float:
    return torch.finfo(torch.float32).tiny
