"""head_input: what the first layer of a recurrent head reads: embeddings and features gathered, normed and put side by side."""

from __future__ import annotations

from enum import Enum

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.head_input import reference

__all__ = ["Residual", "feature_input", "head_input"]


class Residual(Enum):
    """What goes round the first layer."""

    FEATURE = 0
    NORMED_FEATURE = 1


def head_input(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    features: torch.Tensor,
    rows: torch.Tensor | None,
    embedding_norm: torch.Tensor | None,
    feature_norm: torch.Tensor | None,
    eps: float,
    residual: Residual = Residual.FEATURE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[embedding_norm(embedding[token]) ; feature_norm(feature)]`` and the residual, RMS norms in fp32.

    Args:
        tokens: ``[n] int32``, below V.
        embedding: ``[V, hidden]``, contiguous.
        features: ``[m, hidden]`` of any float dtype, the last dimension dense.
        rows: ``[n] int32``, which feature each row takes; None: ``m = n``, each its own.
        embedding_norm, feature_norm: ``[hidden]`` weights, or None to leave that half as it is.
        eps: Of the norms.
        residual: Which.

    Returns:
        ``[n, 2 * hidden]`` and ``[n, hidden]``, in the dtype of `embedding`.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong; the message names it.
    """
    count, hidden = tokens.shape[0], embedding.shape[1]
    expect("tokens", tokens, (count,), torch.int32)
    expect("embedding", embedding, (None, hidden))
    expect_contiguous("embedding", embedding)
    expect("features", features, (None if rows is not None else count, hidden))
    if rows is not None:
        expect("rows", rows, (count,), torch.int32)
    for name, weight in (("embedding_norm", embedding_norm), ("feature_norm", feature_norm)):
        if weight is not None:
            expect(name, weight, (hidden,))
    if use_triton(tokens):
        from outrider.kernels.head_input import triton as compiled

        normed = residual is Residual.NORMED_FEATURE
        return compiled.head_input(
            tokens, embedding, features, rows, embedding_norm, feature_norm, eps, normed
        )
    return reference.head_input(
        tokens, embedding, features, rows, embedding_norm, feature_norm, eps, residual is Residual.NORMED_FEATURE
    )  # fmt: skip


def feature_input(
    features: torch.Tensor,
    rows: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    residual: Residual = Residual.FEATURE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``norm(feature)`` and the residual: what a first layer reads whose products with the embeddings are known beforehand.

    Args:
        features: ``[m, hidden]`` of any float dtype, the last dimension dense.
        rows: ``[n] int32``, which feature each row takes; None: ``n = m``, each its own.
        norm: ``[hidden]``.
        eps: Of the norm.
        residual: Which.

    Returns:
        ``[n, hidden]`` both, in the dtype of `norm`.

    Raises:
        ValueError: A tensor's shape or dtype is wrong; the message names it.
    """
    expect("features", features, (None, None))
    expect("norm", norm, (features.shape[1],))
    if rows is not None:
        expect("rows", rows, (None,), torch.int32)
    if use_triton(features):
        from outrider.kernels.head_input import triton as compiled

        return compiled.feature_input(features, rows, norm, eps, residual is Residual.NORMED_FEATURE)
    return reference.feature_input(features, rows, norm, eps, residual is Residual.NORMED_FEATURE)
