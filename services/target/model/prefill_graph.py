"""Replays CUDA graphs for short prompts, whose many small kernels take longer to launch than to run.

Prompts are padded to a few sizes, and each size is recorded once. Longer prompts are not recorded, because
their kernels run longer than they take to launch. Several prompts together run as one unrecorded pass.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from outrider.kernels.verify import SamplingTensors
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.packed_batch import SamplingMode
from outrider.services.target.model.verify_pass import StepModel
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.shared.attn.padded import PaddedRows
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.engine.recorded_rows import RecordedRows

_UNRECORDED = (SamplingMode.FILTERED, SamplingMode.FULL)
LONGEST_CONTEXT = 1024
"""Number of context tokens that the page table covers. Attention is always planned for this length."""
_EXTRA_WORDS = 8
"""int32 words: two each for seed, position and feature-slot mask, one each for temperature and choice."""


class PrefillGraph(RecordedRows["_Inputs"]):
    """Runs single prompt chunks through graphs. Engine thread only, under inference mode.

    Args:
        model: Returns the model to run, with or without feature rows.
        graphs: Records and replays the passes.
        sizes: Numbers of rows of the recorded passes, ascending.
    """

    def __init__(self, model: Callable[[bool], StepModel], graphs: GraphCache, sizes: Seq[int]) -> None:
        super().__init__(graphs, sizes)
        self._model = model

    def takes(self, chunks: Seq[PrefillChunk]) -> bool:
        """Return True if one pass over these chunks has a graph."""
        if len(chunks) != 1 or SamplingMode.of([chunks[0].sequence]) in _UNRECORDED:
            return False
        if chunks[0].sequence.request.logprobs.prompt_top is not None:
            return False
        return self._takes(chunks[0].start, chunks[0].stop - chunks[0].start)

    def run(self, chunk: PrefillChunk, features: bool) -> torch.Tensor:
        """Enqueue a chunk that `takes` accepts. Store its K/V and, if `features` is True, its feature rows.

        Returns:
            A copy of the token after the chunk, ``[1] int64``. This token is valid only for the last chunk of
            a prompt.
        """
        size = self._size_for(chunk.stop - chunk.start)
        self._at(size).load(chunk, features)
        chosen: torch.Tensor = self._run(size)
        return chosen.clone()

    def capture(self, size: int) -> None:
        """Record the pass of one size before the first request."""
        self._record(size)

    def _key(self, size: int) -> GraphKey:
        return GraphKey("prefill", size, draft_dependent=self._model(True).projector is not None)

    def _make_inputs(self, size: int) -> _Inputs:
        return _Inputs(size, self._model(False))

    def _pass(self, inputs: _Inputs) -> torch.Tensor:
        return inputs.step(self._model(True))


class _Inputs:
    """The inputs of the pass of one size."""

    def __init__(self, size: int, model: StepModel) -> None:
        pool = model.pool
        self.rows = PaddedRows(size, -(-LONGEST_CONTEXT // pool.page_size), pool, _EXTRA_WORDS)
        seed, position, hidden_slots, temperature, choice = self.rows.extra.split_with_sizes([2, 2, 2, 1, 1])
        self._position = position.view(torch.int64)
        self._hidden_slots = hidden_slots.view(torch.int64)
        with torch.inference_mode(False):
            off, one = (
                torch.zeros(1, dtype=torch.int32, device=pool.device),
                torch.ones(1, device=pool.device),
            )
        self._sampling = SamplingTensors(
            temperature=temperature.view(torch.float32),
            top_k=off,
            top_p=one,
            min_p=off.view(torch.float32),
            seeds=seed.view(torch.int64),
            choices=choice,
            all_greedy=False,
            any_filter=False,
        )

    def load(self, chunk: PrefillChunk, features: bool) -> None:
        """Upload the inputs of a chunk."""
        sequence = chunk.sequence
        assert sequence.lease is not None
        params, extra = sequence.request.sampling, np.zeros(_EXTRA_WORDS, dtype=np.int32)
        extra[:2].view(np.uint64)[0] = params.seed
        extra[2:6].view(np.int64)[:] = sequence.committed_len, 0 if features else -1
        extra[6:7].view(np.float32)[0] = params.temperature
        extra[7] = params.choice_index
        self.rows.load(sequence.lease, sequence.tokens[chunk.start : chunk.stop], chunk.start, extra)

    def step(self, model: StepModel) -> torch.Tensor:
        """Run the pass and return the token after the last row, ``[1] int64``."""
        rows, projector = self.rows, model.projector
        model.attention.plan(rows.batch)
        aux_layer_ids = tuple(projector.spec.aux_layer_ids) if projector else ()
        output = model.decoder.forward(
            rows.tokens, rows.positions, model.attention, model.pool, aux_layer_ids
        )
        if projector is not None:
            # The mask is 0 or -1. A mask of 0 keeps the KV slots. A mask of -1 makes each of them -1, so that
            # no features are stored.
            model.pool.store_some_features(projector(output), rows.batch.slots | self._hidden_slots)
        return model.decoder.choose(output.hidden[-1:], self._sampling, self._position)
