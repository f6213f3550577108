"""What a first layer's q-k-v product makes of the embeddings, for every token beforehand.

An EAGLE-3 head's first product reads the pair [norm(embedding of the token) ; norm(feature)]. Its share of the embedding depends on the
token alone, so it is a table: ``table[token] = Wqkv[:, :hidden] @ norm(embedding[token])``, and the product of a pass reads half of its
weight. A pass over few rows is bound by reading weights: of a layer of Llama-3.1-8B's shape and its draft vocabulary that is 7 % less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.shared.nn.layers.blocks import Attention, RMSNorm
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.nn.layers.token_products import token_products


@dataclass(frozen=True, slots=True)
class EmbeddedTokens:
    """A first layer's attention without its share of the embedding, and that share.

    Attributes:
        attention: Its q-k-v product is of the feature alone.
        table: ``[vocabulary, (heads + 2 * kv_heads) * head_dim]``, what a token adds to it.
        norm: ``[hidden]``, what a feature is multiplied with when it is normed.
        folded: Those are ones, as the weights of the feature's norm are in the product's.
    """

    attention: Attention
    table: torch.Tensor
    norm: torch.Tensor
    folded: bool


def embed_tokens(
    attention: Attention, norm: RMSNorm, embedding: torch.Tensor, feature_norm: RMSNorm, *, fold: bool
) -> EmbeddedTokens | None:
    """Return the table of a layer, or None where it would take too much memory.

    Args:
        attention: Whose q-k-v product takes [embedding ; feature].
        norm: Of the embedding.
        embedding: ``[vocabulary, hidden]``.
        feature_norm: Of the feature.
        fold: Whether the weights of that norm go into the product's: nobody else reads the normed feature.
    """
    weight, hidden = attention.qkv.weight, embedding.shape[1]
    table = token_products(embedding, norm, weight[:, :hidden])
    if table is None:
        return None
    of_feature, scale = weight[:, hidden:].contiguous(), feature_norm.weight
    if fold:
        of_feature, scale = (of_feature.float() * scale.float()).to(weight.dtype), torch.ones_like(scale)
    narrow = Attention(
        Linear(of_feature, attention.qkv.bias),
        attention.o,
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        attention.layer,
        head_norm=attention.head_norm,
        window=attention.window,
        sinks=attention.sinks,
    )
    return EmbeddedTokens(narrow, table, scale, fold)
