"""Draft heads in every published dialect: config.json, tensors, and the equivalent flat configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.services.draft.growth.recurrent_head import RecurrentHead
from outrider.shared.attn.base import build_batch
from outrider.shared.attn.create import create_backend
from outrider.shared.kv.pool import KVPool
from support.models.plain_heads import PlainHead
from support.models.toy_heads import (
    HIDDEN,
    LATENT,
    VOCAB,
    Maker,
    Tensors,
    base_config,
    eagle3_tensors,
    eagle_tensors,
    fc_norms,
    with_latent_attention,
)

CPU = torch.device("cpu")
ROWS = 9
DEFAULT_TRIPLE = (1, 3, 4)
WIDE = 48


@dataclass(frozen=True)
class Dialect:
    """A dialect, i.e. one way in which heads are published.

    Attributes:
        config: Content of config.json.
        tensors: Name → weight.
        flat: Non-default keys of the equivalent flat configuration, which the plain head reads.
        aux: Layers that the head reads from a target of 8 layers. Empty if it reads the last hidden state.
        borrowed: Names of the tensors that the head borrows from the target.
        target_hidden: Hidden size of the target.
        file: Kind of weights file, as for `write_head`.
    """

    config: Mapping[str, Any]
    tensors: Tensors
    flat: Mapping[str, Any] = field(default_factory=dict)
    aux: tuple[int, ...] = DEFAULT_TRIPLE
    borrowed: tuple[str, ...] = ("model.embed_tokens.weight",)
    target_hidden: int = HIDDEN
    file: str = "model.safetensors"


BOTH = ("model.embed_tokens.weight", "lm_head.weight")
HEAD_ONLY = ("lm_head.weight",)
LAYER_CONFIG = {
    key: value
    for key, value in base_config().items()
    if key not in ("architectures", "torch_dtype", "transformers_version")
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 24,
    "has_no_defaults_at_init": False,
    "model_type": "speculator_model",
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": 3,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {
            "architectures": ["LlamaForCausalLM"],
            "name_or_path": "meta-llama/Llama-3.1-8B-Instruct",
        },
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0.dev14",
    "target_hidden_size": None,
    "torch_dtype": "bfloat16",
    "transformer_layer_config": LAYER_CONFIG | {"rope_theta": 500000.0},
}
GPT_OSS_IDS = {"eagle_aux_hidden_state_layer_ids": [2, 5, 8], "use_aux_hidden_state": True}
FLAT3 = base_config(draft_vocab_size=24)
SPECFORGE = FLAT3 | {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "bfloat16"}
KIMI = SPECFORGE | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "num_key_value_heads": 4,
    **LATENT,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def prefixed(tensors: Tensors, *unprefixed: str) -> Tensors:
    return {name if name in unprefixed else f"model.{name}": tensor for name, tensor in tensors.items()}


DIALECTS: dict[str, Dialect] = {
    # yuhuili/EAGLE-llama2-chat-7B, EAGLE-Vicuna: pickled. fc has a bias that config.json does not mention.
    "EAGLE-1 of Llama 2, .bin": Dialect(
        base_config(), eagle_tensors(), aux=(), borrowed=HEAD_ONLY, file="pytorch_model.bin"
    ),
    # yuhuili/EAGLE-LLaMA3-Instruct-8B
    "EAGLE-2 of Llama 3": Dialect(
        base_config(bias=False, rope_theta=500000.0),
        eagle_tensors(fc_bias=False),
        {"rope_theta": 500000.0},
        (),
        HEAD_ONLY,
    ),
    # yuhuili/EAGLE-Qwen2-7B-Instruct
    "EAGLE of Qwen2": Dialect(
        base_config(
            model_type="qwen2", qkv_bias=True, rope_theta=1e6, use_sliding_window=False, sliding_window=131072
        ),
        eagle_tensors(qkv_bias=True),
        {"rope_theta": 1e6},
        (),
        HEAD_ONLY,
    ),
    # lmsys/sglang-EAGLE-llama2-chat-7B has its own architecture name and also stores the target's lm_head.
    "EAGLE as SGLang": Dialect(
        base_config(architectures=["LlamaForCausalLMEagle"]),
        prefixed(eagle_tensors(embedding=False)) | {"lm_head.weight": torch.zeros(VOCAB, HIDDEN)},
        aux=(),
        borrowed=BOTH,
    ),
    "EAGLE of two layers": Dialect(
        base_config(architectures=["LlamaForCausalLMEagle"], num_hidden_layers=2),
        eagle_tensors(layers=2, embedding=False),
        {"num_hidden_layers": 2},
        (),
        BOTH,
    ),
    # yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
    "EAGLE-3, official": Dialect(FLAT3, eagle3_tensors(), file="pytorch_model.bin"),
    # jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B
    "EAGLE-3, safetensors in shards": Dialect(SPECFORGE, eagle3_tensors(), file="shards"),
    # SpecForge with its own embedding, and the prefix model.
    "EAGLE-3 behind model.": Dialect(
        SPECFORGE | {"rope_scaling": LLAMA3_SCALING, "rope_theta": 10000.0},
        prefixed(eagle3_tensors(embedding=True), "d2t", "t2d", "lm_head.weight"),
        borrowed=(),
    ),
    # AngelSlim
    "EAGLE-3, Eagle3LlamaForCausalLM": Dialect(
        SPECFORGE
        | {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        },
        eagle3_tensors(prefix="layers.0."),
        {"rope_theta": 1e6},
    ),
    # lmsys/EAGLE3-gpt-oss-120b-bf16: ids up to the number of layers are the indices of layer inputs.
    "EAGLE-3 for gpt-oss": Dialect(
        SPECFORGE | {"eagle_config": GPT_OSS_IDS}, eagle3_tensors(), aux=(1, 4, 7)
    ),
    # nvidia/gpt-oss-120b-Eagle3
    "EAGLE-3 with the target's lm_head": Dialect(
        SPECFORGE | {"draft_vocab_size": None, "eagle_config": GPT_OSS_IDS},
        eagle3_tensors(draft_vocab=None, lm_head=False),
        aux=(1, 4, 7),
        borrowed=BOTH,
    ),
    # RedHatAI/*-speculator.eagle3
    "EAGLE-3, speculators": Dialect(
        SPECULATORS,
        eagle3_tensors(prefix="layers.0.", embedding=True) | {"verifier_norm.weight": torch.ones(HIDDEN)},
        {"rope_theta": 500000.0, "norm_before_residual": True},
        borrowed=(),
    ),
    "EAGLE-3, speculators with ids and later layers": Dialect(
        SPECULATORS
        | {
            "eagle_aux_hidden_state_layer_ids": [0, 3, 6],
            "transformer_layer_config": LAYER_CONFIG | {"num_hidden_layers": 2},
        },
        eagle3_tensors(prefix="layers.0.", layers=2, inner_norm="input_layernorm", embedding=True),
        {"norm_before_residual": True, "num_hidden_layers": 2},
        (0, 3, 6),
        (),
    ),
    "EAGLE-3.1: fc_norm and norm_output": Dialect(
        SPECFORGE | {"fc_norm": True, "norm_output": True},
        eagle3_tensors() | fc_norms(3),
        {"norm_output": True},
    ),
    "EAGLE-3, legacy aux norms": Dialect(
        SPECFORGE | {"use_aux_norm": True},
        eagle3_tensors()
        | dict(
            zip((f"aux_norm_{n}.weight" for n in ("low", "mid", "high")), fc_norms(3).values(), strict=True)
        ),
    ),
    "EAGLE-3, norm_before_fc and a bias": Dialect(
        SPECFORGE | {"eagle_config": {"norm_before_fc": True}, "bias": True},
        eagle3_tensors() | {"input_norm.weight": Maker(3).norm(3 * HIDDEN), "fc.bias": Maker(4).bias()},
    ),
    "EAGLE-3, three layers over four": Dialect(
        SPECFORGE
        | {
            "num_hidden_layers": 3,
            "num_aux_hidden_states": 4,
            "eagle_aux_hidden_state_layer_ids": [0, 2, 4, 6],
            "fc_norm": True,
        },
        eagle3_tensors(layers=3, num_aux=4)
        | fc_norms(4)
        | {"layers.1.input_layernorm.weight": torch.ones(HIDDEN)},
        {"num_hidden_layers": 3},
        (0, 2, 4, 6),
    ),
    "EAGLE-3 over one layer as wide as itself": Dialect(
        SPECFORGE | {"num_aux_hidden_states": 1, "eagle_aux_hidden_state_layer_ids": [5]},
        eagle3_tensors(num_aux=1),
        aux=(5,),
    ),
    "EAGLE-3 for a wider target": Dialect(
        SPECFORGE | {"target_hidden_size": WIDE},
        eagle3_tensors(target_hidden=WIDE, embedding=True),
        borrowed=(),
        target_hidden=WIDE,
    ),
    # Heads for Kimi-K2 with latent attention. Ids that do not begin with 1 are the indices of layer inputs.
    "EAGLE-3 with latent attention": Dialect(
        KIMI | {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]},
        with_latent_attention(eagle3_tensors(prefix="layers.0.")),
        LATENT,
        (1, 3, 5),
    ),
    "EAGLE-3 with latent attention and plain queries": Dialect(
        KIMI | {"q_lora_rank": None, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
        with_latent_attention(eagle3_tensors(), query_rank=None),
        LATENT,
        (1, 3, 5),
    ),
    "EAGLE-3 with a sliding window": Dialect(
        SPECFORGE | {"sliding_window": 4, "layer_types": ["sliding_attention"]},
        eagle3_tensors(),
        {"sliding_window": 4},
    ),
    "EAGLE-3 over the last hidden state": Dialect(
        SPECFORGE | {"eagle_config": {"use_aux_hidden_state": False}}, eagle3_tensors(num_aux=1), aux=()
    ),
    "EAGLE-3 with a tied lm_head": Dialect(
        SPECFORGE | {"tie_word_embeddings": True, "draft_vocab_size": VOCAB},
        eagle3_tensors(draft_vocab=None, lm_head=False, embedding=True),
        borrowed=(),
    ),
    "EAGLE-3 with biased attention": Dialect(
        SPECFORGE | {"attention_bias": True},
        eagle3_tensors()
        | {
            f"midlayer.self_attn.{p}_proj.bias": Maker(8).bias(n)
            for p, n in (("q", 32), ("k", 16), ("v", 16), ("o", 32))
        },
    ),
}


def canonical(tensors: Tensors) -> Tensors:
    """Return the tensors in double precision, under their canonical names."""
    legacy = {
        f"aux_norm_{name}.weight": f"fc_norm.{index}.weight"
        for index, name in enumerate(("low", "mid", "high"))
    }
    named = {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor
        for name, tensor in tensors.items()
    }
    return {
        legacy.get(name, name): tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in named.items()
    }


def run(
    head: RecurrentHead, tokens: torch.Tensor, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states and logits of a sequence of up to 32 tokens with causal attention."""
    pool = KVPool(8, 4, head.num_layers, head.kv_heads, head.head_dim, torch.float32, CPU, latent=head.latent)
    rows = len(tokens)
    lease = pool.lease(rows)
    assert lease is not None
    attention = create_backend("auto", CPU)
    with torch.inference_mode():
        attention.plan(build_batch(pool, [lease], [0], [rows]))
        states = head.forward(
            tokens.to(torch.int32), features, head.rotation(torch.arange(rows)), attention, pool
        )
        return states, head.logits(states)


def assert_computes(head: RecurrentHead, weights: Tensors, **config: Any) -> PlainHead:
    """Compare a head with the plain reference head on a random sequence, and return the reference head."""
    make = Maker(11)
    lent = {
        "model.embed_tokens.weight": make.matrix(VOCAB, HIDDEN),
        "lm_head.weight": make.matrix(VOCAB, HIDDEN),
    }
    for key in list(head.missing()):
        head.lend(key, lent[key])
    double = {
        name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in weights.items()
    }
    both = (lent[key].double() for key in ("model.embed_tokens.weight", "lm_head.weight"))
    plain = PlainHead(base_config(head_dim=8) | config, double, *both)
    tokens, features = (
        torch.randint(0, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(1)),
        make.matrix(ROWS, HIDDEN),
    )
    states, logits = run(head, tokens, features)
    wanted = plain.states(
        tokens, features.double(), torch.arange(ROWS), torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    )
    torch.testing.assert_close(states.double(), wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        logits.double(), plain.logits(wanted)[:, head.vocabulary.target_ids(CPU)], rtol=1e-3, atol=1e-3
    )
    return plain
