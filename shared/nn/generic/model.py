"""A `Decoder` whose modules are `transformers`' own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.shared.attn.base import AttentionBackend
from outrider.shared.base.errors import CheckpointError
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import LM_HEAD, Decoder, DecoderOutput, Progress
from outrider.shared.nn.generic.attention import Site, Step, bind
from outrider.shared.nn.generic.layout import GenericConfig
from outrider.shared.nn.generic.tail import Tail
from outrider.shared.nn.generic.weights import load_weights


class GenericDecoder(Decoder):
    """Runs a model of `transformers` over the pool: its modules compute everything but attention, the rows are one batch of it.

    The model keeps no cache and makes no mask; who sees what, and where K/V lives, is the planned batch's.

    Args:
        config: With the layout that the probe found.
        model: With weights, on its device, its attention being ours.
        fingerprint: Identifies configuration and weights.
    """

    def __init__(self, config: GenericConfig, model: PreTrainedModel, fingerprint: str) -> None:
        parts: Any = model
        embedding, head = parts.get_input_embeddings(), parts.get_output_embeddings()
        self.config: GenericConfig = config
        self.embedding = embedding.weight.detach()
        self.lm_head = head.weight.detach()
        self.device = self.embedding.device
        self.dtype = self.embedding.dtype
        self.fingerprint = fingerprint
        self.model = model
        self._body = parts.base_model
        self._embed = embedding
        self._head_bias = getattr(head, "bias", None) is not None
        self._tail = Tail(model)
        self._step = Step()
        layout = config.layout
        for layer, (path, window) in enumerate(zip(layout.attention_paths, layout.windows, strict=True)):
            bind(model.get_submodule(path), Site(layer, window, self._step))
        self._layers = [model.get_submodule(path) for path in layout.layer_paths]

    @classmethod
    def open(
        cls,
        path: Path | str,
        config: GenericConfig,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> GenericDecoder:
        """Load the weights of a folder whose configuration is read; see `load_decoder`."""
        model, weights = load_weights(path, config, device, dtype, progress)
        return cls(config, model, hashlib.sha256(f"{config.fingerprint} {weights}".encode()).hexdigest())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @property
    def computed_by(self) -> str:
        """See `Decoder.computed_by`."""
        return "transformers' modules"

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight that a draft may borrow, by the name it has in Llama's checkpoints; see `Decoder.weight`."""
        if name == LM_HEAD and self._head_bias:
            raise CheckpointError(
                f"the output head of {self.config.architecture} has a bias and cannot be borrowed.",
                field=name,
            )
        return super().weight(name)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of ``tokens [rows]``, scaled where the model's embedding scales: ``[rows, hidden_size]``."""
        out: torch.Tensor = self._embed(tokens)
        return out

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        pool: KVPool,
        aux_layer_ids: Sequence[int] = (),
    ) -> DecoderOutput:
        """Run the model over the rows of a planned step; see `Decoder.forward`.

        Positions behind a learned table are its last: only draft rows lie there, which can never be emitted.
        """
        if self.config.layout.max_positions is not None:
            positions = positions.clamp(max=self.config.layout.max_positions - 1)
        self._step.attention, self._step.pool = attention, pool
        try:
            with self._captured(aux_layer_ids) as aux:
                output = self._body(
                    input_ids=tokens.long()[None], position_ids=positions.long()[None], use_cache=False
                )
        finally:
            self._step.attention = self._step.pool = None
        return DecoderOutput(hidden=output.last_hidden_state[0], aux=torch.cat(aux, dim=-1) if aux else None)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocab]`` in the type that the model makes them in, scaled and capped as it does; see `Decoder.logits`."""
        return self._tail(hidden)

    @contextmanager
    def _captured(self, layer_ids: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        """Collect the outputs of the named layers, ``[rows, hidden_size]`` each, while the model runs."""
        found: list[torch.Tensor] = []

        def keep(
            _module: nn.Module, _arguments: object, output: torch.Tensor | tuple[torch.Tensor, ...]
        ) -> None:
            found.append((output if isinstance(output, torch.Tensor) else output[0])[0])

        hooks = [self._layers[layer].register_forward_hook(keep) for layer in layer_ids]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()
