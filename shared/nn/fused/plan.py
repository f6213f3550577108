"""Which weights each kernel of a layer brings into L2 for the next product.

Between two products run kernels that read next to nothing; without this the memory would idle during each of them and while a product
starts and ends. Amounts were measured on an H200 (60 MB of L2); a prefetch of what is then not read in time only wastes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.ahead import Prefetch

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Ahead:
    """MiB that each kernel prefetches: of `o` by the first three, of the next matrix by the others."""

    qkv: int = 0
    rope: int = 8
    attention: int = 24
    o: int = 8
    gate_up: int = 8
    down: int = 8


@dataclass(frozen=True, slots=True)
class LayerAhead:
    """The same for one layer, as what to prefetch."""

    qkv: Prefetch
    rope: Prefetch
    attention: Prefetch
    o: Prefetch
    gate_up: Prefetch
    down: Prefetch


def plan_ahead(
    layers: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]], last: torch.Tensor, ahead: Ahead
) -> list[LayerAhead]:
    """Return what each layer's kernels prefetch.

    Args:
        layers: The matrices of each layer.
        last: What is read after the last layer.
        ahead: How much.
    """
    plans = []
    for index, (_, o, gate_up, down) in enumerate(layers):
        after = layers[index + 1][0] if index + 1 < len(layers) else last
        plans.append(
            LayerAhead(
                qkv=Prefetch.of(o, ahead.qkv * _MIB),
                rope=Prefetch.of(o, ahead.rope * _MIB, ahead.qkv * _MIB),
                attention=Prefetch.of(o, ahead.attention * _MIB, (ahead.qkv + ahead.rope) * _MIB),
                o=Prefetch.of(gate_up, ahead.o * _MIB),
                gate_up=Prefetch.of(down, ahead.gate_up * _MIB),
                down=Prefetch.of(after, ahead.down * _MIB),
            )
        )
    return plans
