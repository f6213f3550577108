"""Request fields that several routes share (sampling, streaming, speculation), and unsupported fields."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from outrider.services.gateway.options import of_bodies
from outrider.services.gateway.parameters import Parameters
from outrider.services.gateway.request import RequestedSpeculation
from outrider.services.gateway.requested_rules import NO_REQUESTED_LOGPROBS, RequestedLogprobs, check_top
from outrider.services.gateway.requested_states import NO_REQUESTED_STATES, RequestedStates
from outrider.services.gateway.schemas.base import NeutralOnly, OpenModel, StrictModel
from outrider.services.gateway.schemas.constraint_fields import OpenAIForms
from outrider.services.gateway.schemas.sampling_fields import SamplingFields
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.generation import SpeculationMode


class SpeculationOptions(StrictModel):
    """The `speculation` object of a request. The number `max_nodes` includes the root of the draft tree.

    A request without this object is treated like a request with an empty object: the mode is ``auto``.
    """

    mode: Literal["auto", "on", "off"] = "auto"
    depth: int | None = None
    topk: int | None = None
    max_nodes: int | None = None
    trace: bool = False

    def params(self) -> RequestedSpeculation:
        """Return the options as `RequestedSpeculation`."""
        return RequestedSpeculation(
            SpeculationMode(self.mode), self.depth, self.topk, self.max_nodes, self.trace
        )


class StreamOptions(OpenModel):
    """The `stream_options` object.

    `include_obfuscation` has no effect here. In OpenAI's API, it adds padding against traffic analysis.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="Send the usage so far with every chunk, if include_usage is set."
    )
    include_obfuscation: Any = None


Neutral = Any
"""Type of an unsupported parameter.

Only values that ask for nothing are accepted. Errors name the parameter.
"""


ZERO = (0, 0.0)
ONE = (1, 1.0)

PROMPT_LOGPROBS = Field(
    None, description="vLLM's logprobs of the prompt: number of alternatives per token, 0 to 20."
)


class OpenAIRequest(NeutralOnly, SamplingFields, OpenAIForms):
    """Fields that the chat and text completions routes share. None marks an absent field."""

    # Fields that OpenAI defines, and that cannot change the answers of this server.
    NO_EFFECT: ClassVar[frozenset[str]] = frozenset(
        [
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
        ]
    )

    model: str | None = None
    max_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = Field(None, description="Include token ids in each choice.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationOptions | None = None
    rid: str | None = Field(
        None, max_length=128, description="SGLang's name for a request id. It becomes the id of the reply."
    )
    min_tokens: int | None = Field(
        None, description="Number of tokens before which no stop token or stop string ends the answer."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Write the tokens of logprobs as token_id:N."
    )
    request_id: str | None = Field(None, max_length=128, description="vLLM's name of `rid`.")
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its special tokens. Default: only in completions."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep only this many tokens at the end of the prompt; -1: as many as fit."
    )
    priority: int | None = None
    cache_salt: str | None = None

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None

    def parameters(self) -> Parameters:
        """Return the sampling, stopping and speculation parameters.

        Raises:
            InvalidRequestError: If an unsupported field is set, or stream_options is set without stream.
        """
        self.refuse_unsupported()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is only allowed with stream: true.", field="stream_options"
            )
        return Parameters.of(
            of_bodies(self),
            speculation=(self.speculation or SpeculationOptions()).params(),
            logprobs=self.wanted_logprobs(),
            constraint=self.constraint(),
            states=self.wanted_states(),
        )

    def wanted_logprobs(self) -> RequestedLogprobs:
        """Return the logprobs that the client wants."""
        return NO_REQUESTED_LOGPROBS

    def wanted_states(self) -> RequestedStates:
        """Return the hidden states and routed experts that the client wants."""
        return NO_REQUESTED_STATES

    def prompt_list(self, number: int | None) -> int | None:
        """Check `prompt_logprobs` and return it.

        Raises:
            InvalidRequestError: If the number is out of range, or the reply is a stream.
        """
        if number is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs does not allow stream: true.", field="prompt_logprobs")
        return check_top(number, "prompt_logprobs")

    @property
    def reply_id(self) -> str | None:
        """The client's id for the reply, or None."""
        return self.rid or self.request_id

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if every chunk of a stream contains the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)
