"""How many bytes a step must read and how many operations it must do, from the shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.shared.nn.config.model_config import ModelConfig

NUM_AUX = 3


@dataclass(frozen=True, slots=True)
class Work:
    """What something must read and compute at least."""

    nbytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.nbytes + other.nbytes, self.flops + other.flops)

    def times(self, count: float) -> Work:
        """Return the work of doing it `count` times, or of a share of it."""
        return Work(self.nbytes * count, self.flops * count)


@dataclass(frozen=True, slots=True)
class Narrow:
    """Bytes of the target's numbers that are not as wide as the others; None where they are.

    Attributes:
        products: Of a weight of the layers and of the output head.
        cache: Of a cached number.
    """

    products: int | None = None
    cache: int | None = None


def layer_parameters(
    hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, input_size: int | None = None
) -> int:
    """Return the matrix elements of a Llama-like layer."""
    projections = (heads + 2 * kv_heads) * head_dim * (input_size or hidden) + heads * head_dim * hidden
    return projections + 3 * hidden * intermediate


def target_parameters(config: ModelConfig) -> int:
    """Return the matrix elements that one forward pass reads: all layers and the output head, not the embedding."""
    layer = layer_parameters(
        config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim
    )
    return config.num_layers * layer + config.vocab_size * config.hidden_size


def forward_pass(
    config: ModelConfig, rows: int, sequences: int, context: int, itemsize: int, narrow: Narrow | None = None
) -> Work:
    """Return the work of one pass that decodes or verifies: weights once, the sequences' K/V once.

    Args:
        config: Of the target.
        rows: Of all sequences: nodes that are verified.
        sequences: In the batch.
        context: Tokens that each has in its cache.
        itemsize: Bytes of a weight and of a cached number.
        narrow: Those that have fewer.
    """
    narrow = narrow or Narrow()
    parameters = target_parameters(config)
    weights = parameters * (narrow.products or itemsize)
    cached = (
        2
        * config.num_layers
        * config.num_kv_heads
        * config.head_dim
        * context
        * sequences
        * (narrow.cache or itemsize)
    )
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * context * rows
    return Work(weights + cached, 2 * parameters * rows + attention)


def prefill(config: ModelConfig, tokens: int, itemsize: int) -> Work:
    """Return the work of a prompt: every layer over all rows, causal attention, the output head over the last row only."""
    head = config.vocab_size * config.hidden_size
    layers = target_parameters(config) - head
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * tokens * (tokens + 1) // 2
    return Work((layers + head) * itemsize, 2 * layers * tokens + 2 * head + attention)


def draft_step(head: Mapping[str, Any], rows: int, itemsize: int) -> Work:
    """Return the work of one step of an EAGLE-3 head over `rows` rows: its layer and its output head, read once.

    What the first product makes of a token's embedding may be known beforehand, so the layer takes the feature alone.
    """
    hidden = head["hidden_size"]
    layer = layer_parameters(
        hidden, head["intermediate_size"], head["num_attention_heads"], head["num_key_value_heads"], head["head_dim"]
    )  # fmt: skip
    parameters = layer + head["draft_vocab_size"] * hidden
    return Work(parameters * itemsize, 2 * parameters * rows)


def projection(head: Mapping[str, Any], rows: int, itemsize: int) -> Work:
    """Return the work of the head's ``fc`` over the target's captured layers, which the target does."""
    parameters = NUM_AUX * head["hidden_size"] ** 2
    return Work(parameters * itemsize, 2 * parameters * rows)


def speculative_round(
    config: ModelConfig,
    head: Mapping[str, Any],
    batch: int,
    steps: int,
    topk: int,
    nodes: int,
    context: int,
    itemsize: int,
    share: float = 1.0,
    narrow: Narrow | None = None,
) -> list[Work]:
    """Return the parts of a round that follow each other: draft steps (the extend is the first), the verify pass, the projection.

    `share` is what one of the target's ranks does of its pass; the target alone has `narrow` numbers.
    """
    grown = [draft_step(head, batch * (1 if step == 0 else topk), itemsize) for step in range(steps)]
    verify = forward_pass(config, batch * nodes, batch, context, itemsize, narrow).times(share)
    return [*grown, verify, projection(head, batch * nodes, itemsize)]
