"""Checks requests against vocabulary size, context length and KV pool; defines the scheduler's limits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.errors import ConfigurationError, InvalidRequestError
from outrider.shared.nn.config.model_config import ModelConfig


def longest_text(config: ModelConfig, max_model_len: int | None) -> int:
    """Return the maximum number of tokens of a prompt and its answer together.

    Args:
        config: The model's configuration.
        max_model_len: The configured maximum. None selects the length that the model was trained for.

    Raises:
        ConfigurationError: The model has a table of learned positions that is shorter than `max_model_len`.
    """
    table = config.max_positions
    if max_model_len is None:
        return config.max_position_embeddings if table is None else min(config.max_position_embeddings, table)
    if table is not None and max_model_len > table:
        raise ConfigurationError(
            f"--max-model-len {max_model_len}: {config.architecture} has learned positions for only {table} "
            f"tokens. Use --max-model-len {table} or less, or omit it.",
            field="max_model_len",
        )
    return max_model_len


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits that every request must respect.

    Attributes:
        vocab_size: Upper bound of token ids, exclusive.
        max_model_len: Maximum number of prompt tokens and new tokens together.
        eos_token_ids: The model's end-of-sequence tokens.
        pause_timeout_s: Time in seconds after which a paused request fails.
        routes: True if the model has routed experts that clients may request.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    pause_timeout_s: float = 30.0
    routes: bool = False

    def check(self, sequence: Sequence, capacity: int) -> None:
        """Refuse a sequence that could never finish with this model, or in a KV pool of `capacity` tokens.

        Raises:
            InvalidRequestError: The sequence exceeds a limit. The error names the field of the request.
        """
        request = sequence.request
        if not request.prompt_ids:
            raise InvalidRequestError("prompt_ids is empty; pass at least one token.", field="prompt_ids")
        if request.max_new_tokens < 1:
            raise InvalidRequestError(
                f"max_new_tokens must be at least 1, not {request.max_new_tokens}.", field="max_new_tokens"
            )
        request.sampling.rules.check_vocabulary(self.vocab_size)
        request.logprobs.check_vocabulary(self.vocab_size)
        if request.states.routed_experts and not self.routes:
            raise InvalidRequestError(
                "return_routed_experts needs a model with routed experts whose router this server runs "
                "itself. This model has none. Leave the field out.",
                field="return_routed_experts",
                reason="unsupported_parameter",
            )
        self._check_tokens(request.prompt_ids, "prompt_ids")
        if request.resume_ids:
            self._check_resumed(sequence)
        context = min(self.max_model_len, capacity - sequence.node_bound)
        if sequence.prompt_len + request.max_new_tokens > context:
            message = (
                f"{sequence.prompt_len} prompt tokens and {request.max_new_tokens} new tokens exceed the "
                f"context of {context} tokens. Shorten the prompt or request fewer tokens."
            )
            field = "prompt_ids" if sequence.prompt_len >= context else "max_new_tokens"
            raise InvalidRequestError(message, field=field, reason="context_length_exceeded")

    def _check_tokens(self, tokens: Collection[int], field: str) -> None:
        highest = max(tokens)
        if highest >= self.vocab_size or min(tokens) < 0:
            message = (
                f"{field} contains token {highest}; the model's highest token id is {self.vocab_size - 1}."
            )
            raise InvalidRequestError(message, field=field)

    def _check_resumed(self, sequence: Sequence) -> None:
        request = sequence.request
        self._check_tokens(request.resume_ids, "resume_ids")
        if len(request.resume_ids) >= request.max_new_tokens:
            raise InvalidRequestError(
                f"resume_ids has {len(request.resume_ids)} tokens, so none of the {request.max_new_tokens} "
                f"new tokens is left.",
                field="resume_ids",
            )
        if not sequence.stop_ids.isdisjoint(request.resume_ids):
            raise InvalidRequestError(
                "resume_ids contains a stop token, so the answer has ended already.", field="resume_ids"
            )


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of the scheduler.

    Attributes:
        max_running: Maximum number of admitted sequences.
        max_queued: Maximum number of requests that wait for admission.
        max_queued_tokens: Maximum number of prompt tokens of the requests that wait for admission.
        prefill_chunk: Maximum number of prompt tokens per step.
        prefix_cache: True to keep the K/V of prefixes for later sequences.
    """

    max_running: int = 16
    max_queued: int = 512
    max_queued_tokens: int = 1 << 20
    prefill_chunk: int = 512
    prefix_cache: bool = True
