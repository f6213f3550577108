"""Writes random draft heads to disk: scaled down, but with exactly the tensor names of public checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, VOCAB, INNER = 32, 40, 56
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
TARGET_LAYERS = 8

Tensors = dict[str, torch.Tensor]


def base_config(**changes: Any) -> dict[str, Any]:
    """Return the keys that every flat configuration has, with `changes` applied."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.46.2",
        "use_cache": True,
        "vocab_size": VOCAB,
    }
    return config | changes


class Maker:
    """Generates random tensors in a reproducible order."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self._generator) * 1.5 / columns**0.5

    def norm(self, size: int = HIDDEN) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=self._generator)

    def bias(self, size: int = HIDDEN) -> torch.Tensor:
        return 0.3 * torch.randn(size, generator=self._generator)

    def layer(
        self, prefix: str, input_size: int, *norms: str, hidden: int = HIDDEN, qkv_bias: bool = False
    ) -> Tensors:
        """Return one decoder layer with post_attention_layernorm and the given norms."""
        queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        tensors = {}
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            tensors[f"{prefix}self_attn.{part}_proj.weight"] = self.matrix(rows, input_size)
            if qkv_bias:
                tensors[f"{prefix}self_attn.{part}_proj.bias"] = self.bias(rows)
        tensors[f"{prefix}self_attn.o_proj.weight"] = self.matrix(hidden, queries)
        for part in ("gate", "up"):
            tensors[f"{prefix}mlp.{part}_proj.weight"] = self.matrix(INNER, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = self.matrix(hidden, INNER)
        return tensors | {
            f"{prefix}{norm}.weight": self.norm(hidden) for norm in ("post_attention_layernorm", *norms)
        }

    def vocabulary(self, size: int) -> Tensors:
        """Return ``d2t`` (offsets) and ``t2d`` of a draft vocabulary."""
        kept = torch.randperm(VOCAB, generator=self._generator)[:size].sort().values
        return {
            "d2t": kept - torch.arange(size),
            "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, True),
        }


def eagle_tensors(
    seed: int = 5, *, layers: int = 1, fc_bias: bool = True, qkv_bias: bool = False, embedding: bool = True
) -> Tensors:
    """Return an EAGLE-1/2 head as published by SafeAILab.

    The head has ``layers.N.*``, ``fc`` and a copy of the target's embedding.
    """
    make = Maker(seed)
    tensors = {"fc.weight": make.matrix(HIDDEN, 2 * HIDDEN)} | ({"fc.bias": make.bias()} if fc_bias else {})
    for index in range(layers):
        tensors |= make.layer(
            f"layers.{index}.", HIDDEN, *(["input_layernorm"] if index else []), qkv_bias=qkv_bias
        )
    return tensors | ({"embed_tokens.weight": make.matrix(VOCAB, HIDDEN)} if embedding else {})


def eagle3_tensors(
    seed: int = 6,
    *,
    prefix: str = "midlayer.",
    layers: int = 1,
    num_aux: int = 3,
    draft_vocab: int | None = 24,
    target_hidden: int = HIDDEN,
    inner_norm: str = "hidden_norm",
    embedding: bool = False,
    lm_head: bool = True,
) -> Tensors:
    """Return an EAGLE-3 head.

    The first layer's names start with `prefix`; the names of later layers start with ``layers.N.``. The head
    includes d2t and t2d unless `draft_vocab` is None.
    """
    make = Maker(seed)
    tensors = {"fc.weight": make.matrix(HIDDEN, num_aux * target_hidden)}
    for index in range(layers):
        first = index == 0
        norms = ("hidden_norm", "input_layernorm") if first else (inner_norm,)
        tensors |= make.layer(
            prefix if first else f"layers.{index}.", 2 * HIDDEN if first else HIDDEN, *norms
        )
    tensors["norm.weight"] = make.norm()
    if lm_head:
        tensors["lm_head.weight"] = make.matrix(draft_vocab or VOCAB, HIDDEN)
    if draft_vocab is not None:
        tensors |= make.vocabulary(draft_vocab)
    return tensors | ({"embed_tokens.weight": make.matrix(VOCAB, HIDDEN)} if embedding else {})


LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}


def with_latent_attention(
    tensors: Tensors, seed: int = 9, *, query_rank: int | None = LATENT["q_lora_rank"]
) -> Tensors:
    """Replace the attention of an EAGLE-3 head's first layer by DeepSeek-V3's.

    ``Eagle3DeepseekV2ForCausalLM``, the architecture of the heads for Kimi-K2, has this layout.
    """
    make = Maker(seed)
    names = [name for name in tensors if ".self_attn." in name]
    prefix = names[0][: names[0].index("self_attn.")] + "self_attn."
    rank, rope, nope, value = (
        LATENT[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    attention = {
        "kv_a_proj_with_mqa": make.matrix(rank + rope, 2 * HIDDEN),
        "kv_a_layernorm": make.norm(rank),
        "kv_b_proj": make.matrix(HEADS * (nope + value), rank),
        "o_proj": make.matrix(HIDDEN, HEADS * value),
    }
    if query_rank is None:
        attention["q_proj"] = make.matrix(HEADS * (nope + rope), 2 * HIDDEN)
    else:
        attention["q_a_proj"] = make.matrix(query_rank, 2 * HIDDEN)
        attention["q_a_layernorm"] = make.norm(query_rank)
        attention["q_b_proj"] = make.matrix(HEADS * (nope + rope), query_rank)
    kept = {name: tensor for name, tensor in tensors.items() if name not in names}
    return kept | {f"{prefix}{name}.weight": tensor for name, tensor in attention.items()}


def fc_norms(
    num_aux: int, target_hidden: int = HIDDEN, names: str = "fc_norm.{}.weight", seed: int = 7
) -> Tensors:
    """Return one norm for each captured state."""
    make = Maker(seed)
    return {names.format(index): make.norm(target_hidden) for index in range(num_aux)}


def write_head(
    folder: Path, config: Mapping[str, Any], tensors: Tensors, *, file: str = "model.safetensors"
) -> Path:
    """Save a head and return its folder.

    Args:
        folder: Folder to write.
        config: Content of config.json.
        tensors: Name → tensor.
        file: Name of the weights file. ``pytorch_model.bin`` is pickled, ``shards`` selects two safetensors
            files with an index, and any other name is that of a safetensors file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if file == "pytorch_model.bin":
        torch.save(tensors, folder / file)
    elif file == "shards":
        names = sorted(tensors)
        parts = {
            "model-00001-of-00002.safetensors": names[::2],
            "model-00002-of-00002.safetensors": names[1::2],
        }
        for part, held in parts.items():
            save_file({name: tensors[name] for name in held}, str(folder / part))
        index = {"metadata": {}, "weight_map": {name: part for part, held in parts.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(tensors, str(folder / file))
    return folder
