"""Chooses how many requests run at the same time if `--max-running-requests` is not set."""

from __future__ import annotations

import torch

from outrider.services.target.settings import MOST_RUNNING_REQUESTS, TargetSettings
from outrider.services.target.startup.memory_plan import (
    NO_DRAFT_CACHE,
    DraftCache,
    Memory,
    more_tokens,
    plan_memory,
    working_bytes,
)
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.config.model_config import ModelConfig

TOKENS_PER_REQUEST = 1024
"""Minimum number of tokens of the K/V cache per running request.

With fewer tokens, running requests would often have to be preempted.
"""
CHOICES = (MOST_RUNNING_REQUESTS, 192, 128, 96, 64, 48, 32, 24)


def with_running_requests(
    settings: TargetSettings,
    config: ModelConfig,
    dtype: torch.dtype,
    bytes_per_token: int,
    max_model_len: int,
    memory: Memory | None,
    draft_bytes_per_token: int,
) -> TargetSettings:
    """Return the settings with the largest number of running requests for which the memory suffices.

    More running requests need more memory for logits and activations, which reduces the K/V cache.

    Args:
        settings: The target's settings. If they contain `max_running_requests`, this number is kept.
        config: The target's model configuration.
        dtype: Data type of the activations.
        bytes_per_token: Bytes of the target's K/V cache per token, including feature rows.
        max_model_len: Length of the longest sequence in tokens.
        memory: The GPU's memory. None on a CPU, where the default number is kept.
        draft_bytes_per_token: Bytes of a draft's K/V per token, if the draft is in this process and its cache
            is not allocated yet. Otherwise 0.
    """
    if settings.max_running_requests is not None or memory is None:
        return settings
    tokens = min(TOKENS_PER_REQUEST, max_model_len)
    for number in CHOICES:
        chosen = settings.model_copy(update={"max_running_requests": number})
        try:
            reserve = working_bytes(chosen, config, dtype)
            draft = draft_cache(chosen, draft_bytes_per_token)
            plan = plan_memory(chosen, bytes_per_token, max_model_len, memory, reserve, draft)
        except ConfigurationError:
            continue
        if plan.pages * plan.page_size >= number * tokens:
            return chosen
    return settings


def draft_cache(settings: TargetSettings, bytes_per_token: int) -> DraftCache:
    """Return the cache of a draft in this process; `NO_DRAFT_CACHE` for 0 bytes per token."""
    return DraftCache(bytes_per_token, more_tokens(settings)) if bytes_per_token else NO_DRAFT_CACHE
