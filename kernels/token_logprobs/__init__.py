"""token_logprobs: log-probabilities of chosen tokens, and of the most likely tokens at the same positions."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.token_logprobs import reference
from outrider.kernels.token_logprobs.types import MAX_TOP, WORDS

__all__ = ["MAX_TOP", "WORDS", "token_logprobs"]


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, tops: torch.Tensor
) -> torch.Tensor:
    """Return the log-probabilities of one token and of the most likely tokens, for each of N results.

    The distribution is the softmax of the logits, computed in fp32. Tokens are ordered by (logit descending,
    id ascending).

    Args:
        logits: ``[M, V]`` fp32/bf16/fp16.
        rows: ``[N] int64``, the row of logits of each result.
        tokens: ``[N] int64``, the token of each result; a negative token has the log-probability 0.
        tops: ``[N] int32``, number of most likely tokens, at most `MAX_TOP`; a result with -1 is not computed
            and has undefined contents.

    Returns:
        ``[N, WORDS] int32``: the token's log-probability, the `MAX_TOP` ids of the most likely tokens, and
            their log-probabilities. Log-probabilities are stored as the bits of fp32 numbers. After the first
            `tops` ids, ids are -1.

    Raises:
        ValueError: A tensor's shape or dtype is wrong. The message names the tensor.

    Example:
        The probabilities are 1/4, 1/4 and 1/2.

        >>> import torch
        >>> from outrider.kernels.token_logprobs import token_logprobs
        >>> logits = torch.tensor([[1.0, 1.0, 2.0]]).log()
        >>> found = token_logprobs(
        ...     logits, torch.tensor([0]), torch.tensor([1]), torch.tensor([2], dtype=torch.int32)
        ... )
        >>> found[0, 1:4].tolist(), found[0, :1].view(torch.float32).exp().tolist()
        ([2, 0, -1], [0.25])
        >>> found[0, 21:23].view(torch.float32).exp().tolist()
        [0.5, 0.25]
    """
    count = rows.shape[0]
    expect("logits", logits, (None, None))
    expect("rows", rows, (count,), torch.int64)
    expect("tokens", tokens, (count,), torch.int64)
    expect("tops", tops, (count,), torch.int32)
    if use_triton(logits):
        from outrider.kernels.token_logprobs import triton as compiled

        return compiled.token_logprobs(logits, rows, tokens, tops)
    return reference.token_logprobs(logits, rows, tokens, tops)
