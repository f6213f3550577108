"""Loads decoder layers and their parts: maps tensor names to attention, MLP, experts and norms.

The functions take tensors from a `TensorSource`. If the source is an `ExpectedTensors`, it records the
tensors that a checkpoint must contain. The layers are then on torch's meta device and have no data.
"""

from __future__ import annotations

import torch

from outrider.shared.nn.checkpoint.experts_config import ExpertsConfig
from outrider.shared.nn.checkpoint.tensor_source import TensorSource
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.layers.experts import Router, SparseMLP
from outrider.shared.nn.layers.latent_attention import load_latent_attention
from outrider.shared.nn.layers.modules import Attention, DecoderLayer, GatedMLP, HeadNorm, Linear, RMSNorm


def load_layer(
    source: TensorSource, config: ModelConfig, prefix: str, layer: int, *, like: int | None = None
) -> DecoderLayer:
    """Load one decoder layer.

    Args:
        source: Supplies the tensors.
        config: Configuration of the model.
        prefix: Prefix of the layer's tensor names.
        layer: Index of the layer in the KV pool.
        like: Index of a layer of the model. The new layer gets the same window and kind of MLP as that layer.
            With None, this index is `layer`.
    """
    kind = layer if like is None else like
    latent = config.latent
    attention = f"{prefix}self_attn."
    return DecoderLayer(
        input_norm=RMSNorm(
            source.take(f"{prefix}input_layernorm.weight", (config.hidden_size,)), config.rms_norm_eps
        ),
        attention=load_latent_attention(source, config, latent, attention, layer)
        if latent
        else load_attention(source, config, attention, layer, window=config.windows[kind]),
        post_attention_norm=RMSNorm(
            source.take(f"{prefix}post_attention_layernorm.weight", (config.hidden_size,)),
            config.rms_norm_eps,
        ),
        mlp=load_experts(source, config, config.experts, prefix)
        if config.experts and config.sparse[kind]
        else load_mlp(source, config, f"{prefix}mlp."),
    )


def load_attention(
    source: TensorSource,
    config: ModelConfig,
    prefix: str,
    layer: int,
    input_size: int | None = None,
    *,
    window: int = 0,
) -> Attention:
    """Load the attention of a decoder layer: ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``.

    Args:
        source: Supplies the tensors.
        config: Configuration of the model.
        prefix: Prefix of the tensor names.
        layer: Index of the layer in the KV pool.
        input_size: Input width of q, k and v. With None, it is the model's hidden_size.
        window: Number of tokens that a row sees, including itself. 0 means all tokens.
    """
    width = input_size or config.hidden_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    qkv = Linear(
        source.take_rows([(f"{prefix}{name}.weight", (count, width)) for name, count in rows.items()]),
        source.take_rows([(f"{prefix}{name}.bias", (count,)) for name, count in rows.items()])
        if config.qkv_bias
        else None,
    )
    o = Linear(
        source.take(f"{prefix}o_proj.weight", (config.hidden_size, q_rows)),
        source.take(f"{prefix}o_proj.bias", (config.hidden_size,)) if config.o_bias else None,
    )
    return Attention(
        qkv,
        o,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        layer,
        head_norm=_load_head_norm(source, config, prefix) if config.head_norm else None,
        window=window,
        sinks=source.take(f"{prefix}sinks", (config.num_heads,), to=torch.float32) if config.sinks else None,
    )


def load_mlp(
    source: TensorSource, config: ModelConfig, prefix: str, intermediate_size: int | None = None
) -> GatedMLP:
    """Load the MLP of a decoder layer: ``gate_proj``, ``up_proj`` and ``down_proj``.

    Args:
        source: Supplies the tensors.
        config: Configuration of the model.
        prefix: Prefix of the tensor names.
        intermediate_size: Width of the MLP. With None, it is the `intermediate_size` of `config`.
    """
    hidden, intermediate = config.hidden_size, intermediate_size or config.intermediate_size
    names = (f"{prefix}gate_proj", f"{prefix}up_proj")
    gate_up = Linear(
        source.take_rows([(f"{name}.weight", (intermediate, hidden)) for name in names]),
        source.take_rows([(f"{name}.bias", (intermediate,)) for name in names]) if config.mlp_bias else None,
    )
    down = Linear(
        source.take(f"{prefix}down_proj.weight", (hidden, intermediate)),
        source.take(f"{prefix}down_proj.bias", (hidden,)) if config.mlp_bias else None,
    )
    return GatedMLP(gate_up, down, config.activation)


def load_experts(source: TensorSource, config: ModelConfig, experts: ExpertsConfig, prefix: str) -> SparseMLP:
    """Load the router, the routed experts and the shared expert of a layer. The router stays in fp32.

    Args:
        source: Supplies the tensors.
        config: Configuration of the model.
        experts: The part of the configuration that describes the experts.
        prefix: Prefix of the layer's tensor names.
    """
    router, routing = f"{prefix}{experts.files.router}", experts.routing
    size = (experts.num_experts,)
    return SparseMLP(
        Router(
            source.take(f"{router}.weight", (experts.num_experts, config.hidden_size), to=torch.float32),
            source.take(f"{router}.bias", size, to=torch.float32) if routing.bias else None,
            source.take(f"{router}.e_score_correction_bias", size, to=torch.float32)
            if routing.choice_bias
            else None,
            routing,
        ),
        experts.files.load(source, prefix, experts, config.hidden_size),
        load_mlp(source, config, f"{prefix}mlp.shared_experts.", experts.shared_size)
        if experts.shared_size
        else None,
        experts,
    )


def _load_head_norm(source: TensorSource, config: ModelConfig, prefix: str) -> HeadNorm:
    q_weight, k_weight = (
        source.take(f"{prefix}{name}.weight", (config.head_dim,)) for name in ("q_norm", "k_norm")
    )
    return HeadNorm(q_weight, k_weight, config.num_heads, config.num_kv_heads, config.rms_norm_eps)
