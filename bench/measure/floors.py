"""Floors from model shapes alone: the bytes that a pass must read and the operations that it must do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.shared.nn.config.model_config import ModelConfig

NUM_AUX = 3


@dataclass(frozen=True, slots=True)
class Work:
    """Minimum bytes to read and floating-point operations to do."""

    nbytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.nbytes + other.nbytes, self.flops + other.flops)

    def times(self, count: float) -> Work:
        """Return this work multiplied by `count`, which may be a fraction."""
        return Work(self.nbytes * count, self.flops * count)


@dataclass(frozen=True, slots=True)
class QuantizedSizes:
    """Sizes, in bytes, of the target's quantized weights and cached numbers. None means not quantized.

    Attributes:
        products: Bytes of one weight in the layers and the output head.
        cache: Bytes of one number in the KV cache.
    """

    products: int | None = None
    cache: int | None = None


def layer_parameters(
    hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, input_size: int | None = None
) -> int:
    """Return the number of matrix elements in a Llama-like layer."""
    projections = (heads + 2 * kv_heads) * head_dim * (input_size or hidden) + heads * head_dim * hidden
    return projections + 3 * hidden * intermediate


def target_parameters(config: ModelConfig) -> int:
    """Return the number of matrix elements that one forward pass reads: all layers and the output head.

    The embedding is not counted.
    """
    layer = layer_parameters(
        config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim
    )
    return config.num_layers * layer + config.vocab_size * config.hidden_size


def forward_work(
    config: ModelConfig,
    rows: int,
    sequences: int,
    context: int,
    itemsize: int,
    quantized: QuantizedSizes | None = None,
) -> Work:
    """Return the bytes and operations of one decode or verify pass of the target.

    The pass reads the weights and the K/V of each sequence once.

    Args:
        config: Configuration of the target.
        rows: Number of rows (nodes to verify) of all sequences together.
        sequences: Number of sequences in the batch.
        context: Number of cached tokens of each sequence.
        itemsize: Bytes of a weight and of a cached number.
        quantized: Sizes of the numbers that do not have `itemsize` bytes.
    """
    quantized = quantized or QuantizedSizes()
    parameters = target_parameters(config)
    weights = parameters * (quantized.products or itemsize)
    cached = (
        2
        * config.num_layers
        * config.num_kv_heads
        * config.head_dim
        * context
        * sequences
        * (quantized.cache or itemsize)
    )
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * context * rows
    return Work(weights + cached, 2 * parameters * rows + attention)


def prefill(config: ModelConfig, tokens: int, itemsize: int) -> Work:
    """Return the work of a prefill.

    All layers run over all rows with causal attention. The output head runs over the last row only.
    """
    head = config.vocab_size * config.hidden_size
    layers = target_parameters(config) - head
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * tokens * (tokens + 1) // 2
    return Work((layers + head) * itemsize, 2 * layers * tokens + 2 * head + attention)


def draft_step(head: Mapping[str, Any], rows: int, itemsize: int) -> Work:
    """Return the bytes and operations of one EAGLE-3 drafting step over `rows` rows.

    A step reads the head's layer and its output head once. Only the feature half of the layer's first product
    counts, because the embedding half can be computed in advance.
    """
    hidden = head["hidden_size"]
    layer = layer_parameters(
        hidden, head["intermediate_size"], head["num_attention_heads"], head["num_key_value_heads"],
        head["head_dim"],
    )  # fmt: skip
    parameters = layer + head["draft_vocab_size"] * hidden
    return Work(parameters * itemsize, 2 * parameters * rows)


def projection(head: Mapping[str, Any], rows: int, itemsize: int) -> Work:
    """Return the work of the head's ``fc`` over the target's captured layers, which the target computes."""
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
    quantized: QuantizedSizes | None = None,
) -> list[Work]:
    """Return the bytes and operations of each part of a speculative round. The parts run one after another.

    The parts are the draft steps, the verify pass and the projection of features. The first draft step
    extends the draft's K/V by the tokens that the last round committed.

    Args:
        config: Configuration of the target.
        head: Configuration of the EAGLE-3 head.
        batch: Number of sequences in the batch.
        steps, topk, nodes: Shape of the tree.
        context: Number of cached tokens of each sequence.
        itemsize: Bytes of a number in the usual dtype.
        share: The share of the verify pass that one tensor-parallel rank computes.
        quantized: Sizes of the target's quantized numbers, if the target has any.
    """
    grown = [draft_step(head, batch * (1 if step == 0 else topk), itemsize) for step in range(steps)]
    verify = forward_work(config, batch * nodes, batch, context, itemsize, quantized).times(share)
    return [*grown, verify, projection(head, batch * nodes, itemsize)]
