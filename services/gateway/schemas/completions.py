"""Request body of ``POST /v1/completions``: one prompt or a batch, as text or as token ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, cast

from outrider.services.gateway.parameters import Parameters, check_prompt_text, draw_seed
from outrider.services.gateway.requested_rules import RequestedLogprobs, check_top
from outrider.services.gateway.schemas.base import Neutral, check_one_per_prompt
from outrider.services.gateway.schemas.common import OpenAIRequest
from outrider.services.gateway.schemas.option_fields.openai import CompletionFields
from outrider.services.gateway.schemas.state_fields import StateFields
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.logit_rules import LogprobParams

SALTS = ("cache_salt", "extra_key")
"""The names of the salt of the prefix cache. Each may be a list with one entry per prompt."""
Prompt = str | list[str] | list[int] | list[list[int]]


class CompletionRequest(CompletionFields, StateFields, OpenAIRequest):
    """The request body. `prompt` is a text, a list of token ids, or a batch of texts or of such lists."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **OpenAIRequest.NEUTRAL,
        "suffix": ("",),
    }

    suffix: Neutral = None

    def parameters(self) -> Parameters:
        """Return the sampling, stopping and speculation parameters of the request.

        If `best_of` is set, the result's `n` is the number of answers from which the best ones are chosen.

        Raises:
            InvalidRequestError: If `best_of` is invalid, or for the reasons of `OpenAIRequest.parameters`.
        """
        may_be_empty = bool(self.echo) or self.prompt_logprobs is not None
        # `per_prompt` adds the salts if they are lists.
        listed = [name for name in SALTS if isinstance(getattr(self, name), list)]
        alike = self.model_copy(update=dict.fromkeys(listed)) if listed else self
        parameters = replace(super(CompletionRequest, alike).parameters(), may_be_empty=may_be_empty)
        if self.best_of is None:
            return parameters
        if self.best_of < (self.n or 1):
            raise InvalidRequestError(
                f"best_of must be at least n, which is {self.n or 1}, not {self.best_of}.", field="best_of"
            )
        if self.stream and self.best_of > (self.n or 1):
            raise InvalidRequestError("best_of above n does not allow stream: true.", field="best_of")
        return replace(parameters, n=self.best_of)

    def per_prompt(self, parameters: Parameters, num_prompts: int) -> tuple[Parameters, ...]:
        """Return the parameters of each prompt. Empty if all prompts have the same parameters.

        Args:
            parameters: What the prompts have in common.
            num_prompts: Number of prompts.

        Raises:
            InvalidRequestError: If the length of a list differs from the number of prompts, or a prompt has
                two different salts.
        """
        given = {name: getattr(self, name) for name in SALTS}
        if not any(isinstance(value, list) for value in given.values()):
            return ()
        for name, value in given.items():
            check_one_per_prompt(name, value, num_prompts)
        if parameters.seed is None:
            parameters = replace(parameters, seed=draw_seed())
        found = []
        for number in range(num_prompts):
            salts = [value[number] if isinstance(value, list) else value for value in given.values()]
            first, *others = [salt for salt in salts if salt is not None]
            if any(salt != first for salt in others):
                raise InvalidRequestError(
                    f"{' and '.join(SALTS)} differ. Set only one of them.", field=SALTS[0]
                )
            check_prompt_text(first, SALTS[0])
            found.append(replace(parameters, cache_salt=first))
        return tuple(found)

    def wanted_logprobs(self) -> RequestedLogprobs:
        """Return the logprobs that the client wants or that the server needs for `best_of`.

        Raises:
            InvalidRequestError: If logprobs or prompt_logprobs is out of range.
        """
        top, listed = check_top(self.logprobs, "logprobs"), self.prompt_list(self.prompt_logprobs)
        echoed = top if self.echo else None
        if top is None and self.best_of is not None and self.best_of > (self.n or 1):
            top = 0
        prompt_top = max((one for one in (echoed, listed) if one is not None), default=None)
        wanted = LogprobParams(top, prompt_top)
        return RequestedLogprobs(wanted, bool(self.return_tokens_as_token_ids), echoed, listed)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a batch. A single prompt is a batch of one."""
        return as_batch(self.prompt)


def as_batch(prompt: Prompt) -> list[str | list[int]]:
    """Return a list with one entry per prompt: its text, or its token ids."""
    if isinstance(prompt, str):
        return [prompt]
    # Validation has ensured that all entries have one type. Checking millions of ids again would be slow.
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return cast("list[str | list[int]]", list(prompt))
