"""Sizes the K/V caches of the target and of an in-process draft; sets the number of running requests."""

from __future__ import annotations

from outrider.services.target.scheduling.limits import longest_text
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.memory_plan import (
    Memory,
    MemoryPlan,
    gpu_memory,
    more_tokens,
    plan_memory,
    working_bytes,
)
from outrider.services.target.startup.running_requests import draft_cache, with_running_requests
from outrider.shared.nn.decoder import Decoder


class CachePlanner:
    """Divides a device's free memory between the KV caches of the target and of a draft in this process.

    The planner also chooses the number of running requests, unless the settings contain this number.

    Attributes:
        settings: The settings. They contain the number of running requests once `plan` has returned.

    Args:
        settings: The resolved settings of the target.
        decoder: The target's model, ready to serve. The draft must not be loaded yet.
        drafts: True if speculation is possible. Every token then needs a feature row.
    """

    def __init__(self, settings: TargetSettings, decoder: Decoder, *, drafts: bool) -> None:
        self.settings = settings
        self._decoder = decoder
        config = decoder.config
        # For every kind of draft head, a feature row is at most as wide as the hidden state.
        self._bytes_per_token = decoder.token_bytes(config.hidden_size if drafts else 0)
        self._longest = longest_text(config, settings.max_model_len)
        self._before = gpu_memory(decoder.device)

    def draft_tokens(self, bytes_per_token: int) -> int:
        """Return the number of tokens of the draft's KV cache. Call after the draft's weights are loaded.

        The drafter calls this method as its `CacheSizing`.

        Raises:
            ConfigurationError: The free memory is too small for the KV caches.
        """
        plan = self._plan(bytes_per_token)
        return plan.pages * plan.page_size + more_tokens(self.settings)

    def plan(self) -> MemoryPlan:
        """Return the plan of the target's cache. Call after the draft and its cache are allocated.

        Raises:
            ConfigurationError: The free memory is too small for the KV caches.
        """
        return self._plan(0)

    def _plan(self, draft_bytes_per_token: int) -> MemoryPlan:
        decoder, memory, now = self._decoder, None, gpu_memory(self._decoder.device)
        if self._before is not None and now is not None:
            free, total = now
            memory = Memory(
                total=total, free=free, weights=decoder.weight_bytes, draft=self._before[0] - free
            )
        sizes = self._bytes_per_token, self._longest
        self.settings = with_running_requests(
            self.settings, decoder.config, decoder.dtype, *sizes, memory, draft_bytes_per_token
        )
        reserve = working_bytes(self.settings, decoder.config, decoder.dtype)
        draft = draft_cache(self.settings, draft_bytes_per_token)
        return plan_memory(self.settings, *sizes, memory, reserve, draft)
