"""Writes tiny pairs of target and EAGLE-3 head to disk: random but reproducible, fp32, without a tokenizer.

With ``planted > 0``, the target and the head of a pair often agree. Embeddings are then nearly one-hot, the
target mostly continues token v with ``successor(v)``, and the head applies the same rule from level to level.
With ``planted = 0``, target and head are random and agree only by chance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

EMBED_SCALE = 16.0
DEFAULT_AUX = "published"


def successor(vocab_size: int) -> torch.Tensor:
    """Return the planted rule, a permutation ``[vocab_size] int64``. ``successor[v]`` usually follows v."""
    stride = 5 if vocab_size % 5 else 7
    return (
        (torch.arange(vocab_size) * stride + 3) % vocab_size
        if vocab_size % stride
        else (torch.arange(vocab_size) + 1) % vocab_size
    )


def default_aux_layers(num_layers: int) -> list[int]:
    """Return the three layers of which a toy head reads the *outputs*.

    They are EAGLE-3's defaults 1, L//2 - 1 and L - 4. A target of 5 to 7 layers has the defaults of 8 layers.
    A target of 3 or 4 layers, which has no such defaults, has its first three layers.
    """
    if num_layers < 5:
        return [0, 1, 2]
    layers = max(num_layers, 8)
    return [1, layers // 2 - 1, layers - 4]


def make_toy_target(
    path: Path,
    *,
    seed: int = 0,
    vocab_size: int = 64,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    num_layers: int = 8,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    max_position_embeddings: int = 1024,
    tie_word_embeddings: bool = False,
    planted: float = 0.0,
    max_shard_size: str = "50GB",
    **config_overrides: Any,
) -> Path:
    """Save a random Llama in Hugging Face layout (fp32 safetensors) and return `path`.

    Args:
        path: Folder to write.
        seed: Seed of the weights.
        num_layers: Number of layers. Tests that generate many tokens take three, the fewest for a head
            that reads three layers.
        planted: 0 for random weights, otherwise the scale of the planted rule in the logits. 2 to 3 makes the
            distribution at temperature 1 sharp, but not deterministic. Needs ``vocab_size <= hidden_size``
            and untied embeddings.
        max_shard_size: Largest size of a weights file. A small value makes a sharded checkpoint.
        config_overrides: Further `LlamaConfig` arguments, such as ``rope_scaling`` or ``eos_token_id``.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
        **config_overrides,
    }
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data = torch.randn_like(parameter) * 1.5 / parameter.shape[1] ** 0.5
        if planted > 0:
            _plant_target(model, vocab_size, hidden_size, planted, tie_word_embeddings)
    model.save_pretrained(str(path), max_shard_size=max_shard_size)
    return path


def _plant_target(model: Any, vocab_size: int, hidden_size: int, planted: float, tied: bool) -> None:
    if vocab_size > hidden_size or tied:
        raise ValueError("a planted target needs vocab_size <= hidden_size and untied embeddings")
    one_hot = torch.eye(vocab_size, hidden_size) * EMBED_SCALE
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.1
        layer.mlp.down_proj.weight.data *= 0.1
    embedding = model.model.embed_tokens.weight
    embedding.data = one_hot + 0.1 * torch.randn_like(embedding)
    head = torch.zeros(vocab_size, hidden_size)
    head[successor(vocab_size)] = torch.eye(vocab_size, hidden_size)
    model.lm_head.weight.data = planted * (head + 0.1 * torch.randn_like(head)) / hidden_size**0.5 * 2


