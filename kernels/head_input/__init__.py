"""head_input: gathers, norms and concatenates embeddings and features for a recurrent head's first layer."""

from __future__ import annotations

from enum import Enum

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.head_input import reference

__all__ = ["Residual", "feature_input", "head_input"]


class Residual(Enum):
    """Choice of the residual around the first layer.

    Attributes:
        FEATURE: The feature itself.
        NORMED_FEATURE: The feature after `feature_norm`.
    """

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
    """Return the input of a draft head, ``[embedding_norm(embedding[token]) ; feature_norm(feature)]``.

    Also return the residual of the head's first layer. The RMS norms are computed in fp32.

    Args:
        tokens: ``[n] int32``, each below V.
        embedding: ``[V, hidden]``, contiguous.
        features: ``[m, hidden]`` of any float dtype, the last dimension dense.
        rows: ``[n] int32``, index of each row's feature. With None, ``m = n``, and row i uses feature i.
        embedding_norm: ``[hidden]`` weight of the norm, or None to leave the embedding as it is.
        feature_norm: ``[hidden]`` weight of the norm, or None to leave the feature as it is.
        eps: Epsilon of the norms, added to the mean square.
        residual: Which tensor to return as the residual.

    Returns:
        The concatenation ``[n, 2 * hidden]`` and the residual ``[n, hidden]``, in the dtype of `embedding`.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.head_input import head_input
        >>> embedding = torch.tensor([[2.0, 2.0], [4.0, -4.0]])
        >>> features = torch.tensor([[8.0, 8.0]])
        >>> tokens, rows = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32)
        >>> pair, residual = head_input(tokens, embedding, features, rows, torch.ones(2), None, 0.0)
        >>> pair
        tensor([[ 1., -1.,  8.,  8.],
                [ 1.,  1.,  8.,  8.]])
        >>> residual
        tensor([[8., 8.],
                [8., 8.]])
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
        tokens, embedding, features, rows, embedding_norm, feature_norm, eps,
        residual is Residual.NORMED_FEATURE
    )  # fmt: skip


def feature_input(
    features: torch.Tensor,
    rows: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    residual: Residual = Residual.FEATURE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features of a draft head's input after an RMS norm, and the residual.

    This op is for a first layer whose products with the token embeddings are computed beforehand.

    Args:
        features: ``[m, hidden]`` of any float dtype, the last dimension dense.
        rows: ``[n] int32``, index of each row's feature. With None, ``n = m``, and row i uses feature i.
        norm: ``[hidden]`` weight.
        eps: Epsilon of the norm, added to the mean square.
        residual: Which tensor to return as the residual.

    Returns:
        The normed features and the residual, both ``[n, hidden]`` in the dtype of `norm`.

    Raises:
        ValueError: A tensor's shape or dtype is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.head_input import feature_input
        >>> features = torch.tensor([[8.0, 8.0], [2.0, -2.0]])
        >>> normed, residual = feature_input(features, None, torch.tensor([1.0, 5.0]), 0.0)
        >>> normed
        tensor([[ 1.,  5.],
                [ 1., -5.]])
        >>> residual
        tensor([[ 8.,  8.],
                [ 2., -2.]])
    """
    expect("features", features, (None, None))
    expect("norm", norm, (features.shape[1],))
    if rows is not None:
        expect("rows", rows, (None,), torch.int32)
    if use_triton(features):
        from outrider.kernels.head_input import triton as compiled

        return compiled.feature_input(features, rows, norm, eps, residual is Residual.NORMED_FEATURE)
    return reference.feature_input(features, rows, norm, eps, residual is Residual.NORMED_FEATURE)
