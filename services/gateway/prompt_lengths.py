"""Checks that a prompt and its new tokens fit in the model's context, and that all token ids are known."""

from __future__ import annotations

from outrider.services.gateway.served_target import ServedTarget
from outrider.shared.base.errors import InvalidRequestError


def check_prompt_length(
    prompt_ids: tuple[int, ...],
    max_tokens: int | None,
    info: ServedTarget,
    *,
    prompt_field: str,
    max_tokens_field: str,
    default: int | None,
) -> int:
    """Check one prompt, and return the largest number of new tokens for it. The number is at least 1.

    Args:
        prompt_ids: Token ids of the prompt.
        max_tokens: The client's limit of new tokens. None if the client sets no limit.
        info: The target's limits.
        prompt_field, max_tokens_field: Names of the two fields in the client's API, for errors.
        default: Limit of new tokens if the client sets no limit. None allows all tokens that fit.

    Raises:
        InvalidRequestError: If the prompt is empty or too long, contains an unknown token, or does not fit
            together with `max_tokens` new tokens. The error names the field.
    """
    length, limit = len(prompt_ids), info.max_model_len
    if not length:
        raise InvalidRequestError(f"{prompt_field} must contain at least one token.", field=prompt_field)
    if length >= limit:
        raise _too_long(
            prompt_field,
            f"The prompt is too long: it has {length} tokens. This model's maximum context length is {limit} "
            "tokens, and at least one of them must be left for the answer.",
        )
    for token_id in (min(prompt_ids), max(prompt_ids)):
        if not 0 <= token_id < info.vocab_size:
            message = (
                f"{prompt_field} contains the token id {token_id}, "
                f"but the vocabulary has {info.vocab_size} entries."
            )
            raise InvalidRequestError(message, field=prompt_field)
    if max_tokens is None:
        return min(limit - length, default or limit)
    # The target generates at least one token. If the client wants no tokens, the gateway drops this one.
    max_tokens = max(1, max_tokens)
    if length + max_tokens > limit:
        message = (
            f"This model's maximum context length is {limit} tokens, but the prompt's {length} tokens and "
            f"{max_tokens_field}={max_tokens} need {length + max_tokens}."
        )
        raise _too_long(max_tokens_field, f"{message} At most {limit - length} new tokens fit.")
    return max_tokens


def _too_long(field: str, message: str) -> InvalidRequestError:
    # Clients recognize this error by the text "prompt is too long" or "maximum context length is".
    return InvalidRequestError(message, field=field, reason="context_length_exceeded")
