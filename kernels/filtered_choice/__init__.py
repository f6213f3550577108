"""filtered_choice: applies top-k, top-p and min-p on a GPU, with a search instead of a sort.

The Triton version of `verify.choose_tokens` runs this search if a row with temperature above 0 has a filter.
`kernels/verify/triton.py` explains when filters are applied by sorting instead.

Order the tokens of a row by (score descending, id ascending). Each filter keeps a prefix of that order:

- top-k keeps the first k tokens.
- top-p keeps the shortest prefix whose probability reaches p.
- min-p keeps the tokens with at least min_p times the probability of the best token.

Two numbers describe a prefix: the score of its last token, and the number of kept tokens with exactly that
score. Of several tokens with that score, those with the lowest ids are kept.

The search finds the score in several passes over the row. Each pass compares the row's tokens with 16
scores. For each of these scores, the pass counts the tokens at or above the score, or sums their weights. The
next pass searches the range between two of these scores. Each pass thus determines four bits of the score.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.filtered_choice import reference
from outrider.kernels.filtered_choice.types import Kept
from outrider.kernels.verify.types import SamplingTensors

__all__ = ["Kept", "kept_tokens"]


def kept_tokens(logits: torch.Tensor, sampling: SamplingTensors) -> Kept:
    """Find the prefix of tokens that top-k and top-p keep in each row, as defined by `verify.choose_tokens`.

    Min-p is not included, because each token can be tested against min_p on its own.

    Args:
        logits: ``[rows, V]`` fp32/bf16/fp16.
        sampling: Sampling parameters, one entry per row; rows with temperature 0 keep all tokens.

    Returns:
        The end of each row's prefix. If a prefix reaches p only within rounding, its last token may or may
        not be included.

    Raises:
        ValueError: A tensor's shape or dtype is wrong. The message names the tensor.

    Example:
        Tokens 1 and 3 share the best score. If k is 1, top-k keeps token 1, which has the lower id. If k is
        3, top-k keeps tokens 1, 2 and 3.

        >>> import torch
        >>> from outrider.kernels.filtered_choice import kept_tokens
        >>> from outrider.kernels.filtered_choice.reference import token_keys
        >>> from outrider.kernels.verify import SamplingTensors
        >>> logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]]).repeat(2, 1)
        >>> sampling = SamplingTensors(
        ...     temperature=torch.ones(2),
        ...     top_k=torch.tensor([1, 3], dtype=torch.int32),
        ...     top_p=torch.ones(2),
        ...     min_p=torch.zeros(2),
        ...     seeds=torch.zeros(2, dtype=torch.int64),
        ...     choices=torch.zeros(2, dtype=torch.int32),
        ...     all_greedy=False,
        ...     any_filter=True,
        ... )
        >>> kept_tokens(logits, sampling).mask(token_keys(logits, sampling.temperature))
        tensor([[False,  True, False, False],
                [False,  True,  True,  True]])
    """
    rows = logits.shape[0]
    expect("logits", logits, (rows, None))
    expect("sampling.temperature", sampling.temperature, (rows,), torch.float32)
    expect("sampling.top_k", sampling.top_k, (rows,), torch.int32)
    expect("sampling.top_p", sampling.top_p, (rows,), torch.float32)
    if use_triton(logits):
        from outrider.kernels.filtered_choice import triton as compiled

        return compiled.kept_tokens(logits, sampling)
    return reference.kept_tokens(logits, sampling)
