"""Reads the config.json of Llama 2, 3, 3.1, 3.2 and 3.3, and of models with the same architecture."""

from __future__ import annotations

from outrider.shared.nn.checkpoint.json_config import ConfigReader
from outrider.shared.nn.families.base import Family
from outrider.shared.nn.families.traits import Traits


def _traits(reader: ConfigReader, num_layers: int) -> Traits:
    attention_bias = reader.flag("attention_bias", False)
    return Traits(qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=reader.flag("mlp_bias", False))


LLAMA = Family("llama", ("LlamaForCausalLM",), _traits)
