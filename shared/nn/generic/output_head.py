"""Computes logits from hidden states by running only the output head of a `transformers` model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast


@dataclass
class _BodyOutput(BaseModelOutputWithPast):
    """Output of a model's body, with the fields that an output head passes on."""

    cross_attentions: tuple[torch.Tensor, ...] | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


class _Given(nn.Module):
    """Replaces a model's body and returns the given hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: object, **__: object) -> _BodyOutput:
        """Return the hidden states in the same form as the body would return them."""
        return _BodyOutput(last_hidden_state=self.hidden)


class OutputHead:
    """The output head of a `transformers` model, including bias, scale and softcap of the logits.

    The head runs the model's own code.

    Args:
        model: The model, which is not changed. The output head shares the model's weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._given = _Given()
        self._model: Any = copy.copy(model)
        self._model.__dict__["_modules"] = {**model._modules, model.base_model_prefix: self._given}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits ``[rows, vocab]`` for hidden rows ``[rows, hidden_size]`` after the final norm."""
        self._given.hidden = hidden[None]
        try:
            logits: torch.Tensor = self._model(input_ids=None, use_cache=False).logits[0]
        finally:
            self._given.hidden = None
        return logits
