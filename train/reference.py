"""A simple reference implementation of EAGLE-3 drafting and tree verification in torch, for batch size 1.

Only the module `evaluate` uses this code, which is short and slow. It shares nothing with the trainer and the
services: it reads the head from the published file layout and runs the target with ``transformers``. A
mistake in an exported checkpoint therefore changes the measured results.

The notation follows Li et al. (arXiv 2503.01840). L is the number of committed tokens without the root. Row t
of the head's input consists of the feature of position t and the token x_{t+1}.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Settings of the dynamic tree. ``num_draft_tokens`` limits its nodes, including the root."""

    num_steps: int = 5
    topk: int = 4
    num_draft_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings. Temperature 0 is greedy. At higher temperatures, noise is added before the argmax.

    The noise depends only on the seed and the position. If ``coupled`` is True, the drafter adds the same
    noise when it ranks its candidate tokens.
    """

    temperature: float
    seed: int
    coupled: bool = False


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """One drafted token. ``parent`` is an index into the candidate list; -1 stands for the root."""

    token: int
    parent: int
    depth: int
    score: float


def gumbel(seed: int, position: int, vocab: int) -> Tensor:
    """Return the Gumbel noise of an absolute position, [vocab] fp32."""
    uniform = torch.rand(vocab, generator=torch.Generator().manual_seed(seed * 1_000_003 + position))
    return -torch.log(-torch.log(uniform.clamp(1e-10, 1 - 1e-7)))


def choose_token(logits: Tensor, sampling: Sampling, position: int) -> int:
    """Choose the token at ``position`` from logits [vocab]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(
        (
            F.log_softmax(logits / sampling.temperature, -1) + gumbel(sampling.seed, position, len(logits))
        ).argmax()
    )


