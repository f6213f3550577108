"""Attention functions for `transformers`: one attends over K/V in the pool, the other records its calls."""

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
    """Backend and pool of the current forward pass. The decoder sets them, and every layer reads them."""

    __slots__ = ("attention", "pool")

    def __init__(self) -> None:
        self.attention: AttentionBackend | None = None
        self.pool: KVPool | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """Description of one layer's attention, attached to a module of `transformers`.

    Attributes:
        layer: Index of the layer in the KV pool.
        window: Number of tokens that a row sees, including itself. 0 means all tokens.
        step: The current forward pass, shared by all layers of a decoder.
    """

    layer: int
    window: int
    step: Step


def bind(module: nn.Module, site: Site) -> None:
    """Attach a `Site` to the module that calls the attention. The `Site` is not part of the state dict."""
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
    """Attention function for `transformers`: store K and V in the KV pool, then run paged attention.

    Args:
        module: Module to which `bind` attached the `Site` of its layer.
        query: ``[1, heads, rows, head_dim]``, rotated.
        key, value: ``[1, kv_heads, rows, head_dim]``. Values may be narrower than keys, as in models that
            expand latents. Such values are padded with zeros.
        attention_mask: Not used. The `AttentionBatch` that was planned determines which tokens each row sees.
        scaling: Factor by which the scores are multiplied. None means ``head_dim ** -0.5``.
        s_aux: Attention sinks, ``[heads]``, or None for a model without sinks.
        softcap: Limit of the scores, applied by tanh. With None, scores have no limit.

    Returns:
        The outputs ``[1, rows, heads, width of a value]``, and None. `transformers` expects attention weights
        as the second result, but accepts None.
    """
    site: Site = getattr(module, _SITE)
    attention, pool = site.step.attention, site.step.pool
    assert attention is not None, "the attention of a generic decoder runs only inside its forward()"
    assert pool is not None, "the attention of a generic decoder runs only inside its forward()"
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
    """An attention mask that a model requested from `transformers`, as a rule instead of a tensor.

    Attributes:
        visible: Function ``visible(batch, head, row, column)`` whose arguments are tensors of indices. The
            result is True where the row sees the column.
    """

    visible: Any


@dataclass(frozen=True, slots=True)
class Call:
    """Record of one call of the attention function during a probe of a model.

    Attributes:
        module: Module of the model that made the call.
        q_shape, k_shape, v_shape: Shapes of the call's query, key and value.
        mask: The mask argument of the call: a `MaskRule`, or another object if the model makes its own mask.
        options: All other keyword arguments.
    """

    module: nn.Module
    q_shape: Sequence[int]
    k_shape: Sequence[int]
    v_shape: Sequence[int]
    mask: object
    options: Mapping[str, object]


class CallRecorder:
    """Collects the attention calls of the running probe. Probes run one at a time, at start-up."""

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
        """Record the call and return an output of the right shape."""
        self.calls.append(Call(module, query.shape, key.shape, value.shape, attention_mask, options))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    def mask(self, *_: object, mask_function: Any, **__: object) -> MaskRule:
        """Return the rule, so that the layers get the rule instead of a mask tensor."""
        return MaskRule(mask_function)


RECORDER = CallRecorder()

# For an attention name without a mask function, `transformers` makes no masks. Only the name that the probe
# uses has a mask function.
AttentionInterface.register(PAGED, paged_attention)
AttentionInterface.register(PROBE, RECORDER.attention)
AttentionMaskInterface.register(PROBE, RECORDER.mask)
