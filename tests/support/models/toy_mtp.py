"""A tiny MiMo with chained MTP layers, trained in seconds and saved as published, and its plain drafter.

The model runs whole sequences of one length with only a causal mask and no cache. It shares no code with the
service and is the reference for MiMo, which `transformers` does not have. Sources:

- the MiMo report (arXiv 2505.07608): a Qwen2 decoder with q/k/v biases, RMSNorm, SwiGLU, grouped queries and
  rotary positions,
- the DeepSeek-V3 report (arXiv 2412.19437, section 2.2): MTP,
- the tensor names of MiMo-7B.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 32, 48, 4, 2, 16, 96
EPS, THETA = 1e-6, 10000.0
STEPS = 7
"""Number of strides of the toy language.

The first token determines the stride by which tokens advance. Some tokens advance by another stride.
"""


def sample_text(rows: int, length: int, generator: torch.Generator, noise: float = 0.15) -> Tensor:
    """Return texts of the toy language, ``[rows, length]``."""
    text = torch.randint(0, VOCAB, (rows, 1), generator=generator)
    stride = 1 + text % STEPS
    for _ in range(length - 1):
        step = torch.where(
            torch.rand(rows, 1, generator=generator) < noise,
            torch.randint(1, 4, (rows, 1), generator=generator),
            stride,
        )
        text = torch.cat([text, (text[:, -1:] + step) % VOCAB], dim=1)
    return text


class Norm(nn.Module):
    def __init__(self, size: int = HIDDEN) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Attend causally over ``x [rows, length, hidden]`` at rotary ``positions [length]``."""
        rows, length, _ = x.shape
        q, k, v = (
            p(x).view(rows, length, -1, HEAD_DIM).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        angles = positions[:, None].float() * THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        cos, sin = angles.cos(), angles.sin()

        def turn(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        out = functional.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = Norm()
        self.self_attn = Attention()
        self.post_attention_layernorm = Norm()
        self.mlp = Mlp()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class MtpLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.token_layernorm = Norm()
        self.hidden_layernorm = Norm()
        self.input_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.final_layernorm = Norm()

    def join(self, embedded: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        embedded = embedded * (positions != 0)[:, None]
        x = self.input_proj(torch.cat([self.hidden_layernorm(states), self.token_layernorm(embedded)], -1))
        return self.final_layernorm(super().forward(x, positions))


class Model(nn.Module):
    """A MiMo whose parameter names are those of the checkpoint without the prefix ``model.``."""

    def __init__(self, layers: int, mtp_layers: int, vocab_size: int = VOCAB) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = Norm()
        self.mtp_layers = nn.ModuleList(MtpLayer() for _ in range(mtp_layers))
        self.lm_head = nn.Linear(HIDDEN, vocab_size, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states after the final norm, ``[rows, length, hidden]``."""
        x, positions = self.embed_tokens(tokens), torch.arange(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, positions)
        return self.norm(x)

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the sum of the losses of the model and of each MTP layer."""
        states = self.hidden(tokens)
        total = _cross_entropy(self.lm_head(states[:, :-1]), tokens[:, 1:])
        states = states.detach()
        for index, layer in enumerate(self.mtp_layers):
            # Row t reads the previous layer's state at t, and token t + 1 + index.
            states = layer.join(
                self.embed_tokens(tokens[:, 1 + index :]).detach(),
                states[:, :-1],
                torch.arange(states.shape[1] - 1),
            )
            logits = functional.linear(states[:, :-1], self.lm_head.weight.detach())
            total = total + _cross_entropy(logits, tokens[:, 2 + index :])
        return total

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the `count` tokens that greedy decoding appends."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.lm_head(self.hidden(torch.tensor([tokens]))[0, -1]).argmax()))
        return tokens[len(prompt) :]

    @torch.no_grad()
    def draft(
        self, tokens: Sequence[int], depth: int, path: Sequence[int] = ()
    ) -> tuple[list[int], list[float]]:
        """Return the chain of `depth` tokens that the MTP layers predict after `tokens`, and their log-probs.

        Args:
            tokens: The text so far. The last token has no feature yet.
            depth: Length of the chain.
            path: First tokens of the chain. They replace the predictions of the layers.
        """
        known = list(tokens)
        states = self.hidden(torch.tensor([known]))[:, :-1]  # rows 0 … C - 2
        chain: list[int] = []
        logprobs: list[float] = []
        used = len(self.mtp_layers)
        for level in range(depth):
            index = min(level, used - 1)
            if level < used:
                inputs, behind = states, 1 + index
            else:  # the last layer repeats: it reads its own states, one position further in each repetition
                inputs, behind = torch.cat([inputs, states[:, -1:]], 1), used
            row_tokens = torch.tensor([[*known, *chain][behind : behind + inputs.shape[1]]])
            states = self.mtp_layers[index].join(
                self.embed_tokens(row_tokens), inputs, torch.arange(inputs.shape[1])
            )
            known_logprobs = torch.log_softmax(self.lm_head(states[0, -1]), -1)
            chain.append(path[level] if level < len(path) else int(known_logprobs.argmax()))
            logprobs.append(float(known_logprobs[chain[-1]]))
        return chain, logprobs


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(layers: int, mtp_layers: int, steps: int, seed: int = 0) -> Model:
    """Train on the toy language."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Model(layers, mtp_layers)
    fit(model, steps, seed)
    return model


def sharp_model(layers: int) -> Model:
    """Return random layers with attention to positions, so that a position error or a missing row shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(layers)
        model = Model(1, layers)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data *= 4
    return model


def fit(model: Any, steps: int, seed: int = 0) -> None:
    """Train any model that has a `loss` method on the toy language."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    for _ in range(steps):
        loss = model.loss(sample_text(32, 40, generator))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


def save(model: Model, path: Path, **config: object) -> Path:
    """Write config.json and model.safetensors in the format of MiMo."""
    path.mkdir(parents=True, exist_ok=True)
    values: dict[str, object] = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "vocab_size": model.lm_head.out_features,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "attention_bias": True,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "num_nextn_predict_layers": len(model.mtp_layers),
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(values | config))
    tensors = {
        name if name.startswith("lm_head") else f"model.{name}": t.detach().clone()
        for name, t in model.state_dict().items()
    }
    save_file(tensors, str(path / "model.safetensors"))
    return path


def reference_accept_length(model: Any, prompt: Sequence[int], count: int, depth: int) -> tuple[int, int]:
    """Return (tokens, rounds) of greedy speculative decoding with chains.

    The first token comes from the pass over the prompt and is in no round.
    """
    truth = [*prompt, *model.greedy(prompt, count + depth + 1)]
    stop, length, rounds, emitted = len(prompt) + count, len(prompt) + 1, 0, 0
    while length < stop:
        chain, _ = model.draft(truth[:length], depth)
        accepted = next((i for i, token in enumerate(chain) if token != truth[length + i]), depth)
        rounds += 1
        emitted += min(accepted + 1, stop - length)
        length += accepted + 1
    return emitted, rounds
