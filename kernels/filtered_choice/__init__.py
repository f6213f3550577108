"""filtered_choice: the token of rows with top-k, top-p or min-p, without sorting a vocabulary.

What the filters keep of a row is the beginning of its tokens in the order (score descending, id ascending): the first k, the shortest
beginning whose probability reaches p, those of at least min_p times the best one's. So it is told by one score and how many of the tokens
with exactly that score stay, the lowest ids first; and that score is found by narrowing: every pass over the row sums up what lies above
16 scores, and the range between two of them is searched by the next pass, four bits of the score at a time.
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
    """Find what top-k and top-p keep of each row, as `choose_tokens` says; min-p is a bound of its own on every token.

    Args:
        logits: ``[rows, V]`` fp32/bf16/fp16.
        sampling: One entry per row; rows of temperature 0 keep everything.

    Returns:
        Where each row's beginning ends. Of a probability that reaches p to within rounding either side may be right.

    Raises:
        ValueError: A tensor's shape or dtype is wrong; the message names it.
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
