"""How a GPU's memory is shared out: weights, draft, what a step works with, and the K/V cache gets the rest. Pure, so that it is tested
without a GPU.

    |-- elsewhere --|-- weights --|-- draft --|---------- K/V cache ----------|-- reserve: graphs, activations, logits --|-- unused --|
    |----------------------- at most mem_fraction_static of the total --------|
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from outrider.services.target.settings import TargetSettings
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.config import ModelConfig

CPU_KV_TOKENS = 64 * 1024
CPU_KV_BYTES = 1 << 30
GIB = 1 << 30

WORKSPACES_BYTES = GIB // 4
"""cuBLAS keeps 32 MiB for every stream that it computes on; activations of recorded prompts; compiled kernels. On an H200: 240 MiB."""
GRAPH_BYTES_PER_LAYER = 24 << 10
"""Of one recorded round: 94 of 32 layers took 70 MiB."""
GRAPHS_PER_BATCH_SIZE = 32
"""Plain rounds, the tree, its chain and what `auto` may choose, for greedy, sampled and filtered rows."""
ALLOCATOR_SLACK = 1.25
"""On activations and logits: what the caching allocator rounds up and keeps in pieces."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A GPU's memory in bytes, with everything loaded that the K/V cache shares it with.

    Attributes:
        total: Of the device.
        free: Now, as the driver says.
        weights: That the target's weights took.
        draft: That the draft in this process took, its own cache included.
    """

    total: int
    free: int
    weights: int = 0
    draft: int = 0

    @property
    def elsewhere(self) -> int:
        """Used by neither: other processes, and the CUDA context."""
        return self.total - self.free - self.weights - self.draft


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Who gets how many bytes, in the order of the module's picture.

    Attributes:
        memory: The parts that are there already; None on a CPU, where nothing else is counted.
        reserve: Kept free for what a step works with.
        bytes_per_token: Of the K/V cache, feature rows included.
        page_size, pages: Of the K/V cache.
    """

    memory: Memory | None
    reserve: int
    bytes_per_token: int
    page_size: int
    pages: int

    @property
    def kv(self) -> int:
        """Bytes of the K/V cache."""
        return self.pages * self.page_size * self.bytes_per_token

    def numbers(self) -> Mapping[str, float | int]:
        """Return every part in GiB, for the log and for doctor."""
        tokens = {"kv_tokens": self.pages * self.page_size, "kv_bytes_per_token": self.bytes_per_token}
        memory = self.memory
        if memory is None:
            return {"kv_gib": _gib(self.kv), **tokens}
        parts = {"elsewhere": memory.elsewhere, "weights": memory.weights, "draft": memory.draft, "kv": self.kv, "reserve": self.reserve}
        unused = memory.free - self.kv - self.reserve
        return {**{f"{name}_gib": _gib(size) for name, size in (*parts.items(), ("unused", unused), ("total", memory.total))}, **tokens}


