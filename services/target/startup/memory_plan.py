"""How a GPU's memory is shared out: weights, draft, what a step works with, and the K/V cache gets the rest. All of it but
`gpu_memory` is pure, so that it is tested without a GPU.

    |-- elsewhere --|-- weights --|-- draft --|---------- K/V cache ----------|-- reserve: graphs, activations, logits --|-- unused --|
    |----------------------- at most mem_fraction_static of the total --------|
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from outrider.services.target.scheduling.limits import longest_text
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.engine.buckets import batch_buckets
from outrider.shared.engine.graphs import MAX_LATE_GRAPHS
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.decoder import Decoder

CPU_KV_TOKENS = 64 * 1024
CPU_KV_BYTES = 1 << 30
GIB = 1 << 30

WORKSPACES_BYTES = GIB // 4
"""cuBLAS keeps 32 MiB for every stream that it computes on; activations of recorded prompts; compiled kernels. On an H200: 240 MiB."""
GRAPH_BYTES_PER_LAYER = 24 << 10
"""Of one recorded round: 94 of 32 layers took 70 MiB."""
GRAPHS_PER_BATCH_SIZE = 32
"""Plain rounds, the tree, its chain and what `auto` may choose, for greedy, sampled and filtered rows. Others are bounded in all."""
ALLOCATOR_SLACK = 1.25
"""On activations and logits: what the caching allocator rounds up and keeps in pieces."""
SMALLEST_CONTEXT = 2048
"""A cache that holds no text of so many tokens (of the model's longest, if that is shorter) serves nobody."""
MAKE_ROOM = (
    "Free memory of the GPU, serve on a larger one or on several (--tp), a smaller model or one with --quantization or a smaller --dtype, "
    "or lower --max-running-requests"
)


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

    @property
    def used(self) -> int:
        """By anybody."""
        return self.total - self.free


@dataclass(frozen=True, slots=True)
class DraftCache:
    """The cache of a draft in this process, which follows every sequence of the target's.

    Attributes:
        bytes_per_token: Of its own K/V.
        more_tokens: That it holds beyond the target's; see `more_tokens`.
    """

    bytes_per_token: int
    more_tokens: int

    @property
    def more(self) -> int:
        """Bytes that it takes however many tokens the target holds."""
        return self.bytes_per_token * self.more_tokens


NO_DRAFT_CACHE = DraftCache(0, 0)


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
    """Size the K/V cache, and with it that of a draft in this process: both get as many tokens as fit together.

    Args:
        settings: `kv_tokens`, `mem_fraction_static`, `page_size`, `max_nodes`.
        bytes_per_token: Of all planes, feature rows included.
        max_model_len: The pool of a CPU holds at least two such sequences if its bound allows.
        memory: Of the GPU; None on a CPU, where both caches have a bound of their own.
        reserve: `working_bytes`.
        draft: Its cache, if it is still to be made.

    Raises:
        ConfigurationError: The cache would hold fewer than `least_tokens`, or `kv_tokens` does not fit; says what would do.
    """
    page = (bytes_per_token + draft.bytes_per_token) * settings.page_size
    least = least_tokens(settings, max_model_len)
    if settings.kv_tokens is not None:
        pages = -(-settings.kv_tokens // settings.page_size)
        if pages * settings.page_size < least:
            raise ConfigurationError(
                f"kv_tokens: {settings.kv_tokens} tokens hold no text of {min(max_model_len, SMALLEST_CONTEXT)} tokens with a tree of "
                f"{settings.max_nodes} nodes; at least {least} are needed.",
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
    """Return how many tokens a cache must hold, in whole pages: a text of `SMALLEST_CONTEXT` with its largest tree.

    Args:
        settings: `max_nodes`, `page_size`.
        max_model_len: Where texts are shorter, one of them is enough.
    """
    tokens = min(max_model_len, SMALLEST_CONTEXT) + settings.max_nodes + 2
    return -(-tokens // settings.page_size) * settings.page_size


def working_bytes(settings: TargetSettings, config: ModelConfig, dtype: torch.dtype) -> int:
    """Return what a step needs beside weights and caches: CUDA graphs, activations of the widest step, logits of verified rows.

    Args:
        settings: `prefill_tokens`, `max_running_requests`, `limits`.
        config: Of the target.
        dtype: Of activations.
    """
    speculation = settings.limits()
    verified = settings.max_running_requests * max(
        speculation.default.max_nodes, speculation.longest_chain + 1
    )
    rows = max(settings.prefill_tokens(), verified)
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    widest = (
        max(3 * config.intermediate_size, 2 * heads) + 6 * config.hidden_size
    )  # residual, norms, captured layers; one layer's own
    logits = verified * config.vocab_size * (dtype.itemsize + torch.float32.itemsize)
    return graphs_bytes(settings, config.num_layers) + int(
        ALLOCATOR_SLACK * (rows * widest * dtype.itemsize + logits)
    )


def graphs_bytes(settings: TargetSettings, num_layers: int) -> int:
    """Return what CUDA graphs take, with the workspaces that they are recorded with.

    Args:
        settings: `cuda_graph_max_bs`, `max_running_requests`.
        num_layers: Of the target.
    """
    batch_sizes = len(batch_buckets(min(settings.cuda_graph_max_bs, settings.max_running_requests)))
    return (
        WORKSPACES_BYTES
        + (batch_sizes * GRAPHS_PER_BATCH_SIZE + MAX_LATE_GRAPHS) * num_layers * GRAPH_BYTES_PER_LAYER
    )


def more_tokens(settings: TargetSettings) -> int:
    """Return how many tokens a draft's cache holds beyond the target's: every sequence's tree while it grows.

    Args:
        settings: `max_running_requests`, `max_steps`, `max_topk`, `page_size`.
    """
    return settings.max_running_requests * (settings.max_steps * settings.max_topk + settings.page_size)


class CachePlanner:
    """Divides what a device has left between the target's cache and that of a draft in this process, once the weights of both are there.

    Args:
        settings: Resolved.
        decoder: The target's, as it serves; the draft is not loaded yet.
        drafts: Whether anything drafts: every token then keeps a feature row.
    """

    def __init__(self, settings: TargetSettings, decoder: Decoder, *, drafts: bool) -> None:
        self._settings = settings
        self._decoder = decoder
        config = decoder.config
        self._bytes_per_token = decoder.token_bytes(
            config.hidden_size if drafts else 0
        )  # as wide as a row is for every head there is
        self._longest = longest_text(config, settings.max_model_len)
        self._before = gpu_memory(decoder.device)

    def draft_tokens(self, bytes_per_token: int) -> int:
        """Return how many tokens the draft's cache shall hold (a `CacheSizing`); to be asked when its weights are there.

        Raises:
            ConfigurationError: See `plan_memory`.
        """
        more = more_tokens(self._settings)
        plan = self._plan(DraftCache(bytes_per_token, more))
        return plan.pages * plan.page_size + more

    def plan(self) -> MemoryPlan:
        """Return the plan of the target's cache; to be asked when the draft is complete.

        Raises:
            ConfigurationError: See `plan_memory`.
        """
        return self._plan(NO_DRAFT_CACHE)

    def _plan(self, draft: DraftCache) -> MemoryPlan:
        decoder, memory, now = self._decoder, None, gpu_memory(self._decoder.device)
        if self._before is not None and now is not None:
            free, total = now
            memory = Memory(
                total=total, free=free, weights=decoder.weight_bytes, draft=self._before[0] - free
            )
        reserve = working_bytes(self._settings, decoder.config, decoder.dtype)
        return plan_memory(self._settings, self._bytes_per_token, self._longest, memory, reserve, draft)


def gpu_memory(device: torch.device) -> tuple[int, int] | None:
    """Return (free, total) bytes of a GPU, what torch merely keeps (such as the wide weights of narrow ones) given back; None of a CPU."""
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
        f"at most {most} tokens fit. Give --kv-tokens {most} or less"
        if most >= least
        else f"not even {least} tokens fit. {MAKE_ROOM}"
    )
    return ConfigurationError(
        f"kv_tokens: {settings.kv_tokens} tokens need {_gib(needed)} GiB{_of_both(draft)}; of {_gib(memory.free)} GiB that are free "
        f"{_gib(reserve)} are kept for graphs and activations, so that {advice}.",
        field="kv_tokens",
    )


def _of_both(draft: DraftCache) -> str:
    return ", in the draft's cache too" if draft.bytes_per_token else ""


def _too_little_memory(
    settings: TargetSettings, memory: Memory, reserve: int, minimum: int, least: int
) -> ConfigurationError:
    parts = (
        f"the GPU has {_gib(memory.total)} GiB, of which the weights take {_gib(memory.weights)}, the draft {_gib(memory.draft)} and "
        f"others {_gib(memory.elsewhere)}; {_gib(reserve)} are kept for graphs and activations"
    )
    fraction = _least_fraction(memory.used + minimum, memory.total)
    if fraction is not None and memory.used + minimum + reserve <= memory.total:
        advice = f"Raise --mem-fraction-static from {settings.mem_fraction_static:g} to at least {fraction:g}"
    else:
        advice = f"No --mem-fraction-static makes that room. {MAKE_ROOM}"
    return ConfigurationError(
        f"mem_fraction_static: no room is left for the K/V cache: {parts}, and the least that serves, {least} tokens, needs "
        f"{minimum / (1 << 20):.1f} MiB. {advice}.",
        field="mem_fraction_static",
    )


def _least_fraction(size: int, total: int) -> float | None:
    """Return the least `mem_fraction_static` with two digits, or with as few more as keep it below 1, of which `size` bytes fit."""
    for parts in (100, 1000, 10_000):
        if (needed := -(-parts * size // total)) < parts:
            return needed / parts
    return None


def _gib(size: int) -> float:
    return round(size / GIB, 2)
