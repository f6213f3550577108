"""Reads the config.json of Mistral models and of Mixtral, the mixture-of-experts version.

Mistral 7B v0.1 has a sliding window on every layer. Later releases have no sliding window.
"""

from __future__ import annotations

from outrider.shared.nn.checkpoint.expert_files import SeparateExperts
from outrider.shared.nn.checkpoint.experts_config import ExpertsConfig, Routing
from outrider.shared.nn.checkpoint.json_config import ConfigReader
from outrider.shared.nn.families.base import Family, windows
from outrider.shared.nn.families.traits import Traits

MIXTRAL_FILES = SeparateExperts(
    router="block_sparse_moe.gate", expert="block_sparse_moe.experts.{}.", gate="w1", up="w3", down="w2"
)


def _mistral(reader: ConfigReader, num_layers: int) -> Traits:
    return Traits(windows=windows(reader, num_layers))


def _mixtral(reader: ConfigReader, num_layers: int) -> Traits:
    experts = ExpertsConfig(
        num_experts=reader.positive("num_local_experts", 8),
        intermediate_size=reader.positive("intermediate_size"),
        routing=Routing(top_k=reader.positive("num_experts_per_tok", 2)),
        files=MIXTRAL_FILES,
    )
    return Traits(
        windows=windows(reader, num_layers), experts=experts, sparse=(True,) * num_layers, rope_theta=1e6
    )


MISTRAL = Family("mistral", ("MistralForCausalLM",), _mistral)
MIXTRAL = Family("mixtral", ("MixtralForCausalLM",), _mixtral)
