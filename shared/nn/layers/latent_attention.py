"""Multi-head latent attention (DeepSeek-V2): caches one latent row per token instead of K and V.

K and V of all heads are projections of the latent row, but K and V are never computed ("absorption").
Instead, queries are projected into the latent space before attention. The results of attention are projected
out of the latent space. Attention then has a single K/V head, as wide as the latent and the rotated part
together. The keys of this head also serve as its values.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

import torch

from outrider.shared.attn.base import AttentionBackend
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.checkpoint.tensor_source import TensorSource
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.families.traits import LatentConfig
from outrider.shared.nn.layers.modules import Linear, RMSNorm
from outrider.shared.nn.layers.rope import Rotation, rotate

LATENT_NORM_EPS = 1e-6  # epsilon of the two inner norms, independent of rms_norm_eps


class LatentAttention:
    """Multi-head latent attention of one layer, over a KV pool of latent rows.

    Args:
        queries: The query projection, or two projections that are applied one after the other.
        query_norm: The norm between two query projections. None if there is only one projection.
        latent: ``[rank + rope_dim, hidden]``, projects to the cached row, before its norm and rotation.
        latent_norm: Norm over the first `rank` dimensions of the cached row.
        key_in: ``[heads, nope_dim, rank]``, projects a query into the latent space.
        value_out: ``[heads, rank, value_dim]``, projects an attended latent out of the latent space.
        o: ``[hidden, heads * value_dim]``, the output projection.
        config: The widths; see `LatentConfig`.
        scale: Factor by which the scores are multiplied.
        layer: Index of the layer in the KV pool.
    """

    __slots__ = (
        "_config",
        "_key_in",
        "_latent",
        "_latent_norm",
        "_queries",
        "_query_norm",
        "_value_out",
        "layer",
        "nbytes",
        "o",
        "scale",
    )

    def __init__(
        self,
        queries: list[Linear],
        query_norm: RMSNorm | None,
        latent: Linear,
        latent_norm: RMSNorm,
        key_in: torch.Tensor,
        value_out: torch.Tensor,
        o: Linear,
        config: LatentConfig,
        scale: float,
        layer: int,
    ) -> None:
        self._queries = queries
        self._query_norm = query_norm
        self._latent = latent
        self._latent_norm = latent_norm
        self._key_in = key_in
        self._value_out = value_out
        self.o = o
        self._config = config
        self.scale = scale
        self.layer = layer
        self.nbytes = (
            sum(linear.nbytes for linear in [*queries, latent, o]) + key_in.nbytes + value_out.nbytes
        )

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotation: Rotation,
        attention: AttentionBackend,
        pool: KVPool,
    ) -> torch.Tensor:
        """Return ``residual + o(attention(x))``, ``[rows, hidden]``; see `AttentionBlock.__call__`.

        Caches one row ``[rank + rope_dim]`` per token: the normed latent and the rotated key.
        """
        config, rows = self._config, x.shape[0]
        # 1. Queries, the latent and the shared rotated key.
        inner = self._queries[0](x)
        if self._query_norm is not None:
            inner = self._queries[1](self._query_norm(inner))
        queries = inner.view(rows, -1, config.nope_dim + config.rope_dim)  # [rows, heads, nope + rope]
        cached = self._latent(x)
        rotated_key = cached[:, None, config.rank :]
        rotate(queries[..., config.nope_dim :], rotation)
        rotate(rotated_key, rotation)
        # 2. One K/V head: the normed latent, then the rotated key.
        key = torch.cat(
            [self._latent_norm(cached[:, : config.rank])[:, None], rotated_key], dim=-1
        )  # [rows, 1, rank + rope]
        # 3. Absorb: project the unrotated queries into the latent space, and attend there.
        carried = torch.matmul(queries[..., : config.nope_dim].transpose(0, 1), self._key_in).transpose(
            0, 1
        )  # [rows, heads, rank]
        query = torch.cat([carried, queries[..., config.nope_dim :]], dim=-1)
        attended = attention.run(self.layer, query, key, key, pool, self.scale)
        # 4. Project the attended latents to values.
        latents = attended.view(rows, -1, config.rank + config.rope_dim)[..., : config.rank]
        values = torch.matmul(latents.transpose(0, 1), self._value_out).transpose(
            0, 1
        )  # [rows, heads, value_dim]
        return self.o.plus(residual, values.reshape(rows, -1))


def load_latent_attention(
    source: TensorSource,
    config: ModelConfig,
    latent: LatentConfig,
    prefix: str,
    layer: int,
    input_size: int | None = None,
) -> LatentAttention:
    """Load the projections of multi-head latent attention whose names start with `prefix`.

    Args:
        source: Supplies the tensors.
        config: Configuration of the model.
        latent: The model's latent widths.
        prefix: Prefix of the tensor names.
        layer: Index of the layer in the KV pool.
        input_size: Input width of the projections. With None, it is the model's hidden_size.
    """
    heads, width = config.num_heads, input_size or config.hidden_size
    head_rows = heads * (latent.nope_dim + latent.rope_dim)

    def queries(name: str, columns: int) -> Linear:
        weight = source.take(f"{prefix}{name}.weight", (head_rows, columns))
        return Linear(_halve(weight.view(heads, -1, columns), latent).view(head_rows, columns))

    # 1. Queries: one projection, or two with a norm between them.
    if latent.query_rank is None:
        projections, query_norm = [queries("q_proj", width)], None
    else:
        first = Linear(source.take(f"{prefix}q_a_proj.weight", (latent.query_rank, width)))
        query_norm = RMSNorm(
            source.take(f"{prefix}q_a_layernorm.weight", (latent.query_rank,)), LATENT_NORM_EPS
        )
        projections = [first, queries("q_b_proj", latent.query_rank)]
    # 2. The projection to latent rows, which the KV pool stores.
    cached = source.take(f"{prefix}kv_a_proj_with_mqa.weight", (latent.rank + latent.rope_dim, width))
    latent_norm = RMSNorm(source.take(f"{prefix}kv_a_layernorm.weight", (latent.rank,)), LATENT_NORM_EPS)
    # 3. One tensor expands latent rows to keys and to values. Attention uses the two parts separately.
    both = source.take(
        f"{prefix}kv_b_proj.weight", (heads * (latent.nope_dim + latent.value_dim), latent.rank)
    )
    both = both.view(heads, -1, latent.rank)
    return LatentAttention(
        projections,
        query_norm,
        Linear(_halve(cached[None], latent).squeeze(0)),
        latent_norm,
        both[:, : latent.nope_dim].contiguous(),
        both[:, latent.nope_dim :].transpose(1, 2).contiguous(),
        Linear(source.take(f"{prefix}o_proj.weight", (config.hidden_size, heads * latent.value_dim))),
        latent,
        config.attention_scale,
        layer,
    )


def _halve(rows: torch.Tensor, latent: LatentConfig) -> torch.Tensor:
    """Reorder the last `rope_dim` of ``[heads, rows, columns]`` from pairs to halves, as `rotate` needs."""
    if not latent.interleaved:
        return rows
    kept, rotated = rows[:, : -latent.rope_dim], rows[:, -latent.rope_dim :]
    return torch.cat([kept, rotated[:, 0::2], rotated[:, 1::2]], dim=1)
