"""Plans device memory: sizes of weights and KV caches, the minimum that works, and the default capacity."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from outrider.services.doctor.finding import Finding
from outrider.services.doctor.pair import Pair, expected_of
from outrider.services.draft.heads.eagle3 import Eagle3Head
from outrider.services.draft.heads.files.head_config import HeadConfig
from outrider.services.target.choices import KvCacheDtype, Quantization
from outrider.services.target.scheduling.limits import longest_text
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.memory_plan import (
    DraftCache,
    Memory,
    least_tokens,
    more_tokens,
    working_bytes,
)
from outrider.services.target.startup.memory_plan import plan_memory as plan_memory_of_target
from outrider.services.target.startup.running_requests import with_running_requests
from outrider.services.target.startup.weight_fit import WeightSizes
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.kv.pool import token_bytes
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.checkpoint.weight_sizes import loaded_bytes
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.layers.token_products import table_fits
from outrider.shared.spec.algorithm import Algorithm

GIB = 1 << 30
WORKSPACE = 0.05
"""Memory for activations, masks and unused allocator memory on a CPU, as a share of the weights.

Measured runs use less memory.
"""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Estimate of the memory for a target and a draft in one process on one device. Sizes are in bytes.

    Attributes:
        target_weights, draft_weights: Sizes of the weights of target and draft, in the data type used for
            serving. A tensor that the draft borrows from the target is counted only once. On a GPU,
            `draft_weights` of an EAGLE-3 head includes the head's table of embedding products.
        target_kv_per_token: Size of one token in the target's KV cache: keys and values (or latents), and the
            feature row.
        draft_kv_per_token: Size of the keys and values of one token in the draft's KV cache.
        context: Largest number of tokens of a sequence that the target supports.
        least_tokens: Smallest size of the KV cache, in tokens, with which the target starts.
        minimum: Sum of the weights, the working memory, and KV caches of `least_tokens` tokens.
        full_context: Sum of the weights, the working memory, and KV caches of `context` tokens.
        kv_tokens: Size of the KV cache, in tokens, that the target chooses with the given settings. 0 if the
            target would not start.
        refusal: The target's error message if the target would not start. Otherwise empty.
        reserve: Memory that the target reserves on a GPU for CUDA graphs, activations and logits.
        available, total: Free memory and total memory of the device, respectively.
    """

    target_weights: int
    draft_weights: int
    target_kv_per_token: int
    draft_kv_per_token: int
    context: int
    least_tokens: int
    minimum: int
    full_context: int
    kv_tokens: int
    refusal: str
    reserve: int
    available: int
    total: int


def estimate_memory(
    pair: Pair, settings: TargetSettings | None = None, memory_of_device: tuple[int, int] | None = None
) -> MemoryEstimate:
    """Estimate the memory of a target and a draft from their tensor headers and configurations.

    Args:
        pair: Target and draft.
        settings: Settings of the target. None uses the target's defaults.
        memory_of_device: Free and total memory of the device, in bytes. None queries the device.

    Raises:
        CheckpointError: A folder cannot be read.
    """
    # 1. Size the weights and the cache of one token.
    config = pair.target_config
    feature_size, draft_kv, draft_weights = 0, 0, 0
    if pair.drafts:
        draft_weights, draft_kv, feature_size = _draft(pair)
    if settings is None:
        settings = TargetSettings.load({"model": pair.target, "device": str(pair.device)})
    if settings.quantization is Quantization.FP8:
        target_weights = WeightSizes(pair.target, pair.dtype).of_rank(rounded=True)
    else:
        target_weights = _weights(pair.target, config, pair.dtype)
    target_kv = token_bytes(
        config.num_layers, config.num_kv_heads, config.head_dim, pair.dtype, feature_size,
        latent=config.latent is not None,
        kv_dtype=None if settings.kv_cache_dtype is KvCacheDtype.AUTO else torch.float8_e4m3fn,
    )  # fmt: skip
    available, total = memory_of_device or device_memory(pair.device)
    has_table = pair.device.type == "cuda" and pair.drafts and pair.choice.algorithm is Algorithm.EAGLE
    if has_table and pair.head.algorithm == Eagle3Head.algorithm:
        draft_weights += table_bytes(
            pair.head_config, pair.dtype, available - target_weights - draft_weights, total
        )
    # 2. Let the target's own planner choose the cache size, or report why the target would not start.
    weights = target_weights + draft_weights
    context = longest_text(config, settings.max_model_len)
    on_gpu = pair.device.type == "cuda"
    memory = (
        Memory(total=total, free=available - weights, weights=target_weights, draft=draft_weights)
        if on_gpu
        else None
    )
    settings = with_running_requests(settings, config, pair.dtype, target_kv, context, memory, draft_kv)
    reserve = working_bytes(settings, config, pair.dtype) if on_gpu else 0
    draft = DraftCache(draft_kv, more_tokens(settings))
    kv_tokens, refusal = 0, ""
    try:
        planned = plan_memory_of_target(settings, target_kv, context, memory, reserve, draft)
        kv_tokens = planned.pages * planned.page_size
    except ConfigurationError as error:
        refusal = error.message
    # 3. Add up the minimum, and the memory for one text of the full context.
    least = least_tokens(settings, context)
    full = max(least, context + settings.max_nodes + settings.page_size)
    fixed = weights + (reserve if on_gpu else int(weights * WORKSPACE)) + draft.more
    return MemoryEstimate(
        target_weights=target_weights,
        draft_weights=draft_weights,
        target_kv_per_token=target_kv,
        draft_kv_per_token=draft_kv,
        context=context,
        least_tokens=least,
        minimum=fixed + least * (target_kv + draft_kv),
        full_context=fixed + full * (target_kv + draft_kv),
        kv_tokens=kv_tokens,
        refusal=refusal,
        reserve=reserve,
        available=available,
        total=total,
    )


