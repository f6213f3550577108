"""Request bodies of ``POST /generate`` (in SGLang's format), ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from outrider.services.gateway.options.values import of_bodies
from outrider.services.gateway.parameters import Parameters
from outrider.services.gateway.requested_rules import NO_REQUESTED_LOGPROBS, RequestedLogprobs, check_top
from outrider.services.gateway.schemas.base import Neutral, NeutralOnly, OpenModel, check_one_per_prompt
from outrider.services.gateway.schemas.chat_messages import Message
from outrider.services.gateway.schemas.constraint_fields import SglangForms
from outrider.services.gateway.schemas.option_fields.generate import GenerateFields, GenerateSamplingFields
from outrider.services.gateway.schemas.option_fields.sampling import SamplingFields
from outrider.services.gateway.schemas.speculation_fields import requested_speculation
from outrider.services.gateway.schemas.state_fields import requested_states
from outrider.services.gateway.schemas.tools import Tool
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.logit_rules import LogprobParams


class NativeSamplingParams(NeutralOnly, GenerateSamplingFields, SamplingFields, SglangForms):
    """The `sampling_params` object, with SGLang's names and defaults."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "structural_tag": (),
        "spaces_between_special_tokens": (True,),
        "custom_params": ({},),
    }

    structural_tag: Neutral = None
    spaces_between_special_tokens: Neutral = None
    custom_params: Neutral = None


PER_PROMPT = (
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_hidden_states",
    "cache_salt",
    "extra_key",
)
"""Fields that may be lists with one entry per prompt."""


class NativeRequest(NeutralOnly, GenerateFields):
    """The request body. It contains either `text` or `input_ids`: one prompt, or a batch of prompts."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "input_embeds": (),
        "image_data": (),
        "lora_path": (),
        "session_params": (),
        "custom_logit_processor": (),
    }

    sampling_params: NativeSamplingParams | list[NativeSamplingParams] | None = Field(
        None, description="Sampling parameters, or a list with one entry per prompt."
    )
    input_embeds: Neutral = None
    image_data: Neutral = None
    lora_path: Neutral = None
    session_params: Neutral = None
    custom_logit_processor: Neutral = None

    def source(self) -> str | list[str] | list[int] | list[list[int]]:
        """Return the prompt, or the batch of prompts.

        Raises:
            InvalidRequestError: If both fields or neither are set.
        """
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequestError("Set exactly one of text and input_ids.", field="text")
        return self.input_ids if self.text is None else self.text  # type: ignore[return-value]

    @property
    def is_batch(self) -> bool:
        """True if the request contains a batch of prompts. The reply to a batch is a list."""
        source = self.source()
        return isinstance(source, list) and not (source and isinstance(source[0], int))

    def per_prompt(self, num_prompts: int) -> tuple[Parameters, ...]:
        """Return the generation parameters of each prompt. Empty if all prompts have the same parameters.

        Raises:
            InvalidRequestError: If the length of a list differs from the number of prompts, or for the
                reasons of `parameters`.
        """
        for name in (*PER_PROMPT, "rid"):
            check_one_per_prompt(name, getattr(self, name), num_prompts)
        ids = self.token_ids_logprob
        listed = bool(ids) and isinstance(ids, list) and isinstance(ids[0], list)
        if listed and ids is not None and len(ids) != num_prompts:
            raise InvalidRequestError(
                f"token_ids_logprob has {len(ids)} lists, but there are {num_prompts} prompts.",
                field="token_ids_logprob",
            )
        if not listed and not any(isinstance(getattr(self, name), list) for name in PER_PROMPT):
            return ()
        return tuple(self.parameters(number) for number in range(num_prompts))

    def parameters(self, number: int = 0) -> Parameters:
        """Return the sampling, stopping and speculation parameters of one prompt.

        Args:
            number: Index of the prompt. It selects the entry of each field that is a list.

        Raises:
            InvalidRequestError: If an unsupported field is set, or the two names of the seed have different
                values.
        """
        self.refuse_unsupported()
        given = self._of("sampling_params", number) or NativeSamplingParams()
        given.refuse_unsupported("sampling_params.")
        salts = {name: self._of(name, number) for name in ("cache_salt", "extra_key")}
        return Parameters.of(
            of_bodies(given, self.model_copy(update=salts), prefix="sampling_params."),
            speculation=requested_speculation(self.speculation),
            logprobs=self.wanted_logprobs(number),
            constraint=given.constraint("sampling_params."),
            may_be_empty=True,
            states=requested_states(
                bool(self._of("return_hidden_states", number)),
                bool(self.return_routed_experts),
                self.routed_experts_start_len or 0,
                stream=bool(self.stream),
            ),
        )

    def _of(self, name: str, number: int) -> Any:
        """Return the value of a field for one prompt. None if the field is a list that is too short."""
        value = getattr(self, name)
        if not isinstance(value, list):
            return value
        return value[number] if number < len(value) else None

    def wanted_logprobs(self, number: int = 0) -> RequestedLogprobs:
        """Return the logprobs that the client wants for one prompt.

        Raises:
            InvalidRequestError: If top_logprobs_num is out of range.
        """
        top = check_top(self._of("top_logprobs_num", number), "top_logprobs_num") or 0
        if not self._of("return_logprob", number):
            return NO_REQUESTED_LOGPROBS
        given = self._of("logprob_start_len", number)
        start = -1 if given is None else given
        # As in SGLang, the token at the start position itself has no logprob.
        first = 0 if start < 0 else start + 1
        wanted = LogprobParams(top, None if start < 0 else top, first, self._token_ids(number))
        return RequestedLogprobs(wanted)

    def _token_ids(self, number: int) -> tuple[int, ...]:
        """Return the tokens whose logprobs the client wants at each token of one prompt and its answer."""
        found: list[Any] = self.token_ids_logprob or []
        if found and isinstance(found[0], list):
            found = found[number] if number < len(found) else []
        return tuple(found)


class TokenizeRequest(OpenModel):
    """Request body of ``/tokenize``: one or more texts, or the messages of a chat."""

    prompt: str | list[str] | None = None
    messages: list[Message] | None = None
    model: str | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for texts, false for messages.")
    add_generation_prompt: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = Field(None, description="Also return the tokens as text.")


class DetokenizeRequest(OpenModel):
    """Request body of ``/detokenize``."""

    tokens: list[int] | list[list[int]] = Field(max_length=1_000_000)
    model: str | None = None
    skip_special_tokens: bool = False


class AbortRequest(OpenModel):
    """Request body of ``/abort_request``."""

    rid: str | None = None
    abort_all: bool = False
