"""Sizes and random input tensors of the cases in `outrider bench kernels`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outrider.kernels.verify import SamplingTensors
from outrider.shared.attn.base import AttentionBatch, build_batch
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.spec.tree import mask_words

CACHE_BYTES = 512 << 20
"""Bytes of distinct data that each case cycles through. This is far more than a second-level cache holds."""
MAX_COPIES = 64


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """Sizes of the model, the draft and the batches for which the cases are made."""

    device: torch.device
    dtype: torch.dtype
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    page_size: int
    context: int
    steps: int
    topk: int
    nodes: int
    rows: tuple[int, ...]
    batches: tuple[int, ...]
    prefill: int

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        head: Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype,
        *,
        small: bool,
    ) -> KernelSizes:
        """Return the sizes for a model shape; `small` selects sizes for a test on a CPU."""
        return cls(
            device=device,
            dtype=dtype,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            draft_vocab=head["draft_vocab_size"],
            page_size=16,
            context=48 if small else 768,
            steps=3 if small else 5,
            topk=2 if small else 8,
            nodes=5 if small else 32,
            rows=(1, 5) if small else (1, 8, 16, 32, 64),
            batches=(1, 2) if small else (1, 4, 16),
            prefill=32 if small else 2048,
        )

    def random(self, *shape: int) -> torch.Tensor:
        """Return normally distributed random numbers."""
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return the target's matrices as name → (out, in). A fused matrix counts as one matrix."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (queries + 2 * keys, self.hidden),
            "o": (self.hidden, queries),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "lm_head": (self.vocab, self.hidden),
            "draft qkv": (queries + 2 * keys, 2 * self.hidden),
            "draft lm_head": (self.draft_vocab, self.hidden),
        }

    def attention_cases(self) -> Iterator[tuple[str, int, int, int, bool]]:
        """Yield attention cases: (name, batch, rows per sequence, context before them, True for a tree)."""
        for batch in self.batches:
            yield "decode", batch, 1, self.context, False
            yield f"verify {self.nodes}", batch, self.nodes, self.context, True
        yield f"prefill {self.prefill}", 1, self.prefill, 0, False
        yield "decode", 1, 1, 4 * self.prefill, False

    def forward_cases(self) -> Iterator[tuple[int, int]]:
        """Yield the forward passes to time, as (batch, rows per sequence)."""
        for rows in self.rows:
            yield 1, rows
        for batch in self.batches[1:]:
            yield batch, 1
            yield batch, self.nodes

    def planned(self, pool: KVPool, batch: int, rows: int, context: int) -> AttentionBatch:
        """Return an attention batch in which each sequence verifies `rows` nodes after `context` tokens."""
        leases = [lease for lease in (pool.lease(context + rows) for _ in range(batch)) if lease is not None]
        ancestors = None if rows == 1 else chain_masks(rows, self.device).repeat(batch, 1)
        return build_batch(pool, leases, [context] * batch, [rows] * batch, ancestors=ancestors)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Arguments of `tree_attention`, except the K and V planes."""

    q: torch.Tensor
    rest: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
    keywords: Mapping[str, Any]

    def before(self, planes: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, ...]:
        """Return the positional arguments of `tree_attention`, with `planes` in their position."""
        return (self.q, *planes, *self.rest)


