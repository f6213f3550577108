"""Reads the config.json of gpt-oss: alternating sliding windows, attention sinks, MXFP4 or bf16 experts."""

from __future__ import annotations

from outrider.shared.nn.checkpoint.expert_files import FusedExperts, Mxfp4Experts
from outrider.shared.nn.checkpoint.experts_config import ExpertsConfig, Routing
from outrider.shared.nn.checkpoint.json_config import ConfigReader
from outrider.shared.nn.families.base import Family, windows
from outrider.shared.nn.families.traits import Traits

DEFAULT_WINDOW = 128


def _traits(reader: ConfigReader, num_layers: int) -> Traits:
    bias = reader.flag("attention_bias", True)
    experts = ExpertsConfig(
        num_experts=reader.positive("num_local_experts", 128),
        intermediate_size=reader.positive("intermediate_size"),
        routing=Routing(top_k=reader.positive("num_experts_per_tok", 4), bias=True),
        files=Mxfp4Experts() if reader.raw.get("quantization_config") else FusedExperts(),
        swiglu_limit=reader.number("swiglu_limit", 7.0),
        swiglu_alpha=reader.number("swiglu_alpha", 1.702),
    )
    return Traits(
        qkv_bias=bias,
        o_bias=bias,
        windows=_windows(reader, num_layers),
        sinks=True,
        experts=experts,
        sparse=(True,) * num_layers,
        rope_theta=150000.0,
    )


def _windows(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    if reader.raw.get("layer_types") is not None:
        return windows(reader, num_layers)
    window = reader.positive("sliding_window", DEFAULT_WINDOW)
    return tuple(0 if layer % 2 else window for layer in range(num_layers))


GPT_OSS = Family("gpt_oss", ("GptOssForCausalLM",), _traits, quantisations=("mxfp4",))
