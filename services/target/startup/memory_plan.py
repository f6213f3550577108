"""Divides a GPU's memory between weights, draft, a reserve for steps, and the K/V cache.

    |-- elsewhere --|-- weights --|-- draft --|---- K/V cache ----|-- reserve --|-- unused --|
    |----------- at most mem_fraction_static of the total --------|

The sizes of weights, draft and reserve are determined first. The K/V cache receives the rest of the usable
memory. The reserve is for CUDA graphs, activations and logits. "Elsewhere" is the memory of other processes
and of the CUDA context.

Only the function `gpu_memory` needs a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from outrider.services.target.engine.recordings import MOST_MIXED_ROWS
from outrider.services.target.model.prefill_graph import PREFILL_SIZES, fitting
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.engine.buckets import batch_buckets
from outrider.shared.engine.graphs import MAX_LATE_GRAPHS
from outrider.shared.nn.config.model_config import ModelConfig

CPU_KV_TOKENS = 64 * 1024
CPU_KV_BYTES = 1 << 30
GIB = 1 << 30

WORKSPACES_BYTES = GIB // 4
"""Bytes of cuBLAS workspaces (32 MiB per stream), activations of recorded prompts and compiled kernels.

Measured on an H200: 240 MiB.
"""
GRAPH_BYTES_PER_LAYER = 24 << 10
"""Bytes of one recorded round per layer. Measured: 94 graphs of 32 layers took 70 MiB."""
GRAPHS_PER_BATCH_SIZE = 16
"""Largest number of graphs per batch size: plain rounds in all sampling modes, and drafts of all shapes."""
MIXED_GRAPHS = 160
"""Largest number of graphs of prompts and of rounds with trees. `MAX_LATE_GRAPHS` limits the number of graphs
that are recorded later."""
MASKED_GRAPHS = 64
"""Largest number of graphs of rounds with forms that are recorded in advance. Nearly all of a round's kernels
are in the first of its two graphs."""
ALLOCATOR_SLACK = 1.25
"""Factor on activations and logits, because the caching allocator rounds up and fragments memory."""
SMALLEST_CONTEXT = 2048
"""Minimum number of tokens of one text that the cache must hold, unless the model's maximum is shorter."""
MAKE_ROOM = (
    "Free memory of the GPU; use a larger one or several (--tp); use a smaller model, --quantization or a "
    "smaller --dtype; or lower --max-running-requests"
)


@dataclass(frozen=True, slots=True)
class Memory:
    """A GPU's memory in bytes, after weights and draft are loaded and before the K/V cache is allocated.

    Attributes:
        total: Total memory of the device.
        free: Free memory, as reported by the driver.
        weights: Memory of the target's weights.
        draft: Memory of the draft in this process, including its cache.
    """

    total: int
    free: int
    weights: int = 0
    draft: int = 0

    @property
    def elsewhere(self) -> int:
        """Memory used by other processes and the CUDA context."""
        return self.total - self.free - self.weights - self.draft

    @property
    def used(self) -> int:
        """Memory used by any process."""
        return self.total - self.free


@dataclass(frozen=True, slots=True)
class DraftCache:
    """The KV cache of a draft in this process. The draft follows every sequence of the target.

    Attributes:
        bytes_per_token: Bytes of the draft's K/V per token.
        more_tokens: Number of tokens by which the draft's cache exceeds the target's cache; see the function
            `more_tokens`.
    """

    bytes_per_token: int
    more_tokens: int

    @property
    def more(self) -> int:
        """Bytes of the draft's cache that do not depend on the size of the target's cache."""
        return self.bytes_per_token * self.more_tokens