class ReferenceTarget:
    """The target, run by ``transformers``. After each round, its cache contains no rejected nodes."""

    def __init__(self, directory: Path) -> None:
        model: Any = AutoModelForCausalLM
        self.model = model.from_pretrained(directory, dtype=torch.float32)
        self.model.eval()
        n = self.model.config.num_hidden_layers
        self.aux_inputs = (2, n // 2, n - 3)  # hidden_states[i] is the input of layer i.
        self.reset()

    def reset(self) -> None:
        """Remove the sequence from the cache."""
        self.cache = DynamicCache(config=self.model.config)
        self.length = 0

    @torch.no_grad()
    def forward(self, tokens: list[int], depths: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Run the target on new rows (tokens), which follow the cached rows.

        Args:
            tokens: The n token ids of the new rows.
            depths: [n] int64, position of each row relative to the cached length.
            visible: [n, n] bool, True where a new row (first axis) sees a new row (second axis). Each row
                must see itself.

        Returns:
            Logits [n, vocab] and aux features [n, 3*hidden].
        """
        n = len(tokens)
        mask = torch.cat((torch.ones(n, self.length, dtype=torch.bool), visible), 1)
        bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
        out = self.model(
            input_ids=torch.tensor([tokens]),
            position_ids=(self.length + depths)[None],
            attention_mask=bias,
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=True,
        )
        return out.logits[0], torch.cat([out.hidden_states[i][0] for i in self.aux_inputs], -1)

    def keep(self, rows: list[int]) -> None:
        """Remove rows that the last forward pass appended to the cache, except the given ones."""
        index = torch.tensor([*range(self.length), *(self.length + r for r in rows)])
        layers: list[Any] = self.cache.layers
        for layer in layers:
            layer.keys, layer.values = layer.keys[:, :, index], layer.values[:, :, index]
        self.length = len(index)


class ReferenceHead:
    """The EAGLE-3 head, read from a checkpoint folder."""

    def __init__(self, directory: Path, embedding: Tensor) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.w = {
            k: v.float() if v.is_floating_point() else v
            for k, v in load_file(str(directory / "model.safetensors")).items()
        }
        self.embedding = embedding
        self.target_ids = torch.arange(self.config["draft_vocab_size"]) + self.w["d2t"]
        self.reset()

    def reset(self) -> None:
        """Remove the sequence from the cache."""
        kv, dim = self.config["num_key_value_heads"], self.config["head_dim"]
        self.keys, self.values = torch.zeros(kv, 0, dim), torch.zeros(kv, 0, dim)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x
            * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
            * self.w[name + ".weight"]
        )

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.config["rope_theta"] ** (-torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat(
            (x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1
        )

    def rows(
        self,
        feature: Tensor,
        tokens: list[int],
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the head on n rows. A row consists of a feature and a token.

        Args:
            feature: [n, hidden], after ``fc``. Apply ``fc`` to the target's features before the call.
            tokens: n token ids. The token of each row is one position after the row's feature.
            positions: [n] positions for the rotary embedding.
            keys: [kv_heads, m, head_dim], keys of earlier rows.
            values: [kv_heads, m, head_dim], values of earlier rows.
            visible: [n, m + n] bool, True where a new row (first axis) sees an earlier or a new row (second
                axis).

        Returns:
            Hidden states [n, hidden] before the final norm, and the keys and values of the earlier rows
            followed by those of the new rows.
        """
        c, p = self.config, "midlayer.self_attn."
        n, dim = len(tokens), c["head_dim"]
        e = self._norm(self.embedding[torch.tensor(tokens)], "midlayer.input_layernorm")
        x = torch.cat((e, self._norm(feature, "midlayer.hidden_norm")), -1)
        q, k, v = (
            F.linear(x, self.w[p + f"{name}_proj.weight"]).view(n, -1, dim).transpose(0, 1) for name in "qkv"
        )
        q, k = self._rope(q, positions), self._rope(k, positions)
        keys, values = torch.cat((keys, k), 1), torch.cat((values, v), 1)
        groups = c["num_attention_heads"] // c["num_key_value_heads"]
        scores = q @ keys.repeat_interleave(groups, 0).mT / dim**0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        attended = (weights @ values.repeat_interleave(groups, 0)).transpose(0, 1).flatten(1)
        h = feature + F.linear(attended, self.w[p + "o_proj.weight"])
        y = self._norm(h, "midlayer.post_attention_layernorm")
        gate = F.silu(F.linear(y, self.w["midlayer.mlp.gate_proj.weight"])) * F.linear(
            y, self.w["midlayer.mlp.up_proj.weight"]
        )
        return h + F.linear(gate, self.w["midlayer.mlp.down_proj.weight"]), keys, values

    def extend(self, features: Tensor, tokens: list[int]) -> Tensor:
        """Append rows with the target's own features, [n, 3*hidden], to the committed rows of the cache.

        Returns the last row's hidden state, [1, hidden].
        """
        done, n = self.keys.shape[1], len(tokens)
        visible = torch.cat(
            (torch.ones(n, done, dtype=torch.bool), torch.ones(n, n, dtype=torch.bool).tril()), 1
        )
        feature = F.linear(features, self.w["fc.weight"])
        h, self.keys, self.values = self.rows(
            feature, tokens, torch.arange(done, done + n), self.keys, self.values, visible
        )
        return h[-1:]

    def scores(self, hidden: Tensor, sampling: Sampling, position: int) -> Tensor:
        """Return log-scores [n, draft_vocab] of the candidates for the absolute position ``position``."""
        log_q = F.log_softmax(F.linear(self._norm(hidden, "norm"), self.w["lm_head.weight"]), -1)
        if not (sampling.coupled and sampling.temperature > 0):
            return log_q
        noise = gumbel(sampling.seed, position, len(self.embedding))[self.target_ids]
        return F.log_softmax(log_q / sampling.temperature + noise, -1)

    def grow(self, last: Tensor, shape: TreeShape, sampling: Sampling) -> list[DraftedToken]:
        """Grow the dynamic tree from the last ``extend`` row (EAGLE-2, arXiv 2406.16858).

        Returns the tree's nodes without the root. Parents precede their children.
        """
        stable = self.keys.shape[
            1
        ]  # L. The rows of level i have position L + i - 1. A token of level 1 has absolute position L + 1.
        # 1. Level 1: the topk children of the root.
        candidates: list[DraftedToken] = []
        value, child = self.scores(last, sampling, stable + 1)[0].topk(shape.topk)
        for s, t in zip(value.tolist(), child.tolist(), strict=True):
            candidates.append(DraftedToken(int(self.target_ids[t]), -1, 1, s))
        beam = list(range(len(candidates)))
        features = {-1: last[0]}
        row_of: dict[int, int] = {}  # candidate -> its row, counted after the committed rows
        keys, values = self.keys, self.values
        # 2. Further levels: expand the topk best candidates of the previous level.
        for level in range(1, shape.num_steps):
            earlier = keys.shape[1] - stable
            visible = torch.zeros(len(beam), stable + earlier + len(beam), dtype=torch.bool)
            visible[:, :stable] = True
            for r, b in enumerate(beam):
                visible[r, stable + earlier + r] = True
                node = candidates[b].parent
                while node >= 0:
                    visible[r, stable + row_of[node]] = True
                    node = candidates[node].parent
            feature = torch.stack([features[candidates[b].parent] for b in beam])
            positions = torch.full((len(beam),), stable + level - 1)
            hidden, keys, values = self.rows(
                feature, [candidates[b].token for b in beam], positions, keys, values, visible
            )
            row_of |= {b: earlier + r for r, b in enumerate(beam)}
            features |= {b: hidden[r] for r, b in enumerate(beam)}
            value, child = self.scores(hidden, sampling, stable + 1 + level).topk(shape.topk)
            fresh = range(len(candidates), len(candidates) + len(beam) * shape.topk)
            for r, b in enumerate(beam):
                for s, t in zip(value[r].tolist(), child[r].tolist(), strict=True):
                    candidates.append(
                        DraftedToken(int(self.target_ids[t]), b, level + 1, candidates[b].score + s)
                    )
            beam = sorted(fresh, key=lambda i: (-candidates[i].score, i))[: shape.topk]
        # 3. Rerank: keep the best candidates of all levels.
        chosen = sorted(
            sorted(range(len(candidates)), key=lambda i: (-candidates[i].score, i))[
                : shape.num_draft_tokens - 1
            ]
        )
        place = {old: new for new, old in enumerate(chosen)} | {-1: -1}
        return [
            DraftedToken(c.token, place[c.parent], c.depth, c.score) for c in (candidates[i] for i in chosen)
        ]


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """The result for one prompt: the emitted tokens, and the number of tokens that each round emitted."""

    tokens: list[int]
    emitted: list[int]


@torch.no_grad()
def speculate(
    target: ReferenceTarget,
    head: ReferenceHead,
    prompt: list[int],
    max_new: int,
    shape: TreeShape,
    sampling: Sampling,
) -> ReferenceRun:
    """Generate ``max_new`` tokens with speculation. End of text does not stop generation."""
    # 1. Prefill.
    target.reset()
    head.reset()
    n = len(prompt)
    logits, features = target.forward(prompt, torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril())
    target.keep(list(range(n)))
    root = choose_token(logits[-1], sampling, n)
    tokens: list[int] = [root]
    emitted: list[int] = []
    last = head.extend(features, [*prompt[1:], root])
    while len(tokens) < max_new:
        # 2. Draft a tree.
        tree = head.grow(last, shape, sampling)
        # 3. Verify: run all nodes in one pass, then follow the chosen tokens from the root.
        rows = [root, *(c.token for c in tree)]
        visible = torch.eye(len(rows), dtype=torch.bool)
        for i, c in enumerate(tree, 1):
            visible[i] |= visible[c.parent + 1]
        depths = torch.tensor([0, *(c.depth for c in tree)])
        logits, features = target.forward(rows, depths, visible)
        path = [0]
        while True:
            token = choose_token(logits[path[-1]], sampling, target.length + len(path))
            child = [i for i, c in enumerate(tree, 1) if c.parent + 1 == path[-1] and c.token == token]
            if not child:
                break
            path.append(child[0])
        # 4. Commit the accepted nodes and the bonus token.
        target.keep(path)
        fresh = [*(rows[i] for i in path[1:]), token]
        last = head.extend(features[path], fresh)
        tokens += fresh
        emitted.append(len(fresh))
        root = token
    return ReferenceRun(tokens[:max_new], emitted)


@torch.no_grad()
def generate_without_draft(
    target: ReferenceTarget, prompt: list[int], max_new: int, sampling: Sampling
) -> list[int]:
    """Generate without speculation, for comparison."""
    target.reset()
    rows = prompt
    tokens: list[int] = []
    while len(tokens) < max_new:
        n = len(rows)
        logits, _ = target.forward(rows, torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril())
        target.keep(list(range(n)))
        tokens.append(choose_token(logits[-1], sampling, target.length))
        rows = [tokens[-1]]
    return tokens
