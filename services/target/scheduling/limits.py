"""What a request must fit into, and the check that it does."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.errors import ConfigurationError, InvalidRequestError
from outrider.shared.nn.config.model_config import ModelConfig


def longest_text(config: ModelConfig, max_model_len: int | None) -> int:
    """Return how many tokens a prompt and its answer may have: `max_model_len`, or what the model was trained for.

    Raises:
        ConfigurationError: The model looks its positions up in a table, which ends before `max_model_len`.
    """
    table = config.max_positions
    if max_model_len is None:
        return config.max_position_embeddings if table is None else min(config.max_position_embeddings, table)
    if table is not None and max_model_len > table:
        raise ConfigurationError(
            f"--max-model-len {max_model_len}: {config.architecture} has learned positions for {table} tokens, and none behind; serve it "
            f"with --max-model-len {table} or less, or leave the option out.",
            field="max_model_len",
        )
    return max_model_len


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request must fit into."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    pause_timeout_s: float = 30.0

    def check(self, sequence: Sequence, capacity: int) -> None:
        """Refuse a sequence that this model, or a pool of `capacity` tokens, could never finish.

        Raises:
            InvalidRequestError: Names the field.
        """
        request = sequence.request
        if not request.prompt_ids:
            raise InvalidRequestError("prompt_ids is empty; give at least one token.", field="prompt_ids")
        if request.max_new_tokens < 1:
            raise InvalidRequestError(
                f"max_new_tokens must be at least 1, not {request.max_new_tokens}.", field="max_new_tokens"
            )
        highest = max(sequence.tokens)
        if highest >= self.vocab_size or min(sequence.tokens) < 0:
            message = (
                f"prompt_ids holds token {highest}; this model's vocabulary ends at {self.vocab_size - 1}."
            )
            raise InvalidRequestError(message, field="prompt_ids")
        context = min(self.max_model_len, capacity - sequence.node_bound)
        if sequence.prompt_len + request.max_new_tokens > context:
            message = (
                f"{sequence.prompt_len} prompt tokens and {request.max_new_tokens} new tokens exceed the context of {context} tokens. "
                "Shorten the prompt or ask for fewer tokens."
            )
            field = "prompt_ids" if sequence.prompt_len >= context else "max_new_tokens"
            raise InvalidRequestError(message, field=field, reason="context_length_exceeded")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of the work in hand. The queue's bounds cover requests that are not admitted yet."""

    max_running: int = 16
    max_queued: int = 512
    max_queued_tokens: int = 1 << 20
    prefill_chunk: int = 512
