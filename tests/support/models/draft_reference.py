"""A plain reference of an EAGLE-3 head and of EAGLE-2's tree growth, without cache or masks.

Each path of the tree is computed from scratch. The reference shares no code with the service. It follows the
papers (arXiv 2503.01840 and 2406.16858) and the published tensor names.
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
    """An EAGLE-3 head loaded from a checkpoint folder. It computes in fp32 or fp64 on the CPU."""

    def __init__(
        self,
        folder: Path,
        embedding: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        prefix: str = "midlayer.",
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(str(folder / "model.safetensors"))
        self.w = {
            name.removeprefix(prefix): (t.to(dtype) if t.is_floating_point() else t)
            for name, t in weights.items()
        }
        self.embedding = embedding.to(dtype)
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.eps = config["rms_norm_eps"]
        self.theta = config.get("rope_theta", 10000.0)
        self.offsets = self.w.get("d2t")

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        """Return the feature that `fc` computes from the concatenated aux states."""
        return aux @ self.w["fc.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return the RMS norm of `x`, scaled by the named weight."""
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.w[name]

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Apply rotary embedding to ``x [heads, head_dim]``, pair by pair."""
        half = self.head_dim // 2
        out = x.clone()
        for i in range(half):
            angle = position * self.theta ** (-2 * i / self.head_dim)
            a, b = x[:, i], x[:, i + half]
            out[:, i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def last_state(self, rows: Sequence[tuple[int, torch.Tensor, int]]) -> torch.Tensor:
        """Return the state of the last ``(token, feature, position)`` row. The row attends to all rows."""
        keys, values = [], []
        for token, feature, position in rows:
            pair = torch.cat(
                [
                    self.norm(self.embedding[token], "input_layernorm.weight"),
                    self.norm(feature, "hidden_norm.weight"),
                ]
            )
            keys.append(
                self.rotate((self.w["self_attn.k_proj.weight"] @ pair).view(self.kv_heads, -1), position)
            )
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
        """Return log-probabilities over the draft vocabulary."""
        return torch.log_softmax(self.w["lm_head.weight"] @ self.norm(state, "norm.weight"), 0)

    def target_id(self, draft_id: int) -> int:
        """Return the target's token id for a draft vocabulary id."""
        return draft_id if self.offsets is None else draft_id + int(self.offsets[draft_id])


@dataclass(frozen=True)
class Candidate:
    """A scored candidate node.

    Attributes:
        path: Tokens from the root's child down to this node.
        parent: Index of the parent candidate. -1 stands for the root.
        score: Cumulative log-probability.
    """

    path: tuple[int, ...]
    parent: int
    score: float


@dataclass(frozen=True)
class PlainTree:
    """A tree in the form in which it is sent to verification.

    Attributes:
        tokens, parents: Token and parent of each node, in order. Node 0 is the root, with parent -1.
        scores: Cumulative score of each path, without the root.
        margin: Smallest score difference that decided which nodes are in the tree, or their order.
    """

    tokens: list[int]
    parents: list[int]
    scores: dict[tuple[int, ...], float]
    margin: float

    def accepted(self, wanted: Callable[[tuple[int, ...]], int]) -> list[int]:
        """Return the nodes that verification accepts, in order.

        Args:
            wanted: Returns the target's token after a path.
        """
        number = {(): 0} | {path: node for node, path in enumerate(self.scores, 1)}
        path: tuple[int, ...] = ()
        nodes: list[int] = []
        while (path := (*path, wanted(path))) in number:
            nodes.append(number[path])
        return nodes


def reference_tree(
    head: PlainEagle3,
    tokens: Sequence[int],
    features: torch.Tensor,
    steps: int,
    topk: int,
    max_nodes: int,
    perturb: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
) -> PlainTree:
    """Grow one tree as the EAGLE-2 paper describes (arXiv 2406.16858, section 4).

    1. The `topk` best children of the root become candidates and form the first beam.
    2. At each further step, the `topk` best children of each beam node become candidates, in beam order. The
       `topk` best of them form the next beam.
    3. The best ``max_nodes - 1`` of all candidates are kept, in the order in which they became candidates.

    Every ranking is by score. Equal scores are ranked by candidate order.

    Args:
        head: The head.
        tokens: All committed tokens. The last one is the root.
        features: ``[len(tokens) - 1, hidden]``, the feature of each token before the root.
        steps, topk, max_nodes: Number of levels, branching, and number of nodes including the root, as in
            SGLang.
        perturb: Maps log-probabilities over the draft vocabulary and the token's absolute index to the vector
            that is used to choose tokens and to compute scores.
    """
    length = len(tokens)
    stable = [(tokens[t + 1], features[t], t) for t in range(length - 1)]
    states: dict[tuple[int, ...], torch.Tensor] = {}
    candidates: list[Candidate] = []
    margins = [math.inf]

    def rank(scores: Sequence[float], count: int, *, ordered: bool = True) -> list[int]:
        """Return the indices of the `count` best scores, best first, and record the score margins."""
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        for above in range(0 if ordered else count - 1, min(count, len(order) - 1)):
            margins.append(scores[order[above]] - scores[order[above + 1]])
        return order[:count]

    def expand(index: int) -> list[int]:
        """Append the children of a candidate (-1 is the root) as candidates, and return their indices."""
        path = candidates[index].path if index >= 0 else ()
        # Compute the whole path from scratch: the stable rows, then a row for each ancestor. The feature of
        # an ancestor's row is the parent's state.
        rows = [*stable, *((token, states[path[:i]], length - 1 + i) for i, token in enumerate(path))]
        states[path] = head.last_state(rows)
        values = head.logprobs(states[path])
        if perturb is not None:
            values = perturb(values, length + len(path))
        known: list[float] = values.tolist()
        score = candidates[index].score if index >= 0 else 0.0
        first = len(candidates)
        candidates.extend(
            Candidate((*path, head.target_id(i)), index, score + known[i]) for i in rank(known, topk)
        )
        return list(range(first, len(candidates)))

    level = expand(-1)
    for step in range(1, steps):
        beam = rank([candidates[i].score for i in level], topk) if step > 1 else list(range(len(level)))
        level = [child for i in beam for child in expand(level[i])]
    kept = (
        sorted(rank([candidate.score for candidate in candidates], max_nodes - 1, ordered=False))
        if max_nodes > 1
        else []
    )
    node = {-1: 0} | {index: position for position, index in enumerate(kept, 1)}
    return PlainTree(
        tokens=[tokens[-1], *(candidates[index].path[-1] for index in kept)],
        parents=[-1, *(node[candidates[index].parent] for index in kept)],
        scores={candidates[index].path: candidates[index].score for index in kept},
        margin=min(margins),
    )
