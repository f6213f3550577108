"""A plain reference of the EAGLE heads and of their training: explicit masks, no cache, no fused matrices.

All rows of a sequence run in one pass. The reference shares no code with the service. It follows arXiv
2401.15077, 2406.16858 and 2503.01840, and the published tensor names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import silu

Row = tuple[int, torch.Tensor, int]
"""A token, its feature and its position."""


class PlainHead:
    """An EAGLE or EAGLE-3 head with canonical tensor names (``layers.N.*``).

    Args:
        config: The flat configuration.
        weights: Name → tensor. Tensors that require gradients can be trained.
        embedding, lm_head: The target's matrices, ``[vocab, hidden]``, for heads that have none.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
    ) -> None:
        self.config = config
        self.w = weights
        self.dtype = embedding.dtype
        self.embedding = weights.get("embed_tokens.weight", embedding)
        self.head = weights.get("lm_head.weight", lm_head)
        self.is_eagle3 = "layers.0.hidden_norm.weight" in weights
        self.is_mistral = not self.is_eagle3 and "norm.weight" in weights
        self.num_heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.ids = torch.arange(self.head.shape[0])
        if "d2t" in weights:
            self.ids = torch.arange(len(weights["d2t"])) + weights["d2t"]

    @classmethod
    def read(
        cls, folder: Path, target_tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float64
    ) -> PlainHead:
        """Read a head that has a flat configuration and names with ``midlayer.`` or ``layers.0.``."""
        config = json.loads((folder / "config.json").read_text())
        config |= config.get("eagle_config", {})
        stored = load_file(str(folder / "model.safetensors"))
        weights = {
            name.replace("midlayer.", "layers.0."): tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in stored.items()
        }
        embedding = target_tensors["model.embed_tokens.weight"].to(dtype)
        return cls(config, weights, embedding, target_tensors["lm_head.weight"].to(dtype))

    def cut(self, token_ids: Sequence[int]) -> PlainHead:
        """Return the same head restricted to these target token ids (FR-Spec)."""
        other = PlainHead(self.config, self.w, self.embedding, self.head)
        other.ids = torch.tensor(sorted(token_ids))
        other.head = self.head[other.ids]
        return other

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Return the features for the target's states ``[..., n_aux * hidden]``.

        EAGLE-1 and EAGLE-2 use the states unchanged.
        """
        if not self.is_eagle3:
            return states
        count = sum(name.startswith("fc_norm.") for name in self.w)
        if count:
            states = torch.cat(
                [self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(states.chunk(count, -1))],
                -1,
            )
        if "input_norm.weight" in self.w:
            states = self._norm(states, "input_norm.weight")
        return self._linear(states, "fc")

    def states(
        self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """Run several rows in one pass.

        Args:
            tokens: ``[..., rows]``, token of each row.
            features: ``[..., rows, hidden]``, feature of each row.
            positions: ``[rows]``, position of each row.
            visible: ``[rows, rows] bool``, True where a row (first axis) sees another row (second axis).
        """
        window = self.config.get("sliding_window")
        if window:
            visible = visible & (positions[:, None] - positions[None, :] < window)
        embedded = self.embedding[tokens]
        if not self.is_eagle3:
            x = self._linear(torch.cat([embedded, features], -1), "fc")
            residual = x
            if "layers.0.input_layernorm.weight" in self.w:
                x = self._norm(x, "layers.0.input_layernorm.weight")
        else:
            normed = self._norm(features, "layers.0.hidden_norm.weight")
            x = torch.cat([self._norm(embedded, "layers.0.input_layernorm.weight"), normed], -1)
            residual = normed if self.config.get("norm_before_residual") else features
        for layer in range(self.config["num_hidden_layers"]):
            if layer:
                norms = ("hidden_norm", "input_layernorm")
                name = next(n for n in (f"layers.{layer}.{norm}.weight" for norm in norms) if n in self.w)
                x, residual = self._norm(residual, name), residual
            residual = residual + self._attend(layer, x, positions, visible)
            x = self._norm(residual, f"layers.{layer}.post_attention_layernorm.weight")
            prefix = f"layers.{layer}.mlp."
            inner = silu(self._linear(x, f"{prefix}gate_proj")) * self._linear(x, f"{prefix}up_proj")
            residual = residual + self._linear(inner, f"{prefix}down_proj")
        return (
            self._norm(residual, "norm.weight")
            if self.config.get("norm_output") or self.is_mistral
            else residual
        )

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits over the draft vocabulary."""
        if self.is_eagle3 and not self.config.get("norm_output"):
            states = self._norm(states, "norm.weight")
        return states @ self.head.T

    def last_state(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return the state of the last row. Each row sees itself and all rows before it.

        `draft_reference.reference_tree` calls this.
        """
        tokens, features, positions = zip(*rows, strict=True)
        visible = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
        with torch.no_grad():
            return self.states(
                torch.tensor(tokens), torch.stack(list(features)), torch.tensor(positions), visible
            )[-1]

    def logprobs(self, state: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities over the draft vocabulary."""
        with torch.no_grad():
            return torch.log_softmax(self.logits(state), -1)

    def target_id(self, draft_id: int) -> int:
        """Return the target's token id for an id of the draft vocabulary."""
        return int(self.ids[draft_id])

    def _attend(
        self, layer: int, x: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        prefix = f"layers.{layer}.self_attn."
        if f"{prefix}kv_b_proj.weight" in self.w:
            return self._attend_latent(prefix, x, positions, visible)
        q, k, v = (
            self._linear(x, f"{prefix}{part}_proj").unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
            for part in "qkv"
        )
        if f"{prefix}q_norm.weight" in self.w:
            q, k = self._norm(q, f"{prefix}q_norm.weight"), self._norm(k, f"{prefix}k_norm.weight")
        turn = self._rotate_pairs if self.config.get("turns_pairs") else self._rotate
        q, k = turn(q, positions), turn(k, positions)
        k, v = (part.repeat_interleave(self.num_heads // self.kv_heads, -3) for part in (k, v))
        scores = (q @ k.transpose(-1, -2) / self.head_dim**0.5).masked_fill(~visible, float("-inf"))
        return self._linear((scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2), f"{prefix}o_proj")

    def _attend_latent(
        self, prefix: str, x: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """Attend as DeepSeek-V2 without absorption: compute each head's K and V from the latent vector."""
        rank, nope, rope = (
            self.config[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        )
        if f"{prefix}q_proj.weight" in self.w:
            q = self._linear(x, f"{prefix}q_proj")
        else:
            q = self._linear(
                self._norm(self._linear(x, f"{prefix}q_a_proj"), f"{prefix}q_a_layernorm.weight", 1e-6),
                f"{prefix}q_b_proj",
            )
        q = q.unflatten(-1, (-1, nope + rope)).transpose(-3, -2)  # [heads, rows, nope + rope]
        compressed = self._linear(x, f"{prefix}kv_a_proj_with_mqa")
        latent = self._norm(compressed[..., :rank], f"{prefix}kv_a_layernorm.weight", 1e-6)
        keys_values = (
            self._linear(latent, f"{prefix}kv_b_proj").unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
        )
        shared_key = self._rotate_pairs(compressed[..., rank:], positions)
        scores = q[..., :nope] @ keys_values[..., :nope].transpose(-1, -2)
        scores = scores + self._rotate_pairs(q[..., nope:], positions) @ shared_key.transpose(-1, -2)
        weights = (scores / (nope + rope) ** 0.5).masked_fill(~visible, float("-inf")).softmax(-1)
        return self._linear(
            (weights @ keys_values[..., nope:]).transpose(-3, -2).flatten(-2), f"{prefix}o_proj"
        )

    def _rotate_pairs(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        width = rows.shape[-1]
        rates = (self.config.get("rope_theta") or 10000.0) ** (
            -torch.arange(0, width, 2, dtype=self.dtype) / width
        )
        angles = positions.to(self.dtype)[:, None] * rates
        a, b = rows[..., 0::2], rows[..., 1::2]
        return torch.stack(
            [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1
        ).flatten(-2)

    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        theta = self.config.get("rope_theta") or 10000.0
        rates = theta ** (-torch.arange(0, self.head_dim, 2, dtype=self.dtype) / self.head_dim)
        angles = positions.to(self.dtype)[:, None] * rates
        a, b = heads.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def _norm(self, x: torch.Tensor, name: str, eps: float | None = None) -> torch.Tensor:
        return (
            x
            * torch.rsqrt((x * x).mean(-1, keepdim=True) + (eps or self.config["rms_norm_eps"]))
            * self.w[name]
        )

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out


def train(
    head: PlainHead,
    tokens: torch.Tensor,
    states: torch.Tensor,
    labels: torch.Tensor,
    *,
    depth: int,
    rate: float,
    steps: int,
) -> float:
    """Train a head by unrolling it as in drafting: it reads the target's features first, then its own states.

    Args:
        head: The head to train. Its weights must require gradients.
        tokens: ``[batches, batch, length]``, the training texts.
        states: ``[batches, batch, length, width]``, the target's states that `project` reads.
        labels: ``[batches, batch, length, vocab]``, the target's logits.
        depth: Number of unrolled levels. The row of level i at position t reads token t + 1 + i and predicts
            token t + 2 + i.
        rate: Initial learning rate of Adam. The rate then follows a cosine.
        steps: Number of optimizer steps. The steps cycle through the batches.

    Returns:
        The loss of the last step.
    """
    parameters = [tensor for tensor in head.w.values() if tensor.requires_grad]
    optimiser = torch.optim.Adam(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, eta_min=rate / 20)
    count = tokens.shape[2] - 1 - depth
    row = torch.arange(count)
    loss = torch.zeros(())
    for step in range(steps):
        batch, own = tokens[step % len(tokens)], labels[step % len(tokens)][..., head.ids]
        features = [head.project(states[step % len(tokens)][:, :count])]
        loss = torch.zeros(())
        for level in range(depth):
            levels = torch.arange(level + 1).repeat_interleave(count)
            rows = row.repeat(level + 1)
            # A row sees the first level up to its own position, and only its own position in later levels.
            visible = torch.where(
                levels[None, :] == 0, rows[None, :] <= rows[:, None], rows[None, :] == rows[:, None]
            )
            visible &= levels[None, :] <= levels[:, None]
            ids = torch.cat([batch[:, 1 + i : 1 + i + count] for i in range(level + 1)], 1)
            out = head.states(ids, torch.cat(features, 1), rows + levels, visible)[:, -count:]
            wanted = own[:, 1 + level : 1 + level + count].softmax(-1)
            loss = loss - 0.8**level * (wanted * head.logits(out).log_softmax(-1)).sum(-1).mean()
            features.append(out)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
    return float(loss.detach())
