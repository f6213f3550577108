"""Where the ranks of a model take their weights from: a folder that all of them can read, or random numbers that all of them agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from outrider.shared.nn.config import ModelConfig
from outrider.shared.nn.decoder import LM_HEAD, Progress
from outrider.shared.nn.dummy import RandomTensors
from outrider.shared.parallel.collectives import Collectives
from outrider.shared.parallel.decoder import HeadReader, ShardedDecoder, build_rank, head_reader, load_rank
from outrider.shared.parallel.reduce import Reduce
from outrider.shared.parallel.shard import Shard


class Weights(Protocol):
    """One model, as every rank finds it."""

    def config(self) -> ModelConfig:
        """Return its configuration.

        Raises:
            CheckpointError: There is none, or it cannot be served.
        """
        ...

    def load(
        self,
        kind: type[ShardedDecoder],
        shard: Shard,
        collectives: Collectives,
        reduce: Reduce,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None,
    ) -> ShardedDecoder:
        """Load a rank's share.

        Raises:
            CheckpointError: As `Decoder.load`.
        """
        ...

    def head_reader(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> HeadReader:
        """Return what reads the whole output head."""
        ...


@dataclass(frozen=True, slots=True)
class Folder:
    """A model folder."""

    path: Path

    def config(self) -> ModelConfig:
        """See `Weights.config`."""
        return ModelConfig.from_dir(self.path)

    def load(
        self,
        kind: type[ShardedDecoder],
        shard: Shard,
        collectives: Collectives,
        reduce: Reduce,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None,
    ) -> ShardedDecoder:
        """See `Weights.load`."""
        return load_rank(kind, self.path, shard, collectives, reduce, device, dtype, progress)

    def head_reader(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> HeadReader:
        """See `Weights.head_reader`."""
        return head_reader(self.path, config, device, dtype)


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A model without files, for measurements; `raw` is what its config.json would hold."""

    raw: Mapping[str, Any]

    def config(self) -> ModelConfig:
        """See `Weights.config`."""
        return ModelConfig.parse(self.raw, source="random weights")

    def load(
        self,
        kind: type[ShardedDecoder],
        shard: Shard,
        collectives: Collectives,
        reduce: Reduce,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None,
    ) -> ShardedDecoder:
        """See `Weights.load`."""
        return build_rank(kind, RandomTensors(device, dtype), f"random {shard.config.fingerprint}", shard, collectives, reduce)

    def head_reader(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> HeadReader:
        """See `Weights.head_reader`."""
        return lambda: RandomTensors(device, dtype).take(LM_HEAD, (config.vocab_size, config.hidden_size))