def make_toy_eagle3(
    path: Path,
    target_dir: Path,
    *,
    seed: int = 1,
    draft_vocab_size: int | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 96,
    aux_layers: list[int] | str | None = DEFAULT_AUX,
    own_embedding: bool = False,
    lm_head: str = "draft",
    layer_prefix: str = "midlayer.",
    planted: float = 0.0,
    config_overrides: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Save a random EAGLE-3 head for the target in `target_dir`, in the published layout, and return `path`.

    Args:
        path: Folder to write.
        target_dir: Folder of the target.
        seed: Seed of the weights.
        draft_vocab_size: Size of the draft vocabulary. None selects half of the target's vocabulary size.
            With the target's size, the mapping is the identity, and d2t and t2d are left out.
        aux_layers: Layer outputs to write into ``eagle_config``. ``"published"`` selects the three layers of
            `default_aux_layers`, and None leaves the key out.
        own_embedding: True to include ``embed_tokens.weight``, a copy of the target's embedding. Otherwise
            the head borrows the target's embedding.
        lm_head: ``draft`` (rows of the draft vocabulary), ``full`` (rows of the target's vocabulary, without
            ``d2t``) or ``absent`` (borrowed from the target).
        layer_prefix: ``midlayer.``, ``layers.0.`` or ``model.layers.0.``.
        planted: As in `make_toy_target`. The head then applies the rule of a planted target.
        config_overrides: Keys to set in config.json. A value of None removes the key.
        drop, extra: Tensors to leave out, and tensors to add, to make broken checkpoints.
    """
    target = json.loads((target_dir / "config.json").read_text())
    vocab_size, hidden = target["vocab_size"], target["hidden_size"]
    draft_vocab = vocab_size if lm_head != "draft" else (draft_vocab_size or vocab_size // 2)
    aux = default_aux_layers(target["num_hidden_layers"]) if aux_layers == DEFAULT_AUX else aux_layers
    num_aux = len(aux) if aux is not None else 3
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    tensors = {
        "fc.weight": random(hidden, num_aux * hidden),
        f"{layer_prefix}self_attn.q_proj.weight": random(num_heads * head_dim, 2 * hidden),
        f"{layer_prefix}self_attn.k_proj.weight": random(num_kv_heads * head_dim, 2 * hidden),
        f"{layer_prefix}self_attn.v_proj.weight": random(num_kv_heads * head_dim, 2 * hidden),
        f"{layer_prefix}self_attn.o_proj.weight": random(hidden, num_heads * head_dim),
        f"{layer_prefix}mlp.gate_proj.weight": random(intermediate_size, hidden),
        f"{layer_prefix}mlp.up_proj.weight": random(intermediate_size, hidden),
        f"{layer_prefix}mlp.down_proj.weight": random(hidden, intermediate_size),
        f"{layer_prefix}hidden_norm.weight": norm(),
        f"{layer_prefix}input_layernorm.weight": norm(),
        f"{layer_prefix}post_attention_layernorm.weight": norm(),
        "norm.weight": norm(),
    }
    if draft_vocab < vocab_size:
        kept = torch.randperm(vocab_size, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
    else:
        kept = torch.arange(vocab_size)
    if lm_head != "absent":
        tensors["lm_head.weight"] = random(draft_vocab, hidden)
    if own_embedding:
        tensors["embed_tokens.weight"] = read_target_tensor(target_dir, "model.embed_tokens.weight")
    if planted > 0:
        _plant_head(tensors, layer_prefix, vocab_size, hidden, intermediate_size, num_aux, kept, planted)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if aux is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": aux, "use_aux_hidden_state": True}
    for key, value in (config_overrides or {}).items():
        config[key] = value
    config = {key: value for key, value in config.items() if value is not None}
    tensors = {key: value.contiguous() for key, value in (tensors | (extra or {})).items() if key not in drop}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, str(path / "model.safetensors"))
    return path


def make_toy_pair(
    folder: Path, draft_vocab_size: int | None = None, *, planted: float = 0.0, **options: Any
) -> tuple[Path, Path]:
    """Save a random target and an EAGLE-3 head for it, and return their folders.

    Args:
        folder: Folder in which the two folders are made.
        draft_vocab_size: Size of the draft vocabulary; see `make_toy_eagle3`.
        planted: See `make_toy_target`. The head gets the same value.
        options: Other arguments of `make_toy_target`.
    """
    target = make_toy_target(folder / "target", planted=planted, **options)
    head = make_toy_eagle3(folder / "head", target, draft_vocab_size=draft_vocab_size, planted=planted)
    return target, head


def _plant_head(
    tensors: dict[str, torch.Tensor],
    prefix: str,
    vocab_size: int,
    hidden: int,
    intermediate: int,
    num_aux: int,
    kept: torch.Tensor,
    planted: float,
) -> None:
    """Plant the rule in a head.

    The MLP of the head advances the feature from e(v) to e(successor(v)). The logits of the head favour the
    successor of the token whose embedding the feature is.
    """
    if intermediate < vocab_size:
        raise ValueError("a planted head needs intermediate_size >= vocab_size")
    rule = successor(vocab_size)
    eye = torch.eye(vocab_size, hidden)
    tensors["fc.weight"] = (
        torch.cat([torch.eye(hidden) / num_aux] * num_aux, dim=1) + 0.02 * tensors["fc.weight"]
    )
    tensors[f"{prefix}self_attn.o_proj.weight"] *= 0.1
    tensors[f"{prefix}mlp.gate_proj.weight"] = 0.05 * tensors[f"{prefix}mlp.gate_proj.weight"]
    tensors[f"{prefix}mlp.up_proj.weight"] = 0.05 * tensors[f"{prefix}mlp.up_proj.weight"]
    tensors[f"{prefix}mlp.down_proj.weight"] = 0.005 * tensors[f"{prefix}mlp.down_proj.weight"]
    tensors[f"{prefix}mlp.gate_proj.weight"][:vocab_size] += eye
    tensors[f"{prefix}mlp.up_proj.weight"][:vocab_size] += eye
    # A row of a normed one-hot vector is about sqrt(hidden), so that silu(x) * x is about hidden.
    step = (eye[rule] - eye).T * EMBED_SCALE / hidden
    tensors[f"{prefix}mlp.down_proj.weight"][:, :vocab_size] += step
    head = torch.zeros(vocab_size, hidden)
    head[rule] = eye
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = planted * 2 / hidden**0.5 * head[kept] + 0.02 * tensors["lm_head.weight"]


def read_target_tensor(target_dir: Path, name: str) -> torch.Tensor:
    """Return one tensor of a safetensors checkpoint, which may be sharded."""
    from safetensors import safe_open

    index = target_dir / "model.safetensors.index.json"
    file = json.loads(index.read_text())["weight_map"][name] if index.exists() else "model.safetensors"
    with safe_open(str(target_dir / file), framework="pt") as reader:
        tensor: torch.Tensor = reader.get_tensor(name)
        return tensor
