"""Computes log-probabilities of prompt tokens, and decodes those of prompt and output tokens on the host."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
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
    """Logprobs of the prompt tokens that one prompt chunk predicts.

    Attributes:
        sequence: The sequence of the chunk.
        residence: The sequence's residence when the chunk was enqueued.
        first: Index in the sequence of the first token with a logprob.
        logprobs: ``[n, WORDS] int32``, from `token_logprobs`.
        requested: ``[n, k] fp32``, from `requested_logprobs`: the logprobs of k tokens that the client names.
            None if the client names no tokens.
    """

    sequence: Sequence
    residence: int
    first: int
    logprobs: torch.Tensor
    requested: torch.Tensor | None = None

    @property
    def void(self) -> bool:
        """True if the sequence has left its slot since the chunk was enqueued."""
        return self.sequence.has_left(self.residence)


def score_prompts(decoder: Decoder, hidden: torch.Tensor, chunks: Seq[PrefillChunk]) -> list[ScoredPrompt]:
    """Enqueue the computation of the logprobs of those prompt tokens whose logprobs clients want.

    Args:
        decoder: The target model.
        hidden: ``[rows, hidden_size]``, the output rows of all chunks, one chunk after the other.
        chunks: The prompt chunks. The row of the token at index i predicts the token at index i + 1.
    """
    found, offset = [], 0
    for chunk in chunks:
        sequence, top = chunk.sequence, chunk.sequence.request.logprobs.prompt_top
        first = max(chunk.start + 1, sequence.prompt_scored)
        stop = min(chunk.stop + 1, sequence.prompt_len)
        if top is not None and first < stop:
            rows = hidden[offset + first - 1 - chunk.start : offset + stop - 1 - chunk.start]
            ids = sequence.request.logprobs.token_ids
            scores = _score(decoder, rows, sequence.tokens[first:stop], top, ids)
            found.append(ScoredPrompt(sequence, sequence.residence, first, *scores))
        offset += chunk.stop - chunk.start
    return found


def _score(
    decoder: Decoder, hidden: torch.Tensor, tokens: Seq[int], top: int, token_ids: Seq[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    targets = upload(tokens, torch.int64, hidden.device)
    parts, requested = [], []
    for first in range(0, len(tokens), ROWS):
        part = targets[first : first + ROWS]
        rows = torch.arange(len(part), device=hidden.device)
        tops = torch.full((len(part),), top, dtype=torch.int32, device=hidden.device)
        logits = decoder.logits(hidden[first : first + ROWS].contiguous())
        parts.append(token_logprobs(logits, rows, part, tops))
        if token_ids:
            requested.append(requested_logprobs(logits, token_ids))
    return torch.cat(parts), torch.cat(requested) if requested else None


def requested_logprobs(logits: torch.Tensor, token_ids: Seq[int]) -> torch.Tensor:
    """Return the logprobs of tokens that a client has named, ``[rows, len(token_ids)] fp32``.

    Args:
        logits: ``[rows, V]``, the logits of V tokens. The distribution is their softmax, computed in fp32.
        token_ids: The tokens that the client has named.
    """
    exact = logits.float()
    return exact[:, upload(token_ids, torch.int64, logits.device)] - exact.logsumexp(-1, keepdim=True)


def unpack_logprobs(
    rows: torch.Tensor, top: int, requested: torch.Tensor | None = None
) -> list[TokenLogprob]:
    """Return the logprobs of the tokens of some rows, unpacked from the format that the device writes.

    Args:
        rows: ``[n, WORDS] int32`` in host memory, from `token_logprobs`.
        top: Number of alternative tokens that the client wants.
        requested: ``[n, k] fp32`` in host memory, the logprobs of the tokens that the client has named. None
            if the client has named none.
    """
    # Views of arrays take a fraction of the time of views of tensors.
    words = rows.numpy()
    numbers = words.view(np.float32)
    ids = words[:, 1 : 1 + top].tolist()
    logprobs = numbers[:, 1 + MAX_TOP : 1 + MAX_TOP + top].tolist()
    named = [()] * len(ids) if requested is None else requested.tolist()
    found = [
        TokenLogprob(*of_token) for of_token in zip(numbers[:, 0].tolist(), ids, logprobs, named, strict=True)
    ]
    for one in found:
        if top and one.top_ids[-1] < 0:  # fewer than `top` tokens have a probability
            count = one.top_ids.index(-1)
            one.top_ids, one.top_logprobs = one.top_ids[:count], one.top_logprobs[:count]
    return found
