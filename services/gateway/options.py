"""The table of the options that clients can set: their names in REST and gRPC, their defaults and ranges.

The gateway reads REST bodies and gRPC messages with this table, and checks values with it. The script
`scripts/grpc_fields.py` generates a part of docs/api.md from the table. A new option needs an entry in the
table, a field in the REST models and a field in the gRPC messages. If one of these is missing, a test fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from outrider.shared.base.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a numeric option may have.

    Attributes:
        least, most: Smallest and largest value.
        text: Description of the values, for error messages.
        above: True if the value must be above `least`.
    """

    least: float
    most: float
    text: str
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.above and value == self.least)


@dataclass(frozen=True, slots=True)
class Option:
    """One option that clients can set.

    Attributes:
        name: Name of the attribute of `Parameters`, or of `RequestedRules` if `is_rule` is set.
        grpc: Path of the field in the gRPC message `GenerationOptions`.
        rest: Names of the fields in all REST routes. If a request sets several of these fields, their values
            must be equal. A boolean option is true if one of its fields is true.
        default: Value of the option if a request does not set it.
        allowed: The range, if it does not depend on the settings or on the target. Otherwise None.
        is_rule: True if the option changes the logits.
        is_outer: True if, in SGLang's format, the field stands next to `sampling_params` and not inside it.
    """

    name: str
    grpc: str
    rest: tuple[str, ...]
    default: Any = None
    allowed: Range | None = None
    is_rule: bool = False
    is_outer: bool = False


def _option(
    name: str, default: Any = None, *, rest: str | None = None, grpc: str = "", **more: Any
) -> Option:
    """Return an option. Unless other names are given, all APIs use its name."""
    return Option(name, grpc or name, tuple((name if rest is None else rest).split()), default, **more)


def _sampling(name: str, *, rest: str | None = None, allowed: Range | None = None) -> Option:
    """Return an option of the message `SamplingOptions`."""
    return _option(name, rest=rest, grpc=f"sampling.{name}", allowed=allowed)


def _rule(name: str, rest: str | None = None) -> Option:
    """Return a rule of the message `SamplingOptions`."""
    return _option(name, rest=rest, grpc=f"sampling.{name}", is_rule=True)


_TOP_K = Range(-1, (1 << 31) - 1, f"between 1 and {(1 << 31) - 1}, or -1 or 0 to disable it")
_INT_32 = Range(-(1 << 31), (1 << 31) - 1, "a 32-bit integer")
_SEED = Range(-(1 << 63), (1 << 64) - 1, "a 64-bit integer")

OPTIONS = (
    _option("max_tokens", rest="max_tokens max_completion_tokens max_new_tokens max_output_tokens"),
    _sampling("temperature", allowed=Range(0, 2, "between 0 and 2")),
    _sampling("top_k", allowed=_TOP_K),
    _sampling("top_p", allowed=Range(0, 1, "above 0 and at most 1", above=True)),
    _sampling("min_p", allowed=Range(0, 1, "between 0 and 1")),
    _sampling("seed", rest="seed sampling_seed", allowed=_SEED),
    _option("n"),
    _option("stop", (), rest="stop stop_sequences"),
    _option("stop_token_ids", ()),
    _option("ignore_eos", False),
    _option("include_stop_string", False, rest="include_stop_str_in_output no_stop_trim"),
    _option("skip_special_tokens", True),
    _option("priority", 0, allowed=_INT_32, is_outer=True),
    _option("cache_salt", "", is_outer=True),
    _rule("presence_penalty"),
    _rule("frequency_penalty"),
    _rule("repetition_penalty"),
    _rule("logit_bias"),
    _rule("min_tokens", rest="min_tokens min_new_tokens"),
    _rule("allowed_token_ids"),
    _option("bad_words", (), is_rule=True),
    _option("bad_word_ids", (), rest="", grpc="sampling.bad_words", is_rule=True),
)


@dataclass(frozen=True, slots=True)
class OptionValues:
    """The options of a request: the arguments of `Parameters`, and those of `RequestedRules`."""

    parameters: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)

    def put(self, option: Option, value: Any) -> None:
        """Add the value of an option. None stands for its default."""
        values = self.rules if option.is_rule else self.parameters
        values[option.name] = option.default if value is None else value


def of_bodies(*bodies: BaseModel, prefix: str = "") -> OptionValues:
    """Read the options from the body of a REST request.

    Args:
        bodies: Parsed parts of the body. Each part may declare some of the fields.
        prefix: Text to put before field names in errors.

    Raises:
        InvalidRequestError: Two fields of one option have different values.
    """
    values = OptionValues()
    declared = {name: getattr(body, name) for body in bodies for name in type(body).model_fields}
    for option in OPTIONS:
        given = {name: declared[name] for name in option.rest if declared.get(name) is not None}
        first = next(iter(given.values()), None)
        if option.default is False:
            first = any(given.values())
        elif any(value != first for value in given.values()):
            names = list(given)
            raise InvalidRequestError(
                f"{prefix}{names[0]} and {names[1]} differ. Set only one of them.", field=prefix + names[0]
            )
        values.put(option, tuple(first) if isinstance(first, list) else first)
    return values