NO_DRAFT_CACHE = DraftCache(0, 0)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The plan of a GPU's memory: the sizes of the K/V cache and of the other parts.

    Attributes:
        memory: State of the GPU's memory before the K/V cache is allocated. None on a CPU, where only the K/V
            cache is sized.
        reserve: Bytes that are kept free for the work of an engine step.
        bytes_per_token: Bytes of the K/V cache per token, including feature rows.
        page_size: Tokens per page of the K/V cache.
        pages: Number of pages of the K/V cache.
    """

    memory: Memory | None
    reserve: int
    bytes_per_token: int
    page_size: int
    pages: int

    @property
    def kv(self) -> int:
        """Size of the K/V cache in bytes."""
        return self.pages * self.page_size * self.bytes_per_token

    def numbers(self) -> Mapping[str, float | int]:
        """Return the size of every part in GiB, for the log and for `outrider doctor`."""
        tokens = {"kv_tokens": self.pages * self.page_size, "kv_bytes_per_token": self.bytes_per_token}
        memory = self.memory
        if memory is None:
            return {"kv_gib": _gib(self.kv), **tokens}
        parts = {
            "elsewhere": memory.elsewhere,
            "weights": memory.weights,
            "draft": memory.draft,
            "kv": self.kv,
            "reserve": self.reserve,
        }
        unused = memory.free - self.kv - self.reserve
        return {
            **{
                f"{name}_gib": _gib(size)
                for name, size in (*parts.items(), ("unused", unused), ("total", memory.total))
            },
            **tokens,
        }


def plan_memory(
    settings: TargetSettings,
    bytes_per_token: int,
    max_model_len: int,
    memory: Memory | None,
    reserve: int = 0,
    draft: DraftCache = NO_DRAFT_CACHE,
) -> MemoryPlan:
    """Choose the sizes of the K/V caches of the target and of a draft in this process.

    Together, the caches get the largest number of tokens that fits.

    Args:
        settings: The target's settings. `kv_tokens`, `mem_fraction_static`, `page_size` and `max_nodes` are
            used.
        bytes_per_token: Bytes of the target's cache per token, including feature rows.
        max_model_len: Length of the longest sequence in tokens. On a CPU, the cache holds at least two such
            sequences, unless that exceeds the cache's fixed limit.
        memory: The GPU's memory. None on a CPU, where the caches have a fixed limit.
        reserve: Bytes that an engine step needs, from `working_bytes`.
        draft: The draft's cache, if the draft is in this process and its cache is not allocated yet.
            Otherwise None.

    Raises:
        ConfigurationError: The cache would hold fewer than `least_tokens`, or `kv_tokens` does not fit. The
            error names a value that works.
    """
    # The draft stores the same tokens as the target, so each page needs memory in both caches.
    page = (bytes_per_token + draft.bytes_per_token) * settings.page_size
    least = least_tokens(settings, max_model_len)
    if settings.kv_tokens is not None:
        pages = -(-settings.kv_tokens // settings.page_size)
        if pages * settings.page_size < least:
            raise ConfigurationError(
                f"kv_tokens: {settings.kv_tokens} tokens cannot hold a text of "
                f"{min(max_model_len, SMALLEST_CONTEXT)} tokens with a tree of {settings.max_nodes} nodes; "
                f"at least {least} are needed.",
                field="kv_tokens",
            )
        if memory is not None and pages * page + draft.more > memory.free - reserve:
            raise _too_many_tokens(settings, memory, reserve, page, draft, least)
    elif memory is None:
        pages = (
            min(max(CPU_KV_TOKENS, 2 * max_model_len), CPU_KV_BYTES // bytes_per_token) // settings.page_size
        )
    else:
        allowed = int(memory.total * settings.mem_fraction_static) - memory.used
        pages = max(0, min(allowed, memory.free - reserve) - draft.more) // page
        if pages * settings.page_size < least:
            raise _too_little_memory(
                settings, memory, reserve, least * page // settings.page_size + draft.more, least
            )
    return MemoryPlan(memory, reserve, bytes_per_token, settings.page_size, max(pages, 1))


def least_tokens(settings: TargetSettings, max_model_len: int) -> int:
    """Return the minimum number of tokens of the target's KV cache, in whole pages.

    The cache must hold a text of `SMALLEST_CONTEXT` tokens with the largest tree.

    Args:
        settings: The target's settings. `max_nodes` and `page_size` are used.
        max_model_len: Length of the longest sequence in tokens. If this length is below `SMALLEST_CONTEXT`,
            it replaces `SMALLEST_CONTEXT`.
    """
    tokens = min(max_model_len, SMALLEST_CONTEXT) + settings.max_nodes + 2
    return -(-tokens // settings.page_size) * settings.page_size


def working_bytes(settings: TargetSettings, config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes that an engine step needs in addition to weights and KV caches.

    These bytes are for CUDA graphs, the activations of the widest step and the logits of verified rows.

    Args:
        settings: The target's settings. `prefill_tokens`, `running_requests`, `max_packed_rows`, `max_steps`
            and `limits` are used.
        config: The target's model configuration.
        dtype: Data type of the activations.
    """
    speculation = settings.limits()
    verified = settings.running_requests * max(speculation.default.max_nodes, speculation.longest_chain + 1)
    # A round has at most `max_packed_rows` rows, but at least one row for each sequence.
    verified = max(settings.running_requests, min(verified, settings.max_packed_rows))
    # Each slot stores the feature rows of the tokens of its last round.
    slots = settings.running_requests * (settings.max_steps + 1) * config.hidden_size * dtype.itemsize
    # Recorded passes keep activations of their own. All graphs share them.
    recorded = fitting(PREFILL_SIZES, settings.prefill_tokens())[-1]
    # Each slot counts the output's tokens, one word per token of the vocabulary (`model/slot_rules.py`).
    rules = settings.running_requests * config.vocab_size * torch.int32.itemsize
    rows = max(settings.prefill_tokens(), verified) + recorded
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    # The larger of a layer's MLP and attention activations, plus residual, norms and captured layers.
    widest = max(3 * config.intermediate_size, 2 * heads) + 6 * config.hidden_size
    # CUDA graphs of rounds store their logits in addition to those of the running round.
    rows_of_logits = verified + min(verified, MOST_MIXED_ROWS)
    logits = rows_of_logits * config.vocab_size * (dtype.itemsize + torch.float32.itemsize)
    masks = verified * config.vocab_size // 8  # one bit per token (`model/mask_buffer.py`)
    return graphs_bytes(settings, config.num_layers) + int(
        ALLOCATOR_SLACK * (rows * widest * dtype.itemsize + logits + masks + slots + rules)
    )


