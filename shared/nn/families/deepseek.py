"""Reads the config.json of DeepSeek-V2, V3, R1 and Kimi-K2: latent attention, experts, expert groups."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.shared.nn.checkpoint.expert_files import SeparateExperts
from outrider.shared.nn.checkpoint.experts_config import ExpertsConfig, Routing, Scoring
from outrider.shared.nn.checkpoint.json_config import ConfigReader
from outrider.shared.nn.families.base import Family
from outrider.shared.nn.families.traits import LatentConfig, Traits

BUNDLED_CODE = ("configuration_deepseek", "modeling_deepseek")


def _v2(reader: ConfigReader, num_layers: int) -> Traits:
    method = reader.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise reader.error(
            "topk_method", f"{method!r} is not supported; supported: greedy, group_limited_greedy"
        )
    limited, top_k = method == "group_limited_greedy", reader.positive("num_experts_per_tok")
    # DeepSeek's own code (modeling_deepseek.py of V2) either normalizes the experts' weights or scales them.
    # transformers ignores this key.
    normalise = reader.flag("norm_topk_prob", False) and top_k > 1
    routing = Routing(
        top_k=top_k,
        normalise=normalise,
        scale=1.0 if normalise else reader.number("routed_scaling_factor", 1.0),
        groups=reader.positive("n_group") if limited else 1,
        kept_groups=reader.positive("topk_group") if limited else 1,
    )
    return _traits(reader, num_layers, routing, interleaved=True, mlp_bias=reader.flag("mlp_bias", False))


def _v3(reader: ConfigReader, num_layers: int) -> Traits:
    scoring, method = reader.text("scoring_func", "sigmoid"), reader.text("topk_method", "noaux_tc")
    if scoring != "sigmoid":
        raise reader.error(
            "scoring_func", f"{scoring!r} is not supported for deepseek_v3; supported: sigmoid"
        )
    if method != "noaux_tc":
        raise reader.error("topk_method", f"{method!r} is not supported for deepseek_v3; supported: noaux_tc")
    routing = Routing(
        top_k=reader.positive("num_experts_per_tok", 8),
        scoring=Scoring.SIGMOID,
        normalise=reader.flag("norm_topk_prob", True),
        scale=reader.number("routed_scaling_factor", 2.5),
        groups=reader.positive("n_group", 8),
        kept_groups=reader.positive("topk_group", 4),
        group_top=2,
        choice_bias=True,
    )
    return _traits(
        reader, num_layers, routing, interleaved=reader.flag("rope_interleave", True), mlp_bias=False
    )


def _traits(
    reader: ConfigReader, num_layers: int, routing: Routing, *, interleaved: bool, mlp_bias: bool
) -> Traits:
    if reader.flag("attention_bias", False):
        raise reader.error("attention_bias", "must be false: no release of this family has such biases")
    if mlp_bias:
        raise reader.error("mlp_bias", "must be false: no release of this family has such biases")
    num_experts, size = reader.positive("n_routed_experts"), reader.positive("moe_intermediate_size")
    if num_experts % routing.groups:
        raise reader.error("n_group", f"{routing.groups} does not divide n_routed_experts {num_experts}")
    first, step = reader.count("first_k_dense_replace", 0), reader.positive("moe_layer_freq", 1)
    return Traits(
        experts=ExpertsConfig(
            num_experts=num_experts,
            intermediate_size=size,
            routing=routing,
            files=SeparateExperts(),
            shared_size=size * reader.count("n_shared_experts", 0),
        ),
        sparse=tuple(layer >= first and layer % step == 0 for layer in range(num_layers)),
        latent=LatentConfig(
            rank=reader.positive("kv_lora_rank"),
            query_rank=reader.positive("q_lora_rank") if reader.raw.get("q_lora_rank") is not None else None,
            nope_dim=reader.positive("qk_nope_head_dim"),
            rope_dim=reader.positive("qk_rope_head_dim"),
            value_dim=reader.positive("v_head_dim"),
            interleaved=interleaved,
        ),
    )


def _mtp_layers(reader: ConfigReader, num_layers: int) -> Mapping[str, str]:
    reason = "multi-token prediction layers, used for drafting and not part of the decoder"
    return {
        f"model.layers.{num_layers + index}.*": reason
        for index in range(reader.count("num_nextn_predict_layers", 0))
    }


DEEPSEEK_V2 = Family("deepseek_v2", ("DeepseekV2ForCausalLM",), _v2, bundled_code=BUNDLED_CODE)
DEEPSEEK_V3 = Family("deepseek_v3", ("DeepseekV3ForCausalLM",), _v3, _mtp_layers, BUNDLED_CODE, ("fp8",))
KIMI_K2 = Family("kimi_k2", ("DeepseekV3ForCausalLM",), _v3, _mtp_layers, BUNDLED_CODE, ("fp8",))