def plan_memory(settings: TargetSettings, bytes_per_token: int, max_model_len: int, memory: Memory | None, reserve: int = 0) -> MemoryPlan:
    """Size the K/V cache.

    Args:
        settings: `kv_tokens`, `mem_fraction_static`, `page_size`, `max_nodes`.
        bytes_per_token: Of all planes, feature rows included.
        max_model_len: The pool of a CPU holds at least two such sequences if its bound allows.
        memory: Of the GPU; None on a CPU.
        reserve: `working_bytes`.

    Raises:
        ConfigurationError: The cache would hold no sequence with the largest tree, or `kv_tokens` does not fit; says what would do.
    """
    page = bytes_per_token * settings.page_size
    smallest = -(-(settings.max_nodes + 2) // settings.page_size)  # pages of one sequence with its largest tree
    if settings.kv_tokens is not None:
        pages = -(-settings.kv_tokens // settings.page_size)
        if memory is not None and pages * page > memory.free - reserve:
            raise _too_many_tokens(settings, memory, reserve, bytes_per_token)
        if pages < smallest:
            raise ConfigurationError(
                f"kv_tokens: {pages * settings.page_size} tokens hold no sequence with a tree of {settings.max_nodes} nodes; "
                f"at least {smallest * settings.page_size} are needed.",
                field="kv_tokens",
            )
    elif memory is None:
        pages = min(max(CPU_KV_TOKENS, 2 * max_model_len), CPU_KV_BYTES // bytes_per_token) // settings.page_size
    else:
        used = memory.elsewhere + memory.weights + memory.draft
        allowed = int(memory.total * settings.mem_fraction_static) - used
        pages = max(0, min(allowed, memory.free - reserve)) // page
        if pages < smallest:
            raise _too_little_memory(settings, memory, reserve, smallest * page)
    return MemoryPlan(memory, reserve, bytes_per_token, settings.page_size, max(pages, 1))


def working_bytes(settings: TargetSettings, config: ModelConfig, dtype: torch.dtype) -> int:
    """Return what a step needs beside weights and caches: CUDA graphs, activations of the widest step, logits of verified rows.

    Args:
        settings: `prefill_tokens`, `max_running_requests`, `limits`.
        config: Of the target.
        dtype: Of activations.
    """
    speculation = settings.limits()
    verified = settings.max_running_requests * max(speculation.default.max_nodes, speculation.longest_chain + 1)
    rows = max(settings.prefill_tokens(), verified)
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    widest = max(3 * config.intermediate_size, 2 * heads) + 6 * config.hidden_size  # residual, norms, captured layers; one layer's own
    logits = verified * config.vocab_size * (dtype.itemsize + torch.float32.itemsize)
    return graphs_bytes(settings, config.num_layers) + int(ALLOCATOR_SLACK * (rows * widest * dtype.itemsize + logits))


def graphs_bytes(settings: TargetSettings, num_layers: int) -> int:
    """Return what CUDA graphs take, with the workspaces that they are recorded with.

    Args:
        settings: `cuda_graph_max_bs`, `max_running_requests`.
        num_layers: Of the target.
    """
    batch_sizes = (min(settings.cuda_graph_max_bs, settings.max_running_requests) - 1).bit_length() + 1
    return WORKSPACES_BYTES + batch_sizes * GRAPHS_PER_BATCH_SIZE * num_layers * GRAPH_BYTES_PER_LAYER


def draft_tokens(settings: TargetSettings, plan: MemoryPlan) -> int:
    """Return how many tokens the cache of a draft in this process shall hold: the target's, and every sequence's tree while it grows.

    Args:
        settings: `max_running_requests`, `max_steps`, `max_topk`.
        plan: Made before the draft is loaded.
    """
    return plan.pages * plan.page_size + settings.max_running_requests * (settings.max_steps * settings.max_topk + plan.page_size)


def _too_many_tokens(settings: TargetSettings, memory: Memory, reserve: int, bytes_per_token: int) -> ConfigurationError:
    most = max(0, memory.free - reserve) // (bytes_per_token * settings.page_size) * settings.page_size
    return ConfigurationError(
        f"kv_tokens: {settings.kv_tokens} tokens need {_gib(settings.kv_tokens or 0, bytes_per_token)} GiB; of {_gib(memory.free)} GiB "
        f"that are free {_gib(reserve)} are kept for graphs and activations, so that at most {most} tokens fit. Lower --kv-tokens.",
        field="kv_tokens",
    )


def _too_little_memory(settings: TargetSettings, memory: Memory, reserve: int, minimum: int) -> ConfigurationError:
    used = memory.elsewhere + memory.weights + memory.draft
    parts = (
        f"the GPU has {_gib(memory.total)} GiB, of which the weights take {_gib(memory.weights)}, the draft {_gib(memory.draft)} and "
        f"others {_gib(memory.elsewhere)}; {_gib(reserve)} are kept for graphs and activations"
    )
    fraction = _least_fraction(used + minimum, memory.total)
    if fraction is not None and used + minimum + reserve <= memory.total:
        advice = f"Raise --mem-fraction-static from {settings.mem_fraction_static:g} to at least {fraction:g}"
    else:
        advice = (
            "No --mem-fraction-static makes that room: free memory of the GPU, serve on a larger one or on several (--tp), a smaller model "
            "or one with --quantization or a smaller --dtype, or lower --max-running-requests"
        )
    return ConfigurationError(
        f"mem_fraction_static: no room is left for the K/V cache: {parts}, and one sequence with its largest tree needs "
        f"{minimum / (1 << 20):.1f} MiB. {advice}.",
        field="mem_fraction_static",
    )


def _least_fraction(size: int, total: int) -> float | None:
    """Return the least `mem_fraction_static` with two digits, or with as few more as keep it below 1, of which `size` bytes fit."""
    for parts in (100, 1000, 10_000):
        if (needed := -(-parts * size // total)) < parts:
            return needed / parts
    return None


def _gib(size: int, times: int = 1) -> float:
    return round(size * times / GIB, 2)