def graphs_bytes(settings: TargetSettings, num_layers: int) -> int:
    """Return the bytes of the CUDA graphs and their workspaces.

    Args:
        settings: The target's settings. `cuda_graph_max_bs` and `running_requests` are used.
        num_layers: Number of layers of the target's model.
    """
    batch_sizes = len(batch_buckets(min(settings.cuda_graph_max_bs, settings.running_requests)))
    return (
        WORKSPACES_BYTES
        + (
            batch_sizes * GRAPHS_PER_BATCH_SIZE
            + MIXED_GRAPHS
            + MASKED_GRAPHS
            + MAX_LATE_GRAPHS
            + 2 * len(PREFILL_SIZES)
        )
        * num_layers
        * GRAPH_BYTES_PER_LAYER
    )


def more_tokens(settings: TargetSettings) -> int:
    """Return the number of tokens by which a draft's KV cache must exceed the target's KV cache.

    Each sequence needs room for its draft tree while the draft builds that tree.

    Args:
        settings: The target's settings. `running_requests`, `max_steps`, `max_topk` and `page_size` are used.
    """
    return settings.running_requests * (settings.max_steps * settings.max_topk + settings.page_size)


def gpu_memory(device: torch.device) -> tuple[int, int] | None:
    """Return the free and total bytes of a GPU. Return None on a CPU.

    The function first releases memory that torch caches but does not use, such as the memory of weights that
    were quantized.
    """
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def _too_many_tokens(
    settings: TargetSettings, memory: Memory, reserve: int, page: int, draft: DraftCache, least: int
) -> ConfigurationError:
    most = max(0, memory.free - reserve - draft.more) // page * settings.page_size
    needed = -(-(settings.kv_tokens or 0) // settings.page_size) * page + draft.more
    advice = (
        f"at most {most} tokens fit. Use --kv-tokens {most} or less"
        if most >= least
        else f"not even {least} tokens fit. {MAKE_ROOM}"
    )
    return ConfigurationError(
        f"kv_tokens: {settings.kv_tokens} tokens need {_gib(needed)} GiB{_of_both(draft)}. "
        f"{_gib(memory.free)} GiB are free, and {_gib(reserve)} GiB of them are reserved for graphs and "
        f"activations: {advice}.",
        field="kv_tokens",
    )


def _of_both(draft: DraftCache) -> str:
    return " in the caches of target and draft" if draft.bytes_per_token else ""


def _too_little_memory(
    settings: TargetSettings, memory: Memory, reserve: int, minimum: int, least: int
) -> ConfigurationError:
    parts = (
        f"the GPU has {_gib(memory.total)} GiB: the weights take {_gib(memory.weights)}, the draft "
        f"{_gib(memory.draft)} and other processes {_gib(memory.elsewhere)}; {_gib(reserve)} are reserved "
        "for graphs and activations"
    )
    fraction = _least_fraction(memory.used + minimum, memory.total)
    if fraction is not None and memory.used + minimum + reserve <= memory.total:
        advice = f"Raise --mem-fraction-static from {settings.mem_fraction_static:g} to at least {fraction:g}"
    else:
        advice = f"No --mem-fraction-static leaves enough room. {MAKE_ROOM}"
    return ConfigurationError(
        f"mem_fraction_static: no room is left for the K/V cache: {parts}. The minimum of {least} tokens "
        f"needs {minimum / (1 << 20):.1f} MiB. {advice}.",
        field="mem_fraction_static",
    )


def _least_fraction(size: int, total: int) -> float | None:
    """Return the smallest `mem_fraction_static` that covers `size` bytes; None if no value below 1 does.

    The fraction has two decimals, or more if two decimals would round it to 1.
    """
    for parts in (100, 1000, 10_000):
        if (needed := -(-parts * size // total)) < parts:
            return needed / parts
    return None


def _gib(size: int) -> float:
    return round(size / GIB, 2)
