"""The attention functions that `transformers` calls: one that writes to the pool and attends, one that only notes what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from outrider.shared.attn.base import AttentionBackend
from outrider.shared.kv.pool import KVPool

PAGED = "outrider_paged"
PROBE = "outrider_probe"
_SITE = "outrider_site"


class Step:
    """What the attention of one forward pass works on; set by the decoder, read by every layer."""

    __slots__ = ("attention", "pool")

    def __init__(self) -> None:
        self.attention: AttentionBackend | None = None
        self.pool: KVPool | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """One layer's attention: its index in the pool, its window (0: none), and the step that the decoder shares among its layers."""

    layer: int
    window: int
    step: Step


def bind(module: nn.Module, site: Site) -> None:
    """Tell a module that calls the attention which layer it is. A plain attribute: no parameter, not part of its state."""
    object.__setattr__(module, _SITE, site)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **_checked_by_the_probe: object,
) -> tuple[torch.Tensor, None]:
    """Store K/V and attend by the planned batch.

    Args:
        module: Bound to its layer.
        query: ``[1, heads, rows, head_dim]``, rotated.
        key, value: ``[1, kv_heads, rows, head_dim]``; narrower values (expanded latents) are stored with zeros behind them.
        attention_mask: None: who sees what is in the batch.
        scaling: Of the scores; None: ``head_dim ** -0.5``.
        s_aux: ``[heads]`` attention sinks.
        softcap: Bound of the scores, by a tanh; None: unbounded.

    Returns:
        ``[1, rows, heads, width of a value]``, and no weights.
    """
    site: Site = getattr(module, _SITE)
    attention, pool = site.step.attention, site.step.pool
    assert attention is not None, "the attention of a generic decoder runs inside its forward only"
    assert pool is not None, "the attention of a generic decoder runs inside its forward only"
    heads, rows, head_dim = query.shape[1:]
    scale = head_dim**-0.5 if scaling is None else float(scaling)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [rows, heads, head_dim]
    missing = head_dim - v.shape[-1]
    if missing:
        v = pad(v, (0, missing))
    sinks = None if s_aux is None else s_aux.float()
    out = attention.run(site.layer, q, k, v, pool, scale, site.window, sinks, softcap or 0.0)
    out = out.view(1, rows, heads, head_dim)
    return out[..., :-missing] if missing else out, None


@dataclass(frozen=True, slots=True)
class MaskRule:
    """The mask that a model asked `transformers` for, not yet made: ``visible(batch, head, row, column)`` over index tensors."""

    visible: Any


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the attention during a probe: shapes, the rule of its mask (or what came instead of one), and what else was given."""

    module: nn.Module
    q_shape: Sequence[int]
    k_shape: Sequence[int]
    v_shape: Sequence[int]
    mask: object
    options: Mapping[str, object]


class Recorder:
    """Collects the calls of the one probe that is running; probes run one after the other, at start."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object = None,
        **options: object,
    ) -> tuple[torch.Tensor, None]:
        """Note the call and return an output of the right shape."""
        self.calls.append(Call(module, query.shape, key.shape, value.shape, attention_mask, options))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    def mask(self, *_: object, mask_function: Any, **__: object) -> MaskRule:
        """Hand the rule through to the layers instead of a mask."""
        return MaskRule(mask_function)


RECORDER = Recorder()

# Only the probe has masks made: for a name without a mask function `transformers` makes none.
AttentionInterface.register(PAGED, paged_attention)
AttentionInterface.register(PROBE, RECORDER.attention)
AttentionMaskInterface.register(PROBE, RECORDER.mask)
