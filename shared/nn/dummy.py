"""Models with random weights, made where they run and without files: for measurements of speed, which the values do not change."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from outrider.shared.nn.checkpoint.tensor_source import Shape, TensorSource
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.decoder import EMBEDDING, FINAL_NORM, LM_HEAD, Decoder
from outrider.shared.nn.layers.blocks import RMSNorm
from outrider.shared.nn.layers.load import load_layer

SPREAD = 0.02
"""Standard deviation of the weights, as published models are initialised."""


class RandomTensors(TensorSource):
    """A `TensorSource` that makes what it is asked for: norms are ones, biases zeros, all else normal numbers.

    A tensor depends on its name and shape alone, so that processes agree on it.

    Args:
        device, dtype: Of the tensors, where a caller asks for no other type.
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.device = torch.device(device)
        self.dtype = dtype

    def take(
        self, name: str, shape: Shape, *, dtype: torch.dtype | None = None, to: torch.dtype | None = None
    ) -> torch.Tensor:
        """See `TensorSource.take`."""
        tensor = torch.empty(shape, dtype=dtype or to or self.dtype, device=self.device)
        self._fill(name, tensor)
        return tensor

    def take_rows(
        self,
        parts: Sequence[tuple[str, Shape]],
        *,
        dtype: torch.dtype | None = None,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See `TensorSource.take_rows`."""
        rows = sum(shape[0] for _, shape in parts)
        tensor = torch.empty((rows, *parts[0][1][1:]), dtype=dtype or to or self.dtype, device=self.device)
        first = 0
        for name, shape in parts:
            self._fill(name, tensor[first : first + shape[0]])
            first += shape[0]
        return tensor

    def _fill(self, name: str, tensor: torch.Tensor) -> None:
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith(".bias"):
            tensor.zero_()
        else:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
            tensor.normal_(0.0, SPREAD, generator=torch.Generator(self.device).manual_seed(seed))


@torch.inference_mode()
def random_decoder(config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """Return a decoder of this configuration with random weights.

    Args:
        config: Of a family of our own (Llama, Mistral, Qwen …).
        device, dtype: Of weights and activations.
    """
    source: TensorSource = RandomTensors(device, dtype)
    table = (config.vocab_size, config.hidden_size)
    embedding = source.take(EMBEDDING, table)
    layers = [
        load_layer(source, config, f"model.layers.{index}.", index) for index in range(config.num_layers)
    ]
    norm = RMSNorm(source.take(FINAL_NORM, (config.hidden_size,)), config.rms_norm_eps)
    lm_head = embedding if config.tie_word_embeddings else source.take(LM_HEAD, table)
    return Decoder(config, embedding, layers, norm, lm_head, f"random {config.fingerprint}")
