"""Creates decoders with random weights on the device, without model files, to measure speed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from outrider.shared.nn.checkpoint.tensor_source import TensorShape, TensorSource
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.decoder import EMBEDDING, FINAL_NORM, LM_HEAD, Decoder
from outrider.shared.nn.layers.load import load_layer
from outrider.shared.nn.layers.modules import RMSNorm

SPREAD = 0.02
"""Standard deviation of the weights. Published models are initialized with the same value."""


class RandomTensors(TensorSource):
    """A `TensorSource` of random weights: ones for norms, zeros for biases, normal noise for all others.

    The content of a tensor depends only on its name and shape, so all processes generate the same tensors.

    Args:
        device: Device of the tensors.
        dtype: Type of the tensors, unless a caller of `take` requests another type.
        made: Function that is called with the number of bytes of each finished tensor.
    """

    def __init__(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        made: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self._made = made

    def take_rows(
        self,
        parts: Sequence[tuple[str, TensorShape]],
        *,
        dtype: torch.dtype | None = None,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return several random tensors as one."""
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
        self._made(tensor.nbytes)


@torch.inference_mode()
def random_decoder(
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    made: Callable[[int], None] = lambda nbytes: None,
) -> Decoder:
    """Return a decoder with this configuration and random weights.

    Args:
        config: Configuration of one of the families (Llama, Mistral, Qwen …).
        device: Device of the weights.
        dtype: Type of weights and activations.
        made: Function that is called with the number of bytes of each finished tensor.
    """
    source: TensorSource = RandomTensors(device, dtype, made)
    table = (config.vocab_size, config.hidden_size)
    embedding = source.take(EMBEDDING, table)
    layers = [
        load_layer(source, config, f"model.layers.{index}.", index) for index in range(config.num_layers)
    ]
    norm = RMSNorm(source.take(FINAL_NORM, (config.hidden_size,)), config.rms_norm_eps)
    lm_head = embedding if config.tie_word_embeddings else source.take(LM_HEAD, table)
    return Decoder(config, embedding, layers, norm, lm_head, f"random {config.fingerprint}")
