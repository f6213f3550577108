"""Makes a chat fit into the model's context: a smaller limit for the answer first, then fewer old turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.services.clients.rest import RestClient, StreamedReply
from outrider.services.terminal.conversation import Conversation
from outrider.shared.base.errors import ErrorCode, InvalidRequestError, OutriderError

CONTEXT_FULL = "context_length_exceeded"
LEAST_SHARE = 8
"""Turns are dropped if an answer has less room than this part (1/8) of the context."""


class ContextRoom:
    """Counts the tokens of a chat before it is sent, so that the gateway need not refuse it.

    Args:
        client: Client of the gateway that counts the tokens.
    """

    def __init__(self, client: RestClient) -> None:
        self._client = client
        self._counts = True

    def fit(self, conversation: Conversation) -> int | None:
        """Drop the oldest turns of a chat until its answer has enough room.

        Enough is `max_tokens` or 1/8 of the context, whichever is smaller.

        Returns:
            The largest possible `max_tokens` if the chat's own `max_tokens` does not fit. None if it fits, or
            if the gateway cannot count the tokens.

        Raises:
            InvalidRequestError: The newest message alone leaves no room for an answer.
        """
        wanted = conversation.options.get("max_tokens")
        while self._counts:
            try:
                num_tokens, context = self._client.count_tokens(conversation.request(trace=False)[0])
            except OutriderError as error:
                if error.reason == CONTEXT_FULL and conversation.drop_oldest_turn():
                    continue
                self._counts = error.code is not ErrorCode.NOT_FOUND
                return None
            room = context - num_tokens
            least = max(1, context // LEAST_SHARE)
            if room < (least if wanted is None else min(least, wanted)) and conversation.drop_oldest_turn():
                continue
            if room < 1:
                raise InvalidRequestError(
                    f"The prompt is too long: it has {num_tokens} tokens. This model's context has {context} "
                    "tokens, and at least one of them must be left for the answer.",
                    field="messages",
                    reason=CONTEXT_FULL,
                )
            return room if wanted is not None and room < wanted else None
        return None


def stream_with_default_limit(
    client: RestClient, prompt: str, options: dict[str, Any], reply: StreamedReply, *, raw: bool
) -> Iterator[str]:
    """Stream an answer whose `max_tokens` is a default. If it does not fit, use what the context leaves.

    Args:
        client: Client of the gateway.
        prompt: The question of a chat, or a text to continue.
        options: Fields of the request. `max_tokens` changes if it does not fit.
        reply: The result.
        raw: True to continue the prompt as plain text.

    Raises:
        UnavailableError: No server answers.
        OutriderError: The server reports another error, or cannot count tokens.
    """
    messages = [{"role": "user", "content": prompt}]

    def stream() -> Iterator[str]:
        if raw:
            return client.stream_completion(prompt, options, reply)
        return client.stream_chat(messages, options, reply)

    try:
        yield from stream()
    except OutriderError as error:
        if error.reason != CONTEXT_FULL or error.field != "max_tokens" or reply.text:
            raise
        num_tokens, context = client.count_tokens(prompt if raw else messages)
        options["max_tokens"] = max(1, context - num_tokens)
        yield from stream()
