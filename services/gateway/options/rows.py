"""The form of a row of the table of options: an option, its REST fields and its gRPC fields."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


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


class FieldGroup(Enum):
    """A class of REST fields in the folder `schemas/option_fields`.

    The value is the file without its suffix, the name of the class and the docstring of the class. Request
    bodies inherit from these classes. Only `SpeculationOptions` is a class of its own.
    """

    SPECULATION = (
        "speculation",
        "SpeculationOptions",
        "The `speculation` object of a request. The number `max_nodes` includes the root of the draft tree."
        "\n\nWithout this object or without a mode, the mode is that of the gateway's setting "
        "`speculation_mode`.",
    )
    FORMS = ("sampling", "FormFields", "SGLang's fields that restrict the form of the answer.")
    SAMPLING = (
        "sampling",
        "SamplingFields",
        "Fields that determine which tokens are chosen, and where an answer ends.",
    )
    OPENAI_FORMS = (
        "openai",
        "OpenAIFormFields",
        "Fields of OpenAI and vLLM that restrict the form of the answer.",
    )
    OPENAI = ("openai", "OpenAIFields", "Fields of all routes in OpenAI's format.")
    CHAT_AND_COMPLETIONS = (
        "openai",
        "ChatAndCompletionFields",
        "Fields of ``/v1/chat/completions`` and ``/v1/completions``.",
    )
    CHAT = ("openai", "ChatFields", "Fields of ``/v1/chat/completions``.")
    COMPLETIONS = ("openai", "CompletionFields", "Fields of ``/v1/completions``.")
    RESPONSES = ("openai", "ResponseFields", "Fields of ``/v1/responses``.")
    MESSAGES = ("messages", "MessagesFields", "Fields of ``/v1/messages``.")
    GENERATE = ("generate", "GenerateFields", "Fields of ``/generate``, outside of `sampling_params`.")
    GENERATE_SAMPLING = (
        "generate",
        "GenerateSamplingFields",
        "Fields of `sampling_params` that only ``/generate`` has.",
    )


@dataclass(frozen=True, slots=True)
class RestField:
    """A field of REST bodies.

    Attributes:
        name: Name of the field.
        type: Type of the field in Python. Unless `default` is set, the field may also be absent or null.
        groups: The classes that have the field.
        about: Description, if it differs from the description of the option.
        bounds: Arguments of pydantic's `Field` that limit the values, such as ``ge=-1``.
        default: The default value, as Python code.
        required: True if a request must have the field.
    """

    name: str
    type: str
    groups: tuple[FieldGroup, ...]
    about: str = ""
    bounds: str = ""
    default: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class GrpcField:
    """A field of a gRPC message.

    Attributes:
        message: Name of the message.
        name: Name of the field.
        type: Type and label of the field in the proto, such as ``optional uint32``.
        number: Number of the field.
        comment: Comment above the field.
        oneof: Name of the oneof that contains the field. Empty if none does.
    """

    message: str
    name: str
    type: str
    number: int
    comment: str = ""
    oneof: str = ""


class Reader(Enum):
    """Code that reads an option from a request.

    Attributes:
        PARAMETERS: `options.values` reads the option, and it becomes an attribute of `Parameters`.
        RULES: The same, for an attribute of `RequestedRules`. The option changes the logits.
        ROUTE: The schemas of REST and the servicer of gRPC read the option.
    """

    PARAMETERS = "parameters"
    RULES = "rules"
    ROUTE = "route"


@dataclass(frozen=True, slots=True)
class RequestOption:
    """One option that clients can set.

    Attributes:
        name: Name of the option. If `reader` is not ROUTE, also the name of the attribute.
        about: Description in one line.
        grpc: The fields in gRPC. Only inputs have several fields: one per kind of request.
        rest: The fields in REST. If a request sets several fields of an option that the table reads, their
            values must be equal. A boolean option is true if one of its fields is true.
        reader: Code that reads the option.
        default: Value of the option if a request does not set it.
        allowed: The range, if it does not depend on the settings or on the target. Otherwise None.
        is_outer: True if, in SGLang's format, the field stands next to `sampling_params` and not inside it.
        objects: Further places of REST that set the option, in fields that only one route has. An example is
            ``/v1/responses:reasoning.effort``.
        holds: Name of the message whose fields are options, if the gRPC field has such a message.
        only: The reason why only one of the APIs has the option. Empty if both have it.
    """

    name: str
    about: str
    grpc: tuple[GrpcField, ...]
    rest: tuple[RestField, ...]
    reader: Reader = Reader.ROUTE
    default: Any = None
    allowed: Range | None = None
    is_outer: bool = False
    objects: tuple[str, ...] = ()
    holds: str = ""
    only: str = ""

    def __post_init__(self) -> None:
        both = bool(self.grpc) and bool(self.rest or self.holds)
        if both == bool(self.only):
            raise ValueError(
                f"The option {self.name} needs fields in REST and in gRPC, or a reason in `only`."
            )

    @property
    def is_rule(self) -> bool:
        """True if the option changes the logits."""
        return self.reader is Reader.RULES

    @property
    def rest_names(self) -> tuple[str, ...]:
        """The names of the option's REST fields, without repetitions."""
        return tuple(dict.fromkeys(one.name for one in self.rest))


def rest(
    name: str,
    kind: str,
    *groups: FieldGroup,
    about: str = "",
    bounds: str = "",
    default: str = "",
    required: bool = False,
) -> RestField:
    """Return a REST field. `kind` is its type."""
    return RestField(name, kind, groups, about, bounds, default, required)


def grpc(path: str, kind: str, number: int, comment: str = "", oneof: str = "") -> GrpcField:
    """Return a gRPC field. `path` is ``message.field``, and `kind` is the field's type."""
    message, name = path.split(".")
    return GrpcField(message, name, kind, number, comment, oneof)


def option(
    name: str, about: str, *fields: RestField | GrpcField, objects: str = "", **more: Any
) -> RequestOption:
    """Return an option with its fields.

    Args:
        name, about: The attributes of `RequestOption`.
        fields: The fields of both APIs.
        objects: The entries of the attribute `objects`, with spaces between them.
        more: Other attributes of `RequestOption`.

    Raises:
        ValueError: If one of the APIs has no field, and no reason is given.
    """
    return RequestOption(
        name,
        about,
        tuple(one for one in fields if isinstance(one, GrpcField)),
        tuple(one for one in fields if isinstance(one, RestField)),
        objects=tuple(objects.split()),
        **more,
    )
