"""Sampling parameters of a batch as tensors, one row per tree node, cached by sequences and row counts."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outrider.kernels.verify import SamplingTensors
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.kv.upload import upload
from outrider.shared.spec.seeds import signed_seed

MAX_CACHED_BATCHES = 64


class SamplingBatches:
    """Builds and caches `SamplingTensors`. A batch with known sequences and row counts costs one lookup."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cache: dict[tuple[tuple[int, int], ...] | int, SamplingTensors] = {}

    def rows(self, sequences: Seq[Sequence], counts: Seq[int]) -> SamplingTensors:
        """Return ``[sum(counts)]`` rows: the parameters of sequence i repeated ``counts[i]`` times."""
        greedy = all(sequence.request.sampling.temperature == 0 for sequence in sequences)
        key: tuple[tuple[int, int], ...] | int = (
            sum(counts)
            if greedy
            else tuple(
                (sequence.session_id, count) for sequence, count in zip(sequences, counts, strict=True)
            )
        )
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= MAX_CACHED_BATCHES:
                self._cache.clear()
            found = self._cache[key] = self._build(sequences, counts)
        return found

    def _build(self, sequences: Seq[Sequence], counts: Seq[int]) -> SamplingTensors:
        params = [
            sequence.request.sampling
            for sequence, count in zip(sequences, counts, strict=True)
            for _ in range(count)
        ]

        def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
            return upload(values, dtype, self._device)

        return SamplingTensors(
            temperature=column([row.temperature for row in params], torch.float32),
            top_k=column([row.top_k for row in params], torch.int32),
            top_p=column([row.top_p for row in params], torch.float32),
            min_p=column([row.min_p for row in params], torch.float32),
            seeds=column([signed_seed(row.seed) for row in params], torch.int64),
            choices=column([row.choice_index for row in params], torch.int32),
            all_greedy=all(row.temperature == 0 for row in params),
            any_filter=any(
                row.temperature > 0 and (row.top_k > 0 or row.top_p < 1 or row.min_p > 0) for row in params
            ),
        )
