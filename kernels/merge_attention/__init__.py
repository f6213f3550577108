"""merge_attention: combines attention over two disjoint sets of tokens into attention over their union."""

from __future__ import annotations

import torch

from outrider.kernels import _launch
from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.merge_attention import reference

__all__ = ["merge_attention"]


def merge_attention(
    first: torch.Tensor,
    first_lse: torch.Tensor,
    second: torch.Tensor,
    second_lse: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two results of attention in fp32, weighted by the log-sum-exp of their scores.

    The two results belong to the same queries and to disjoint sets of tokens. Except for rounding, the merged
    result is exactly the attention over both sets together.

    A log-sum-exp of -inf means that a query saw no token of a set. The result for that set is ignored, even
    if it is NaN. If both log-sum-exps are -inf, the merged result is zero.

    Args:
        first, second: ``[rows, heads, dim]`` fp32/bf16/fp16, not necessarily of the same dtype; any strides
            with a dense last dimension.
        first_lse, second_lse: ``[rows, heads] fp32``, natural logarithms; any strides.
        out: ``[rows, heads, dim]`` fp32/bf16/fp16 with a dense last dimension; may be `first` or `second`.
            Allocated in fp32 if None.
        out_lse: ``[rows, heads] fp32``; may be `first_lse` or `second_lse`. Allocated if None.

    Returns:
        `out` and `out_lse`.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        The first set has one token with value 1, the second has three tokens with value 5. All scores are 0.

        >>> import torch
        >>> from outrider.kernels.merge_attention import merge_attention
        >>> first, second = torch.tensor([[[1.0]]]), torch.tensor([[[5.0]]])
        >>> out, lse = merge_attention(first, torch.zeros(1, 1), second, torch.full((1, 1), 3.0).log())
        >>> out.flatten().round(decimals=3), lse.exp().flatten().round(decimals=3)
        (tensor([4.]), tensor([4.]))
    """
    rows, heads, dim = first.shape
    expect("second", second, (rows, heads, dim))
    expect("first_lse", first_lse, (rows, heads), torch.float32)
    expect("second_lse", second_lse, (rows, heads), torch.float32)
    if out is None:
        out = _launch.empty((rows, heads, dim), torch.float32, first.device)
    if out_lse is None:
        out_lse = _launch.empty((rows, heads), torch.float32, first.device)
    expect("out", out, (rows, heads, dim))
    expect("out_lse", out_lse, (rows, heads), torch.float32)
    for name, tensor in (("first", first), ("second", second), ("out", out)):
        if dim > 1 and tensor.stride(2) != 1:
            raise ValueError(f"{name} must have a dense last dimension; its strides are {tensor.stride()}")
    version = reference.merge_attention
    if use_triton(first):
        from outrider.kernels.merge_attention import triton as compiled

        version = compiled.merge_attention
    version(first, first_lse, second, second_lse, out, out_lse)
    return out, out_lse
