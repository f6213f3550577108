"""Runs a model's `transformers` modules as a `Decoder` over the KV pool."""

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
from outrider.shared.nn.decoder import LM_HEAD, Decoder, DecoderOutput, OnProgress
from outrider.shared.nn.generic.attention import Site, Step, bind
from outrider.shared.nn.generic.layout import GenericConfig
from outrider.shared.nn.generic.output_head import OutputHead
from outrider.shared.nn.generic.weights import load_weights


class GenericDecoder(Decoder):
    """Decoder that runs a `transformers` model. The model's own modules compute everything except attention.

    The model gets all rows of a forward pass as one batch. The model has no cache and no mask of its own. The
    planned `AttentionBatch` determines which tokens each row sees, and where the row's K/V is stored in the
    KV pool.

    Args:
        config: Configuration with the layout that the probe found.
        model: The model with its weights, on its device. It calls this project's attention.
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
        self._output_head = OutputHead(model)
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
        progress: OnProgress | None = None,
    ) -> GenericDecoder:
        """Load the weights of a folder with the given configuration; see `load_decoder`."""
        model, weights = load_weights(path, config, device, dtype, progress)
        return cls(config, model, hashlib.sha256(f"{config.fingerprint} {weights}".encode()).hexdigest())

    @property
    def weight_bytes(self) -> int:
        """Size of all parameters, in bytes."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @property
    def rounded(self) -> bool:
        """Always False, because these modules have no FP8 products."""
        return False

    @property
    def computed_by(self) -> str:
        return "transformers' modules"

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight that a draft model may borrow: the embedding or the output head.

        Args:
            name: The weight's name in Llama checkpoints.

        Raises:
            CheckpointError: The output head has a bias, or no weight of this name can be borrowed.
        """
        if name == LM_HEAD and self._head_bias:
            raise CheckpointError(
                f"the output head of {self.config.architecture} has a bias and cannot be borrowed; "
                "use a draft head with its own lm_head.",
                field=name,
            )
        return super().weight(name)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of ``tokens [rows]``, ``[rows, hidden_size]``, with the model's scale."""
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
        """Run one forward pass of the model over the planned rows; see `Decoder.forward`.

        If a position lies beyond the end of a learned position table, the last row of the table is used. Only
        rows of draft tokens can have such positions. These draft tokens can never be emitted.
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
        """Return logits ``[rows, vocab]`` as the model computes them, including its own scale and softcap.

        The logits have the type that the model returns.
        """
        return self._output_head(hidden)

    @contextmanager
    def _captured(self, layer_ids: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        """While the model runs, collect the outputs of the given layers, ``[rows, hidden_size]`` each."""
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