def table_bytes(config: HeadConfig, dtype: torch.dtype, free: int, total: int) -> int:
    """Return the size, in bytes, of an EAGLE-3 head's table of embedding products on a GPU.

    The function `token_products` makes this table while the head is loaded. The size is 0 if the head has no
    such table.
    """
    nbytes = (
        config.vocab_size * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim * dtype.itemsize
    )
    fused = config.latent is None and dtype is not torch.float16
    return nbytes if fused and table_fits(nbytes, free, total) else 0


def check_memory(pair: Pair) -> Iterator[Finding]:
    """Compare the memory that the pair needs with the memory of the device."""
    plan = estimate_memory(pair)
    yield Finding.ok(
        "memory",
        f"{_size(plan.target_weights)} target, {_size(plan.draft_weights)} draft as "
        f"{str(pair.dtype).removeprefix('torch.')}; each token of context takes "
        f"{plan.target_kv_per_token / 1024:.1f} KiB + {plan.draft_kv_per_token / 1024:.1f} KiB",
    )
    numbers = (
        f"needs at least {_size(plan.minimum)} (caches of {plan.least_tokens} tokens), or "
        f"{_size(plan.full_context)} for one text of {plan.context} tokens; {pair.device} has "
        f"{_size(plan.available)} free of {_size(plan.total)}"
    )
    if plan.minimum > plan.available:
        yield Finding.refused(
            "device", numbers, "Free device memory, use a larger device, or use a smaller --dtype."
        )
    elif plan.refusal:
        yield Finding.refused("device", numbers, plan.refusal)
    elif plan.full_context > plan.available:
        yield Finding.warning(
            "max_model_len", numbers, "Serve with a lower --max-model-len, or use a larger device."
        )
    else:
        yield Finding.ok("device", f"{numbers}; by default the cache holds {plan.kv_tokens} tokens")


def device_memory(device: torch.device) -> tuple[int, int]:
    """Return (free, total) bytes of a device. On the host, free bytes are the kernel's MemAvailable."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = dict(
            line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        )
        return int(lines["MemAvailable"].split()[0]) * 1024, total
    except (OSError, KeyError, ValueError):
        return total, total


def memory_numbers(plan: MemoryEstimate) -> dict[str, int]:
    """Return the plan as a JSON object."""
    return asdict(plan)


def _weights(folder: Path, config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the size of a loaded model in bytes."""
    with CheckpointReader(folder) as reader:
        names = expected_of(reader, config).shapes or reader.names
        return sum(
            loaded_bytes(name, reader.tensors[name], dtype) for name in names if name in reader.tensors
        )


def _draft(pair: Pair) -> tuple[int, int, int]:
    """Return (weight bytes, KV bytes per token, width of a feature row) of the draft."""
    choice = pair.choice
    if choice.algorithm is Algorithm.EAGLE:
        head = pair.head
        with CheckpointReader(choice.require_folder()) as reader:
            weights = sum(loaded_bytes(name, info, pair.dtype) for name, info in reader.tensors.items())
        return (
            weights,
            token_bytes(head.num_layers, head.kv_heads, head.head_dim, pair.dtype, latent=head.latent),
            head.hidden_size,
        )
    if choice.algorithm is Algorithm.STANDALONE:
        config = pair.draft_model
        weights = _weights(choice.require_folder(), config, pair.dtype)
        kv = token_bytes(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            pair.dtype,
            latent=config.latent is not None,
        )
        return weights, kv, 0
    return _mtp(pair) if choice.algorithm is Algorithm.MTP else (0, 0, 0)


def _mtp(pair: Pair) -> tuple[int, int, int]:
    """Return the same sizes as `_draft` for MTP layers, whose tensors are stored among the target's own."""
    mtp, config = pair.mtp, pair.mtp.config
    with CheckpointReader(pair.choice.require_folder()) as reader:
        own = expected_of(reader, config).shapes
        layers = [name for name in reader.names if name.startswith(mtp.dialect.layers) and name not in own]
        weights = sum(
            loaded_bytes(name, reader.tensors[name], pair.dtype)
            for name in layers
            if not name.endswith(mtp.dialect.ignored)
        )
    latent = config.latent is not None
    kv = token_bytes(len(mtp.layers), config.num_kv_heads, config.head_dim, pair.dtype, latent=latent)
    return weights, kv, config.hidden_size


def _size(number: int) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB // 10 else f"{number / (1 << 20):.1f} MiB"
