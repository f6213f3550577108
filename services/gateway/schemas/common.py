"""The part of request bodies that all routes in OpenAI's format share."""

from __future__ import annotations

from typing import Any, ClassVar

from outrider.services.gateway.options.values import of_bodies
from outrider.services.gateway.parameters import Parameters
from outrider.services.gateway.requested_rules import NO_REQUESTED_LOGPROBS, RequestedLogprobs, check_top
from outrider.services.gateway.requested_states import NO_REQUESTED_STATES, RequestedStates
from outrider.services.gateway.schemas.base import NeutralOnly
from outrider.services.gateway.schemas.constraint_fields import OpenAIForms
from outrider.services.gateway.schemas.option_fields.openai import OpenAIFields
from outrider.services.gateway.schemas.option_fields.sampling import SamplingFields
from outrider.services.gateway.schemas.speculation_fields import requested_speculation
from outrider.shared.base.errors import InvalidRequestError


class OpenAIRequest(NeutralOnly, OpenAIFields, SamplingFields, OpenAIForms):
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
            speculation=requested_speculation(self.speculation),
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