def copies_for(nbytes: int, small: bool) -> int:
    """Return how many copies of `nbytes` bytes are needed so that no cache holds all copies."""
    return 2 if small else max(2, min(MAX_COPIES, -(-CACHE_BYTES // max(nbytes, 1))))


def paged(sizes: KernelSizes, batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random K and V planes with room for `tokens` tokens of each of `batch` sequences."""
    pages = batch * -(-tokens // sizes.page_size)
    shape = (pages, sizes.page_size, sizes.kv_heads, sizes.head_dim)
    return sizes.random(*shape), sizes.random(*shape)


def attention_inputs(
    sizes: KernelSizes, batch: int, rows: int, context: int, *, is_tree: bool
) -> AttentionInputs:
    """Return the arguments of attention over planes made by `paged`."""
    device = sizes.device
    pages = -(-(context + rows) // sizes.page_size)
    table = torch.randperm(batch * pages, device=device).to(torch.int32).view(batch, pages)

    def lengths(value: int) -> torch.Tensor:
        return torch.full((batch,), value, dtype=torch.int32, device=device)

    query_start = torch.arange(batch + 1, dtype=torch.int32, device=device) * rows
    ancestors = chain_masks(rows, device).repeat(batch, 1) if is_tree else None
    keywords = {"scale": sizes.head_dim**-0.5, "max_query_len": rows, "max_kv_len": context + rows}
    q = sizes.random(batch * rows, sizes.heads, sizes.head_dim)
    return AttentionInputs(
        q, (table, lengths(context), lengths(context + rows), query_start, ancestors), keywords
    )


def chain_masks(nodes: int, device: torch.device) -> torch.Tensor:
    """Return the ancestor masks of a chain in the format of a tree's masks: ``[nodes, words] int32``."""
    words = mask_words(nodes)
    column = torch.arange(32 * words, device=device)
    visible = column[None, :] <= torch.arange(nodes, device=device)[:, None]
    bits = torch.where(visible, 1 << (column % 32), 0).view(nodes, words, 32).sum(-1)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)


def sampling(sizes: KernelSizes, rows: int, temperature: float) -> SamplingTensors:
    """Return sampling parameters without filters."""
    device = sizes.device
    return SamplingTensors(
        temperature=torch.full((rows,), temperature, device=device),
        top_k=torch.zeros(rows, dtype=torch.int32, device=device),
        top_p=torch.ones(rows, device=device),
        min_p=torch.zeros(rows, device=device),
        seeds=torch.arange(rows, device=device),
        choices=torch.zeros(rows, dtype=torch.int32, device=device),
        all_greedy=temperature == 0,
        any_filter=False,
    )


Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def trees(sizes: KernelSizes, batch: int, candidates: int) -> Four:
    """Return inputs for building draft trees: scores, tokens and parents of the candidates, and the roots.

    The first level of each tree has `topk` candidates. Each later level contains the children of a beam of
    `topk` candidates.
    """
    device, topk = sizes.device, sizes.topk
    parents = [-1] * topk
    for index in range(topk, candidates):
        level = (index - topk) // topk**2
        first = 0 if level == 0 else topk + (level - 1) * topk**2
        parents.append(first + (index - topk) % topk**2 // topk)
    steps = torch.tensor(
        [0 if index < topk else 1 + (index - topk) // topk**2 for index in range(candidates)], device=device
    )
    scores = -torch.rand(batch, candidates, device=device) - steps
    tokens = torch.randint(0, sizes.vocab, (batch, candidates), dtype=torch.int32, device=device)
    row = torch.tensor(parents, dtype=torch.int32, device=device)
    roots = torch.zeros(batch, dtype=torch.int32, device=device)
    return scores, tokens, row.expand(batch, -1).contiguous(), roots


@dataclass(frozen=True, slots=True)
class ChainInputs:
    """Arguments of `verify_tree` and `synthetic_acceptance`, under the names of the parameters."""

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    num_nodes: torch.Tensor
    ancestors: torch.Tensor
    chosen: torch.Tensor
    positions: torch.Tensor
    seeds: torch.Tensor
    thresholds: torch.Tensor


def chain_inputs(sizes: KernelSizes, batch: int) -> ChainInputs:
    """Return chains of `nodes` nodes whose tokens all agree with the target's choices."""
    device, nodes = sizes.device, sizes.nodes
    index = torch.arange(nodes, dtype=torch.int32, device=device)
    tokens = torch.randint(0, sizes.vocab, (batch, nodes), dtype=torch.int32, device=device)
    return ChainInputs(
        tokens=tokens,
        parents=(index - 1).expand(batch, -1).contiguous(),
        depths=index.expand(batch, -1).contiguous(),
        num_nodes=torch.full((batch,), nodes, dtype=torch.int32, device=device),
        ancestors=chain_masks(nodes, device).expand(batch, -1, -1).contiguous(),
        chosen=torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1).long(),
        positions=torch.arange(batch, device=device),
        seeds=torch.arange(batch, device=device),
        thresholds=torch.full((16,), 0.4, device=device),
    )
