"""An EAGLE-3 head and EAGLE-2's tree once more, in the plainest form: one path at a time, no cache, no batch, no masks.

Shares no code with the service. Written after the papers (arXiv 2503.01840, 2406.16858) and the published tensor names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file


class PlainEagle3:
    """A head read from its folder; fp32 (or fp64) on the CPU."""

    def __init__(self, folder: Path, embedding: torch.Tensor, dtype: torch.dtype = torch.float32, prefix: str = "midlayer.") -> None:
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(str(folder / "model.safetensors"))
        self.w = {name.removeprefix(prefix): (t.to(dtype) if t.is_floating_point() else t) for name, t in weights.items()}
        self.embedding = embedding.to(dtype)
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.eps = config["rms_norm_eps"]
        self.theta = config.get("rope_theta", 10000.0)
        self.offsets = self.w.get("d2t")

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        """Return the feature of concatenated aux states."""
        return aux @ self.w["fc.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.w[name]

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Rotate ``x [heads, head_dim]``, pair by pair."""
        half = self.head_dim // 2
        out = x.clone()
        for i in range(half):
            angle = position * self.theta ** (-2 * i / self.head_dim)
            a, b = x[:, i], x[:, i + half]
            out[:, i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def last_state(self, rows: Sequence[tuple[int, torch.Tensor, int]]) -> torch.Tensor:
        """Return the state of the last of ``(token, feature, position)`` rows, which sees all of them."""
        keys, values = [], []
        for token, feature, position in rows:
            pair = torch.cat([self.norm(self.embedding[token], "input_layernorm.weight"), self.norm(feature, "hidden_norm.weight")])
            keys.append(self.rotate((self.w["self_attn.k_proj.weight"] @ pair).view(self.kv_heads, -1), position))
            values.append((self.w["self_attn.v_proj.weight"] @ pair).view(self.kv_heads, -1))
        query = self.rotate((self.w["self_attn.q_proj.weight"] @ pair).view(self.heads, -1), position)
        outputs = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            scores = torch.stack([key[group] @ query[head] for key in keys]) / math.sqrt(self.head_dim)
            outputs.append(torch.softmax(scores, 0) @ torch.stack([value[group] for value in values]))
        hidden = feature + self.w["self_attn.o_proj.weight"] @ torch.cat(outputs)
        x = self.norm(hidden, "post_attention_layernorm.weight")
        gate, up = self.w["mlp.gate_proj.weight"] @ x, self.w["mlp.up_proj.weight"] @ x
        return hidden + self.w["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def logprobs(self, state: torch.Tensor) -> torch.Tensor:
        """Return log-probs over the draft vocabulary."""
        return torch.log_softmax(self.w["lm_head.weight"] @ self.norm(state, "norm.weight"), 0)

    def target_id(self, draft_id: int) -> int:
        return draft_id if self.offsets is None else draft_id + int(self.offsets[draft_id])


@dataclass(frozen=True)
class Node:
    """A candidate: the tokens from the root's child to itself, and its cumulative score."""

    path: tuple[int, ...]
    score: float


def reference_tree(
    head: PlainEagle3,
    tokens: Sequence[int],
    features: torch.Tensor,
    steps: int,
    topk: int,
    max_nodes: int,
    perturb: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
) -> tuple[dict[tuple[int, ...], float], float]:
    """Grow one tree.

    Args:
        head: The head.
        tokens: All committed tokens, the root last.
        features: ``[len(tokens) - 1, hidden]``.
        steps, topk, max_nodes: SGLang's meaning: levels, branching, nodes with the root.
        perturb: Maps (log-probs over the draft vocabulary, absolute index of the token) to the vector that picks and scores.

    Returns:
        Path → cumulative score of the kept nodes, and the smallest difference in score that decided anything.
    """
    length = len(tokens)
    stable = [(tokens[t + 1], features[t], t) for t in range(length - 1)]
    margins = [math.inf]

    def children(path: tuple[int, ...], state: torch.Tensor, score: float) -> list[tuple[Node, torch.Tensor]]:
        values = head.logprobs(state)
        if perturb is not None:
            values = perturb(values, length + len(path))
        ranked = sorted(range(len(values)), key=lambda i: -float(values[i]))
        if topk < len(ranked):
            margins.append(float(values[ranked[topk - 1]] - values[ranked[topk]]))
        return [(Node((*path, head.target_id(i)), score + float(values[i])), state) for i in ranked[:topk]]

    states: dict[tuple[int, ...], torch.Tensor] = {(): head.last_state(stable)}
    everything: list[Node] = []
    level = [node for node, _ in children((), states[()], 0.0)]
    everything += level
    beam = sorted(level, key=lambda node: -node.score)[:topk]
    for depth in range(1, steps):
        candidates: list[Node] = []
        for node in beam:
            # The whole path again from nothing: stable rows, then each ancestor with the state before it as its feature.
            rows = list(stable)
            for i, token in enumerate(node.path):
                rows.append((token, states[node.path[:i]], length - 1 + i))
            states[node.path] = head.last_state(rows)
            candidates += [child for child, _ in children(node.path, states[node.path], node.score)]
        everything += candidates
        ranked = sorted(candidates, key=lambda node: -node.score)
        if len(ranked) > topk and depth < steps - 1:
            margins.append(ranked[topk - 1].score - ranked[topk].score)
        beam = ranked[:topk]
    ranked = sorted(everything, key=lambda node: -node.score)
    if len(ranked) > max_nodes - 1 > 0:
        margins.append(ranked[max_nodes - 2].score - ranked[max_nodes - 1].score)
    return {node.path: node.score for node in ranked[: max_nodes - 1]}, min(margins)
