"""Request body of ``POST /v1/completions``: prompts as text or token ids, single or in a batch."""

from __future__ import annotations

from typing import Any, ClassVar

from outrider.services.gateway.schemas.common import Neutral, OpenAIRequest

Prompt = str | list[str] | list[int] | list[list[int]]


class CompletionRequest(OpenAIRequest):
    """The request body. `prompt` is text, token ids, or a batch of either."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **OpenAIRequest.NEUTRAL,
        "logprobs": (),
        "suffix": ("",),
        "best_of": (1,),
    }

    prompt: Prompt
    echo: bool | None = None

    logprobs: Neutral = None
    suffix: Neutral = None
    best_of: Neutral = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a batch. A single prompt is a batch of one."""
        return as_batch(self.prompt)


def as_batch(prompt: Prompt) -> list[str | list[int]]:
    """Return one entry per prompt: its text or its token ids."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [part for part in prompt if isinstance(part, int)]
    if ids or not prompt:
        return [ids] if ids else []
    return [part for part in prompt if not isinstance(part, int)]
