"""Request fields that several routes share (sampling, streaming, speculation), and unsupported fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from outrider.services.gateway.parameters import Parameters
from outrider.services.gateway.request import RequestedSpeculation
from outrider.services.gateway.requested_rules import NO_REQUESTED_LOGPROBS, RequestedLogprobs
from outrider.services.gateway.schemas.sampling_fields import SamplingFields
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.generation import SpeculationMode


class StrictModel(BaseModel):
    """Base model that rejects unknown fields, NaN, and values of another type (such as "1" for 1)."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class SpeculationOptions(StrictModel):
    """The `speculation` object of a request. `max_nodes` includes the root.

    A request without this object is treated as if the object were empty, so its mode is ``auto``.
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


class StreamOptions(StrictModel):
    """The `stream_options` object.

    `include_obfuscation`, OpenAI's padding against traffic analysis, has no effect here.
    """

    include_usage: bool = False
    include_obfuscation: bool = False


def _one_or_many(value: object) -> object:
    """Accept one string or a list. Raise one clear error for any other value.

    pydantic itself would list one error for each type of the union.
    """
    if value is None:
        return None
    many = [value] if isinstance(value, str) else value
    if not isinstance(many, list) or not all(isinstance(one, str) for one in many):
        raise ValueError("must be a string or a list of strings")
    return many


def _one_id_or_many(value: object) -> object:
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


StopStrings = Annotated[list[str], BeforeValidator(_one_or_many, json_schema_input_type=str | list[str])]
TokenIds = Annotated[list[int], BeforeValidator(_one_id_or_many, json_schema_input_type=int | list[int])]

Neutral = Any
"""Type of an unsupported parameter. Only its neutral values are accepted. The error names the parameter."""


class NeutralOnly(StrictModel):
    """A model with unsupported fields. `NEUTRAL` lists the neutral values that each such field accepts."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def refuse_unsupported(self, prefix: str = "") -> None:
        """Raise InvalidRequestError for the first unsupported field whose value would change the answer.

        Args:
            prefix: Prefix of the field's name in the error.
        """
        for name, neutral in self.NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
                field = prefix + name
                raise InvalidRequestError(
                    f"{field} is not supported yet. Leave it out.",
                    field=field,
                    reason="unsupported_parameter",
                )


ZERO = (0, 0.0)
ONE = (1, 1.0)


class OpenAIRequest(NeutralOnly, SamplingFields):
    """Fields of the chat and text completions routes. None means that a field is absent."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "response_format": ({"type": "text"},),
        "regex": (),
        "ebnf": (),
        "json_schema": (),
    }

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: StopStrings | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
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
    priority: int | None = None
    cache_salt: str | None = None

    # OpenAI defines the next fields. The fields have no effect here.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    response_format: Neutral = None
    regex: Neutral = None
    ebnf: Neutral = None
    json_schema: Neutral = None

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
        return Parameters(
            max_tokens=self.token_limit(),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            n=self.n,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop_string=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            speculation=(self.speculation or SpeculationOptions()).params(),
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            rules=self.rules(self.min_tokens),
            logprobs=self.wanted_logprobs(),
        )

    def wanted_logprobs(self) -> RequestedLogprobs:
        """Return the logprobs that the client wants."""
        return NO_REQUESTED_LOGPROBS

    def token_limit(self) -> int | None:
        """Return the client's limit of new tokens, or None."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage
