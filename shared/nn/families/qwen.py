"""Reads the config.json of Qwen2, Qwen2.5, Qwen3, Qwen3-MoE and MiMo.

Qwen2 has biases on Q, K and V. Qwen3 has no such biases, but a norm for each head of Q and K. MiMo is Qwen2
with multi-token prediction (MTP) layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.shared.nn.checkpoint.expert_files import SeparateExperts
from outrider.shared.nn.checkpoint.experts_config import ExpertsConfig, Routing
from outrider.shared.nn.checkpoint.json_config import ConfigReader
from outrider.shared.nn.families.base import Family, windows
from outrider.shared.nn.families.traits import Traits


def _windows(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return each layer's window. With use_sliding_window, only layers from max_window_layers on have one."""
    if not reader.flag("use_sliding_window", False) or reader.raw.get("sliding_window") is None:
        return ()
    if reader.raw.get("layer_types") is not None:
        return windows(reader, num_layers)
    first = reader.count("max_window_layers", 28)
    return tuple(reader.positive("sliding_window") if layer >= first else 0 for layer in range(num_layers))


def _qwen2(reader: ConfigReader, num_layers: int) -> Traits:
    return Traits(qkv_bias=True, windows=_windows(reader, num_layers))


def _mimo(reader: ConfigReader, num_layers: int) -> Traits:
    return Traits(qkv_bias=reader.flag("attention_bias", True), windows=_windows(reader, num_layers))


def _qwen3(reader: ConfigReader, num_layers: int) -> Traits:
    bias = reader.flag("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, head_norm=True, windows=_windows(reader, num_layers))


def _qwen3_moe(reader: ConfigReader, num_layers: int) -> Traits:
    bias = reader.flag("attention_bias", False)
    key = "num_experts" if reader.raw.get("num_experts") is not None else "num_local_experts"
    experts = ExpertsConfig(
        num_experts=reader.positive(key, 128),
        intermediate_size=reader.positive("moe_intermediate_size"),
        routing=Routing(
            top_k=reader.positive("num_experts_per_tok", 8), normalise=reader.flag("norm_topk_prob", False)
        ),
        files=SeparateExperts(),
    )
    window = (
        reader.positive("sliding_window")
        if reader.flag("use_sliding_window", False) and reader.raw.get("sliding_window")
        else 0
    )
    return Traits(
        qkv_bias=bias,
        o_bias=bias,
        head_norm=True,
        windows=(window,) * num_layers,
        experts=experts,
        sparse=_sparse(reader, num_layers),
    )


def _sparse(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    step, dense = reader.positive("decoder_sparse_step", 1), reader.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise reader.error("mlp_only_layers", f"must be a list of layer indices, not {dense!r}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _mtp_layers(reader: ConfigReader, num_layers: int) -> Mapping[str, str]:
    return {
        "model.mtp_layers.*": "multi-token prediction layers, used for drafting and not part of the decoder"
    }


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), _qwen2)
QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), _qwen3, quantisations=("fp8",))
QWEN3_MOE = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), _qwen3_moe, quantisations=("fp8",))
MIMO = Family(
    "mimo", ("MiMoForCausalLM",), _mimo, _mtp_layers, bundled_code=("configuration_mimo", "modeling_mimo")
)
