"""Copies states of tokens from forward passes: hidden states, routed experts, and logprobs of named tokens.

This work happens only after passes that have a sequence whose client requests such data. The passes may be
CUDA graphs, whose results are still in memory, so other sequences of these passes lose little time.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.model.scores import requested_logprobs
from outrider.services.target.model.verify_pass import PassResult
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.token_states import TokenStates
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.layers.experts import SparseMLP
from outrider.shared.nn.layers.routes import stack_routes


def sparse_layers(decoder: Decoder) -> tuple[int, ...]:
    """Return the indices of the layers whose routed experts can be recorded."""
    mlps = [getattr(layer.mlp, "inner", layer.mlp) for layer in getattr(decoder, "layers", ())]
    return tuple(index for index, mlp in enumerate(mlps) if isinstance(mlp, SparseMLP))


def stacked(decoder: Decoder, routes: Seq[torch.Tensor]) -> torch.Tensor | None:
    """Return the experts of a pass, ``[rows, layers, top_k] int32``. None if none were recorded."""
    if not routes:
        return None
    return stack_routes(routes, sparse_layers(decoder), decoder.config.num_layers)


@dataclass(frozen=True, slots=True)
class StateRows:
    """The states of the tokens of some rows, in host memory once the pass has ended. Unwanted data is None.

    Attributes:
        hidden: Hidden states, ``[n, hidden_size]``, in the data type of the model.
        experts: Indices of the experts that each layer's router has chosen, ``[n, layers, top_k] int32``.
    """

    hidden: torch.Tensor | None
    experts: torch.Tensor | None

    @classmethod
    def take(
        cls,
        sequence: Sequence,
        hidden: torch.Tensor,
        experts: torch.Tensor | None,
        rows: torch.Tensor | slice,
    ) -> StateRows:
        """Enqueue the copy of those states of some rows of a pass that a client wants."""
        wanted = sequence.request.states
        return cls(
            to_host(hidden[rows]) if wanted.hidden_states else None,
            to_host(experts[rows]) if wanted.routed_experts and experts is not None else None,
        )

    def of_tokens(self, first: int, start: int, stop: int) -> TokenStates:
        """Return the states of the tokens of rows ``[start, stop)``. The copy to the host must have ended.

        Args:
            first: Index in the sequence of the token of row `start`.
            start: First row.
            stop: Row after the last one.
        """
        hidden, experts = self.hidden, self.experts
        return TokenStates(
            first,
            stop - start,
            b"" if hidden is None else hidden[start:stop].float().numpy().astype("<f4").tobytes(),
            b"" if experts is None else experts[start:stop].numpy().astype("<i4").tobytes(),
        )


@dataclass(frozen=True, slots=True)
class PromptStates:
    """States of the tokens of one prompt chunk: hidden states and routed experts.

    Attributes:
        sequence: The sequence of the chunk.
        residence: The sequence's residence when the chunk was enqueued.
        first: Index in the sequence of the first token.
        count: Number of tokens.
        rows: The states, one row per token.
    """

    sequence: Sequence
    residence: int
    first: int
    count: int
    rows: StateRows

    @property
    def void(self) -> bool:
        """True if the sequence has left its slot since the chunk was enqueued."""
        return self.sequence.has_left(self.residence)

    def parts(self, first: int, most_bytes: int) -> Iterator[TokenStates]:
        """Yield the states from token `first` on, in parts of at most `most_bytes` bytes or of one token."""
        at = first
        while at < self.first + self.count:
            one = self.rows.of_tokens(at, at - self.first, at - self.first + 1)
            stop = min(self.first + self.count, at + max(1, most_bytes // max(1, one.nbytes)))
            yield self.rows.of_tokens(at, at - self.first, stop - self.first)
            at = stop


def take_prompts(
    hidden: torch.Tensor, experts: torch.Tensor | None, chunks: Seq[PrefillChunk]
) -> list[PromptStates]:
    """Enqueue copies to the host of those token states of prompt chunks that clients want.

    Args:
        hidden: ``[rows, hidden_size]``, the output rows of all chunks, one chunk after the other.
        experts: ``[rows, layers, top_k] int32``, the routers' choices. None if no client wants them.
        chunks: The prompt chunks.
    """
    found, offset = [], 0
    for chunk in chunks:
        sequence, first = chunk.sequence, max(chunk.start, chunk.sequence.states_len)
        if sequence.request.states.wanted and first < chunk.stop:
            rows = slice(offset + first - chunk.start, offset + chunk.stop - chunk.start)
            taken = StateRows.take(sequence, hidden, experts, rows)
            found.append(PromptStates(sequence, sequence.residence, first, chunk.stop - first, taken))
        offset += chunk.stop - chunk.start
    return found


class AcceptedPathTap:
    """Copies data of a round's accepted paths to the host: token states, and logprobs of named tokens.

    Args:
        entries: The entries of the round.
        starts: Index of the first packed row of each entry.
    """

    def __init__(self, entries: Seq[Entry], starts: Seq[int]) -> None:
        self._entries = [
            (index, start, entry)
            for index, (entry, start) in enumerate(zip(entries, starts, strict=True))
            if entry.sequence.tapped
        ]
        self._states: dict[int, StateRows] = {}
        self._requested: dict[int, torch.Tensor] = {}

    @classmethod
    def of(cls, entries: Seq[Entry], starts: Seq[int]) -> AcceptedPathTap | None:
        """Return the tap of a round, or None if no client wants such data."""
        return cls(entries, starts) if any(entry.sequence.tapped for entry in entries) else None

    def take(self, decoder: Decoder, result: PassResult) -> None:
        """Enqueue the copies to the host, just after the verify pass of the round.

        Args:
            decoder: The target model.
            result: The result of the verify pass, which had the sampling mode `FULL`.
        """
        assert result.rows is not None, "the sampling mode was not FULL"
        assert result.logits is not None
        wanted = any(entry.sequence.request.states.routed_experts for _, _, entry in self._entries)
        experts = stacked(decoder, result.routes) if wanted else None
        for index, start, entry in self._entries:
            request = entry.sequence.request
            # Row c of an entry is the one from which its token c was chosen.
            rows = result.rows[start : start + entry.columns].long()
            if request.states.wanted:
                self._states[index] = StateRows.take(entry.sequence, result.hidden, experts, rows)
            if request.logprobs.token_ids and request.logprobs.top is not None:
                logprobs = requested_logprobs(result.logits[rows], request.logprobs.token_ids)
                self._requested[index] = to_host(logprobs)

    def states_of(self, index: int, first: int, count: int) -> TokenStates | None:
        """Return the states of the rows from which the first `count` tokens of an entry were chosen.

        Args:
            index: Index of the entry in the round.
            first: Index of the entry's root in its sequence.
            count: Number of tokens that the sequence keeps.
        """
        rows = self._states.get(index)
        return rows.of_tokens(first, 0, count) if rows is not None and count else None

    def requested_of(self, index: int, count: int) -> torch.Tensor | None:
        """Return the logprobs of named tokens at the first `count` tokens of an entry, or None."""
        found = self._requested.get(index)
        return None if found is None else found[:count]


def to_host(values: torch.Tensor) -> torch.Tensor:
    """Enqueue the copy of a tensor to pinned host memory. On a CPU, return the tensor."""
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
