"""Sources of the weights of a tensor-parallel model: a folder that all ranks read, or random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.decoder import LM_HEAD, OnProgress
from outrider.shared.nn.dummy import RandomTensors
from outrider.shared.nn.open import CheckedSource, checked_source, read_model_config
from outrider.shared.parallel.decoder import HeadReader


class Weights(Protocol):
    """A source of one model's weights that every rank can open."""

    def config(self) -> ModelConfig:
        """Return the model's configuration.

        Raises:
            CheckpointError: The configuration is missing or unsupported.
        """
        ...

    def open(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        progress: OnProgress | None = None,
    ) -> AbstractContextManager[CheckedSource]:
        """Open the whole, unsharded tensors. The arguments are those of `checked_source`.

        Raises:
            CheckpointError: The tensors are missing or invalid; see `load_decoder`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Folder(Weights):
    """The weights in a model folder."""

    path: Path

    def config(self) -> ModelConfig:
        return read_model_config(self.path)

    def open(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        progress: OnProgress | None = None,
    ) -> AbstractContextManager[CheckedSource]:
        return checked_source(self.path, config, device, dtype, progress)


@dataclass(frozen=True, slots=True)
class RandomWeights(Weights):
    """A model with random weights and no files, for measurements.

    Attributes:
        raw: The content of config.json, as a model folder would contain it.
    """

    raw: Mapping[str, Any]

    def config(self) -> ModelConfig:
        return ModelConfig.parse(self.raw, source="random weights")

    @contextmanager
    def open(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        progress: OnProgress | None = None,
    ) -> Iterator[CheckedSource]:
        # Nothing is loaded, so `progress` is not called.
        yield CheckedSource(RandomTensors(device, dtype), f"random {config.fingerprint}")


def head_reader(
    weights: Weights, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> HeadReader:
    """Return a function that reads the whole output head."""

    def read() -> torch.Tensor:
        with weights.open(config, device, dtype) as checkpoint, torch.inference_mode():
            return checkpoint.source.take(LM_HEAD, (config.vocab_size, config.hidden_size))

    return read
