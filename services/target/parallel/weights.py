"""Where the ranks of a model take their weights from: a folder that all of them can read, or random numbers that all of them agree on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.decoder import LM_HEAD, Progress
from outrider.shared.nn.dummy import RandomTensors
from outrider.shared.nn.open import CheckedSource, checked_source, read_model_config
from outrider.shared.parallel.decoder import HeadReader


class Weights(Protocol):
    """One model, as every rank finds it."""

    def config(self) -> ModelConfig:
        """Return its configuration.

        Raises:
            CheckpointError: There is none, or it cannot be served.
        """
        ...

    def open(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
    ) -> AbstractContextManager[CheckedSource]:
        """Open its whole tensors; the arguments are those of `checked_source`.

        Raises:
            CheckpointError: As `load_decoder`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Folder:
    """A model folder."""

    path: Path

    def config(self) -> ModelConfig:
        """See `Weights.config`."""
        return read_model_config(self.path)

    def open(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
    ) -> AbstractContextManager[CheckedSource]:
        """See `Weights.open`."""
        return checked_source(self.path, config, device, dtype, progress)


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A model without files, for measurements; `raw` is what its config.json would hold."""

    raw: Mapping[str, Any]

    def config(self) -> ModelConfig:
        """See `Weights.config`."""
        return ModelConfig.parse(self.raw, source="random weights")

    @contextmanager
    def open(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
    ) -> Iterator[CheckedSource]:
        """See `Weights.open`; nobody is told of progress."""
        yield CheckedSource(RandomTensors(device, dtype), f"random {config.fingerprint}")


def head_reader(
    weights: Weights, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> HeadReader:
    """Return what reads the whole output head."""

    def read() -> torch.Tensor:
        with weights.open(config, device, dtype) as checkpoint, torch.inference_mode():
            return checkpoint.source.take(LM_HEAD, (config.vocab_size, config.hidden_size))

    return read
