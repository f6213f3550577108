"""Computes log-probabilities of prompt tokens, and decodes those of prompt and output tokens on the host."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from outrider.kernels.token_logprobs import MAX_TOP, token_logprobs
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.logit_rules import TokenLogprob
from outrider.shared.kv.upload import upload
from outrider.shared.nn.decoder import Decoder

ROWS = 128
"""Number of prompt rows whose logits are in memory together. Logits of more rows would need gigabytes."""


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Logprobs of the prompt tokens of one chunk.

    Attributes:
        sequence: The sequence.
        residence: The sequence's residence when the chunk was enqueued.
        first: Index of the first token.
        logprobs: ``[n, WORDS] int32``, from `token_logprobs`.
    """

    sequence: Sequence
    residence: int
    first: int
    logprobs: torch.Tensor

    @property
    def void(self) -> bool:
        """True if the sequence has left its slot since the chunk was enqueued."""
        return self.sequence.residence != self.residence or self.sequence.slot < 0


def score_prompts(decoder: Decoder, hidden: torch.Tensor, chunks: Seq[PrefillChunk]) -> list[ScoredPrompt]:
    """Enqueue the computation of the logprobs that clients want of prompt tokens that these chunks predict.

    Args:
        decoder: The model.
        hidden: ``[rows, hidden_size]``, the output rows of all chunks, one chunk after the other.
        chunks: The chunks. The row of the token at index i predicts the token at index i + 1.
    """
    found, offset = [], 0
    for chunk in chunks:
        sequence, top = chunk.sequence, chunk.sequence.request.logprobs.prompt_top
        first = max(chunk.start + 1, sequence.prompt_scored)
        stop = min(chunk.stop + 1, sequence.prompt_len)
        if top is not None and first < stop:
            rows = hidden[offset + first - 1 - chunk.start : offset + stop - 1 - chunk.start]
            logprobs = _score(decoder, rows, sequence.tokens[first:stop], top)
            found.append(ScoredPrompt(sequence, sequence.residence, first, logprobs))
        offset += chunk.stop - chunk.start
    return found


def _score(decoder: Decoder, hidden: torch.Tensor, tokens: Seq[int], top: int) -> torch.Tensor:
    targets = upload(tokens, torch.int64, hidden.device)
    parts = []
    for first in range(0, len(tokens), ROWS):
        part = targets[first : first + ROWS]
        rows = torch.arange(len(part), device=hidden.device)
        tops = torch.full((len(part),), top, dtype=torch.int32, device=hidden.device)
        logits = decoder.logits(hidden[first : first + ROWS].contiguous())
        parts.append(token_logprobs(logits, rows, part, tops))
    return torch.cat(parts)


def unpack_logprobs(rows: torch.Tensor, top: int) -> list[TokenLogprob]:
    """Return the logprobs of the tokens of some rows.

    Args:
        rows: ``[n, WORDS] int32`` in host memory, from `token_logprobs`.
        top: Number of alternatives that the client wants.
    """
    own = rows[:, 0].contiguous().view(torch.float32).tolist()
    if not top:
        return [TokenLogprob(logprob) for logprob in own]
    ids = rows[:, 1 : 1 + top].tolist()
    logprobs = rows[:, 1 + MAX_TOP : 1 + MAX_TOP + top].contiguous().view(torch.float32).tolist()
    return [
        TokenLogprob(logprob, tuple(pair for pair in zip(*pairs, strict=True) if pair[0] >= 0))
        for logprob, *pairs in zip(own, ids, logprobs, strict=True)
    ]
