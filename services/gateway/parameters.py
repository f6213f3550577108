"""Checks request parameters and builds checked requests. This module has all range checks of REST and gRPC.

Errors use the field names of the client's API, which `Surface` provides.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.services.gateway.keys.caller import allowed_model
from outrider.services.gateway.options.table import READ_OPTIONS
from outrider.services.gateway.options.values import OptionValues
from outrider.services.gateway.prompt_lengths import check_prompt_length
from outrider.services.gateway.request import (
    GenerationRequest,
    RequestedSpeculation,
    StopRules,
)
from outrider.services.gateway.requested_rules import (
    NO_REQUESTED_LOGPROBS,
    NO_REQUESTED_RULES,
    Encode,
    RequestedLogprobs,
    RequestedRules,
)
from outrider.services.gateway.requested_speculation import check_speculation
from outrider.services.gateway.requested_states import NO_REQUESTED_STATES, RequestedStates
from outrider.services.gateway.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from outrider.services.gateway.served_target import ServedTarget, unknown_model
from outrider.services.gateway.settings import GatewaySettings
from outrider.services.gateway.stop_regex import compile_stops, is_plain
from outrider.shared.base.constraint import Constraint
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.generation import MAX_SEED, SamplingParams
from outrider.shared.base.logit_rules import LogitRules

MAX_STOP_TOKEN_IDS = 256
# Lower temperatures are treated as 0, as in SGLang, because sampling would always pick the largest logit.
GREEDY_TEMPERATURE = 1e-6
MAX_SALT_CHARS = 256
MOST_TEMPERATURE = 1e6
# Some clients read JSON numbers as doubles. A double represents every integer of up to 53 bits exactly.
DRAWN_SEED_BITS = 53


@dataclass(frozen=True, slots=True)
class Surface:
    """Field names and defaults of one of the APIs that clients use.

    Attributes:
        prompt: Name of the field that contains the prompt.
        max_tokens: Name of the field that limits new tokens.
        prefix: Prefix of the names of sampling parameters.
        default_max_tokens: Limit of new tokens if the client sets no limit. None allows all tokens that fit.
        speculation: Name of the field that contains the speculation options.
        min_tokens: Name of the field for the least number of tokens.
        most_temperature: Largest temperature. SGLang has no limit.
    """

    prompt: str
    max_tokens: str
    prefix: str = ""
    default_max_tokens: int | None = None
    speculation: str = "speculation"
    min_tokens: str = "min_tokens"
    most_temperature: float = 2.0


CHAT = Surface("messages", "max_tokens")
COMPLETIONS = Surface("prompt", "max_tokens", default_max_tokens=16)
NATIVE = Surface(
    "input_ids",
    "sampling_params.max_new_tokens",
    "sampling_params.",
    default_max_tokens=128,
    min_tokens="min_new_tokens",
    most_temperature=MOST_TEMPERATURE,
)
RESPONSES = Surface("input", "max_output_tokens")
ANTHROPIC = Surface("messages", "max_tokens")
NATIVE_TEXT = replace(NATIVE, prompt="text")
GRPC_CHAT = Surface("messages", "options.max_tokens", "options.", speculation="options.speculation")
GRPC_COMPLETE = replace(GRPC_CHAT, prompt="prompt", default_max_tokens=16)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Unchecked parameters of a client's request. None marks an absent parameter.

    Fields that accept one value or several, such as `stop`, are tuples here. `may_be_empty` allows
    a `max_tokens` of 0, for replies that contain the prompt or its logprobs. `constraint` restricts the form
    of the output.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False
    skip_special_tokens: bool = True
    speculation: RequestedSpeculation = field(default_factory=RequestedSpeculation)
    priority: int = 0
    cache_salt: str = ""
    rules: RequestedRules = NO_REQUESTED_RULES
    logprobs: RequestedLogprobs = NO_REQUESTED_LOGPROBS
    may_be_empty: bool = False
    constraint: Constraint | None = None
    states: RequestedStates = NO_REQUESTED_STATES

    @classmethod
    def of(cls, values: OptionValues, **others: Any) -> Parameters:
        """Return the parameters with these options, and with values of the other attributes."""
        return cls(**values.parameters, rules=RequestedRules(**values.rules), **others)


class RequestBuilder:
    """Checks parameters against the settings and the target's limits, and builds requests."""

    def __init__(
        self,
        settings: GatewaySettings,
        encode: Encode | None = None,
        defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> None:
        """Create a builder.

        Args:
            settings: The gateway's settings, which limit requests.
            encode: Encodes the texts of `bad_words`. None if the server has no tokenizer.
            defaults: Values of the parameters that a request leaves out.
        """
        self._settings = settings
        self._defaults = defaults
        self._encode = encode
        self._names = frozenset(settings.served_model_name)

    def check_model(self, model: str | None, info: ServedTarget) -> str:
        """Return the model name that the reply contains.

        Raises:
            ModelNotFoundError: If the name is unknown. The message lists the served names.
        """
        names = self._settings.served_model_name or (info.model_id,)
        if model is None or (not model and self._settings.any_model):
            return allowed_model(names[0])
        if model not in names and not self._settings.any_model:
            raise unknown_model(model, names)
        return allowed_model(model)

    def check(self, parameters: Parameters, surface: Surface, num_prompts: int) -> int:
        """Run all checks of the parameters that need neither the tokenizer nor the target.

        Returns:
            The number of sequences in the request.

        Raises:
            InvalidRequestError: If a value is invalid. The error names the field, the value and the valid
                range.
        """
        name = surface.prefix
        p = parameters
        n, most = 1 if p.n is None else p.n, self._settings.max_choices
        _check(1 <= n <= most, f"{name}n", f"between 1 and {most}", n)
        if not 1 <= num_prompts <= self._settings.max_batch:
            raise InvalidRequestError(
                f"{surface.prompt} must contain 1 to {self._settings.max_batch} prompts, not {num_prompts}.",
                field=surface.prompt,
            )
        if p.max_tokens is not None:
            least = 0 if p.may_be_empty else 1
            _check(p.max_tokens >= least, surface.max_tokens, f"at least {least}", p.max_tokens)
        for option in READ_OPTIONS:
            value = None if option.is_rule else getattr(p, option.name)
            if option.name == "temperature":
                hottest = surface.most_temperature
                valid = value is None or 0 <= value <= hottest
                _check(valid, f"{name}temperature", f"between 0 and {hottest:g}", value)
            elif option.allowed is not None and value is not None:
                given = option.name if option.is_outer else name + option.name
                _check(value in option.allowed, given, option.allowed.text, value)
        check_prompt_text(p.cache_salt, "cache_salt")
        if len(p.cache_salt) > MAX_SALT_CHARS:
            raise InvalidRequestError(
                f"cache_salt must have at most {MAX_SALT_CHARS} characters.", field="cache_salt"
            )
        self._check_stops(p, name)
        most = self._settings.max_queued_requests
        if n * num_prompts > most:
            raise InvalidRequestError(
                f"{name}n={n} for {num_prompts} prompts makes {n * num_prompts} sequences. At most {most} "
                "can wait on this server.",
                field=f"{name}n",
            )
        with _named(surface):
            compile_stops(p.stop_regex)
            p.rules.check()
        min_tokens = p.rules.min_tokens or 0
        if p.max_tokens is not None and min_tokens > p.max_tokens:
            field = name + surface.min_tokens
            raise InvalidRequestError(
                f"{field} must be at most {surface.max_tokens}, which is {p.max_tokens}, not {min_tokens}.",
                field=field,
            )
        return n * num_prompts

    def _check_stops(self, p: Parameters, name: str) -> None:
        most, longest = self._settings.max_stop_strings, self._settings.max_stop_chars
        for given, stops in ((f"{name}stop", p.stop), (f"{name}stop_regex", p.stop_regex)):
            if len(stops) > most:
                message = f"{given} accepts at most {most} strings, not {len(stops)}."
                raise InvalidRequestError(message, field=given)
            for stop in stops:
                check_prompt_text(stop, given)
                if not 1 <= len(stop) <= longest:
                    message = f"Each string of {given} must have 1 to {longest} characters."
                    raise InvalidRequestError(message, field=given)
            if stops and self._settings.tokenizer is None:
                raise InvalidRequestError(
                    f"{given} requires a tokenizer, and this server runs without one. Use stop_token_ids.",
                    field=given,
                    reason="no_tokenizer",
                )
        if len(p.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"{name}stop_token_ids accepts at most {MAX_STOP_TOKEN_IDS} ids.",
                field=f"{name}stop_token_ids",
            )

    def build(
        self,
        prompts: Sequence[tuple[int, ...]],
        parameters: Parameters,
        surface: Surface,
        info: ServedTarget,
        deadline: float,
    ) -> list[GenerationRequest]:
        """Return `n` checked requests for each prompt, grouped by prompt. All requests use the same seed.

        Args:
            prompts: Token ids of every prompt.
            parameters: Parameters that `check` has accepted.
            surface: Field names and defaults of the client's API.
            info: The target's limits.
            deadline: Deadline of the requests, on the event loop's clock.

        Raises:
            InvalidRequestError: If a prompt is empty or too long, a token id is outside the vocabulary, or a
                speculation option exceeds the target's limit.
        """
        # 1. Check the values against the target and its vocabulary.
        check_speculation(parameters.speculation, surface.speculation, info)
        if (form := parameters.constraint) is not None and not info.constrains:
            raise InvalidRequestError(f"{form.field} needs a newer target.", field=form.field)
        parameters = _with_defaults(parameters, self._defaults)
        for token_id in parameters.stop_token_ids:
            _check(
                0 <= token_id < info.vocab_size,
                f"{surface.prefix}stop_token_ids",
                f"below the vocabulary size {info.vocab_size}",
                token_id,
            )
        with _named(surface):
            rules = parameters.rules.build(self._encode, info.vocab_size)
        # 2. Settle what all sequences of the request share.
        mode = parameters.speculation.mode or self._settings.speculation_mode
        seed = draw_seed() if parameters.seed is None else parameters.seed & MAX_SEED
        request_id = uuid.uuid4().hex
        # As in SGLang, a pattern without special characters is cut off like a stop string.
        regexes = tuple(one for one in parameters.stop_regex if not is_plain(one))
        stops = (*parameters.stop, *(one for one in parameters.stop_regex if is_plain(one)))
        # 3. Build `n` sequences for each prompt.
        requests: list[GenerationRequest] = []
        for prompt_ids in prompts:
            max_new_tokens = check_prompt_length(
                prompt_ids,
                parameters.max_tokens,
                info,
                prompt_field=surface.prompt,
                max_tokens_field=surface.max_tokens,
                default=surface.default_max_tokens,
            )
            for choice in range(parameters.n or 1):
                requests.append(
                    GenerationRequest(
                        request_id=f"{request_id}-{len(requests)}",
                        prompt_ids=prompt_ids,
                        max_new_tokens=max_new_tokens,
                        sampling=_sampling(parameters, seed, choice, rules),
                        speculation=replace(parameters.speculation, mode=mode),
                        stop=StopRules(
                            strings=stops,
                            regexes=regexes,
                            token_ids=frozenset(parameters.stop_token_ids),
                            ignore_eos=parameters.ignore_eos,
                            include_stop_string=parameters.include_stop_string,
                            skip_special_tokens=parameters.skip_special_tokens,
                            min_tokens=rules.min_tokens,
                        ),
                        deadline=deadline,
                        priority=parameters.priority,
                        cache_salt=parameters.cache_salt,
                        logprobs=parameters.logprobs.wanted,
                        prompt_only=parameters.max_tokens == 0,
                        constraint=parameters.constraint,
                        states=parameters.states.wanted,
                    )
                )
        return requests

    @staticmethod
    def truncate(
        prompt_ids: tuple[int, ...], keep: int | None, parameters: Parameters, info: ServedTarget
    ) -> tuple[int, ...]:
        """Return the last `keep` tokens of a prompt.

        Args:
            prompt_ids: Token ids of the prompt.
            keep: Number of tokens to keep. With -1, keep all tokens that fit in the context together with the
                new tokens. With None, keep all tokens.
            parameters: Parameters of the request, which limit the new tokens.
            info: The target's limits.
        """
        if keep == -1:
            keep = max(1, info.max_model_len - (parameters.max_tokens or 1))
        return prompt_ids if keep is None else prompt_ids[len(prompt_ids) - min(keep, len(prompt_ids)) :]


def draw_seed() -> int:
    """Return a random seed, for a request that has none."""
    return secrets.randbits(DRAWN_SEED_BITS)


def _check(valid: bool, field: str, allowed: str, value: object) -> None:
    if not valid:
        raise InvalidRequestError(f"{field} must be {allowed}, not {value}.", field=field)


def check_prompt_text(text: str, field: str) -> None:
    """Reject text that cannot be encoded in UTF-8. JSON escapes can contain lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"{field} contains a lone surrogate, which is not valid text.", field=field
        ) from None


@contextmanager
def _named(surface: Surface) -> Iterator[None]:
    """Change errors of the `with` block so that they use the field name of the client's API."""
    try:
        yield
    except InvalidRequestError as error:
        name = error.field or ""
        given = surface.prefix + (surface.min_tokens if name == "min_tokens" else name)
        message = error.message.replace(name, given, 1)
        raise InvalidRequestError(message, field=given, reason=error.reason) from None


def _with_defaults(p: Parameters, defaults: SamplingDefaults) -> Parameters:
    if defaults == NO_DEFAULTS:
        return p
    rules = p.rules
    if rules.repetition_penalty is None:
        rules = replace(rules, repetition_penalty=defaults.repetition_penalty)
    return replace(
        p,
        temperature=defaults.temperature if p.temperature is None else p.temperature,
        top_k=defaults.top_k if p.top_k is None else p.top_k,
        top_p=defaults.top_p if p.top_p is None else p.top_p,
        min_p=defaults.min_p if p.min_p is None else p.min_p,
        rules=rules,
    )


def _sampling(parameters: Parameters, seed: int, choice: int, rules: LogitRules) -> SamplingParams:
    temperature = 1.0 if parameters.temperature is None else parameters.temperature
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_TEMPERATURE else temperature,
        top_k=max(0, parameters.top_k or 0),
        top_p=1.0 if parameters.top_p is None else parameters.top_p,
        min_p=parameters.min_p or 0.0,
        seed=seed,
        choice_index=choice,
        rules=rules,
    )
