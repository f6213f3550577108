"""A plain Llama for training. It uses Hugging Face's parameter names, so its state dict is the checkpoint."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.train.tokenizer import BOS_ID, END_ID

KVCache = list[tuple[Tensor, Tensor]]  # per layer: keys, values [bs, kv_heads, max_len, head_dim]


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a Llama. The names are those of Hugging Face's config."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 12
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048

    def aux_layer_ids(self) -> tuple[int, int, int]:
        """Return the indices of the layers whose *outputs* EAGLE-3 reads: 1, L//2-1 and L-4 for L layers."""
        n = self.num_hidden_layers
        return (1, n // 2 - 1, n - 4)


class TrainableRMSNorm(nn.Module):
    """Root mean square norm, computed in fp32 and scaled by a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis. The result has the shape and dtype of the input."""
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight.to(
            x.dtype
        )


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin [..., positions, head_dim] in fp32, in the rotate-half layout."""
    inverse = theta ** (
        -torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    )
    angles = positions[..., None].float() * inverse
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [bs, heads, S, head_dim]. The tables must broadcast to the shape of x."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos.to(x.dtype) + rotated * sin.to(x.dtype)


class TrainableAttention(nn.Module):
    """Grouped-query attention. ``in_size`` is the input's width, which is 2*hidden in an EAGLE-3 head."""

    def __init__(self, shape: LlamaShape, in_size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.q_proj = nn.Linear(in_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(in_size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(in_size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, shape.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q, rotated k, and v, each [bs, heads or kv_heads, S, head_dim]."""
        bs, length, _ = x.shape
        q = self.q_proj(x).view(bs, length, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(bs, length, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(bs, length, self.kv_heads, self.dim).transpose(1, 2)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None, start: int
    ) -> Tensor:
        """Attend causally. With a cache, S must be 1 or ``start`` must be 0."""
        q, k, v = self.project(x, cos, sin)
        if cache is not None:
            end = start + x.shape[1]
            cache[0][:, :, start:end], cache[1][:, :, start:end] = k, v
            k, v = cache[0][:, :, :end], cache[1][:, :, :end]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1, enable_gqa=True)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden]."""
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = TrainableAttention(shape, shape.hidden_size)
        self.post_attention_layernorm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None, start: int
    ) -> Tensor:
        """Return the residual stream [bs, S, hidden] after this layer."""
        attended: Tensor = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, start)
        result: Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return result


class TrainableDecoder(nn.Module):
    """Embedding, layers and final norm (Hugging Face's ``model.`` prefix)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    """Causal LM with tied embeddings."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = TrainableDecoder(shape)
        depth_scale = (2 * shape.num_hidden_layers) ** -0.5
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = depth_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(p, std=0.02 * scale if "embed" in name else scale * p.shape[1] ** -0.5 * 0.6)

    def forward(self, ids: Tensor, cache: KVCache | None = None, start: int = 0) -> tuple[Tensor, Tensor]:
        """Run the Llama decoder on the next tokens of each sequence.

        Args:
            ids: [bs, S] token ids at positions start..start+S-1.
            cache: Preallocated keys and values. The keys and values of `ids` are written into it.
            start: Number of tokens already in the cache.

        Returns:
            Logits [bs, S, vocab], and the concatenated outputs of the aux layers [bs, S, 3*hidden].
        """
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        cos, sin = rope_tables(positions, self.shape.head_dim, self.shape.rope_theta)
        x = self.model.embed_tokens(ids)
        aux = []
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, cache[i] if cache is not None else None, start)
            if i in self.shape.aux_layer_ids():
                aux.append(x)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight), torch.cat(aux, -1)

    def new_cache(self, bs: int, max_len: int, dtype: torch.dtype) -> KVCache:
        """Allocate an empty cache on the model's device."""
        s, device = self.shape, self.model.embed_tokens.weight.device
        size = (bs, s.num_key_value_heads, max_len, s.head_dim)
        return [
            (torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device))
            for _ in self.model.layers
        ]


def save_target(model: Llama, directory: Path, shard_bytes: int = 14_000_000) -> None:
    """Write config.json, generation_config.json and bf16 safetensors shards with their index."""
    directory.mkdir(parents=True, exist_ok=True)
    config = asdict(model.shape) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "pad_token_id": BOS_ID,
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
        "rope_scaling": None,
        "use_cache": True,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": BOS_ID, "eos_token_id": END_ID, "pad_token_id": BOS_ID}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    shards: list[dict[str, Tensor]] = [{}]
    used = total = 0
    for name, tensor in model.state_dict().items():
        value = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        if used + value.nbytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = value
        used += value.nbytes
        total += value.nbytes
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, str(directory / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def read_trained_target(directory: Path) -> Llama:
    """Read a checkpoint written by ``save_target``. The weights are fp32 tensors with bf16 values."""
    config = json.loads((directory / "config.json").read_text())
    model = Llama(LlamaShape(**{k: config[k] for k in asdict(LlamaShape())}))
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    state: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        state |= load_file(str(directory / file))
    model.load_state_dict(state)
    return model
