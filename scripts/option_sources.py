"""Writes the fields of both APIs from the table of options, `services/gateway/options/table.py`.

The script writes the bodies of the option messages in the protos, and the classes of REST fields in
`services/gateway/schemas/option_fields`. Run `python scripts/option_sources.py` after a change of the table,
then `make stubs`. With ``--check``, the script writes nothing, and lists the files that are out of date.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.services.gateway.options.rows import FieldGroup, GrpcField, RequestOption, RestField
from outrider.services.gateway.options.table import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
PROTOS = (
    ROOT / "protos" / "outrider" / "common" / "v1" / "common.proto",
    ROOT / "protos" / "outrider" / "gateway" / "v1" / "gateway.proto",
)
FIELDS = ROOT / "services" / "gateway" / "schemas" / "option_fields"
MAX_COLUMNS = 110
HEADER = '''"""Request fields of REST, written by `scripts/option_sources.py` from the table of options."""

from __future__ import annotations
'''

SCHEMAS = "outrider.services.gateway.schemas"
TYPES = {
    "Any": "typing",
    "Literal": "typing",
    "BaseModel": "pydantic",
    "Field": "pydantic",
    "ExpertsStart": f"{SCHEMAS}.field_types",
    "ReasoningEffort": f"{SCHEMAS}.field_types",
    "Truncation": f"{SCHEMAS}.field_types",
    "RequestName": f"{SCHEMAS}.field_types",
    "Salt": f"{SCHEMAS}.field_types",
    "Salts": f"{SCHEMAS}.field_types",
    "StartLength": f"{SCHEMAS}.field_types",
    "StopStrings": f"{SCHEMAS}.field_types",
    "TokenIds": f"{SCHEMAS}.field_types",
    "JsonSchema": f"{SCHEMAS}.constraint_types",
    "ResponseFormat": f"{SCHEMAS}.constraint_types",
    "StructuredOutputs": f"{SCHEMAS}.constraint_types",
    "Message": f"{SCHEMAS}.chat_messages",
    "SpeculationOptions": f"{SCHEMAS}.option_fields.speculation",
    "StrictModel": f"{SCHEMAS}.base",
    "StreamOptions": f"{SCHEMAS}.stream_options",
    "Tool": f"{SCHEMAS}.tools",
    "ToolChoice": f"{SCHEMAS}.tools",
}
"""The module of each name in the types of REST fields, and of the base classes."""


def message_body(message: str, options: Sequence[RequestOption] = OPTIONS) -> str:
    """Return the fields of a message as the text between its braces, in the order of their numbers.

    Raises:
        ValueError: If two fields have the same name or number.
    """
    fields = sorted(
        (field for option in options for field in option.grpc if field.message == message),
        key=lambda field: field.number,
    )
    for one in ("name", "number"):
        if len({getattr(field, one) for field in fields}) < len(fields):
            raise ValueError(f"Two fields of the message {message} have the same {one}.")
    lines: list[str] = []
    oneof = ""
    for field in fields:
        if field.oneof != oneof:
            lines += ["  }"] * bool(oneof) + [f"  oneof {field.oneof} {{"] * bool(field.oneof)
            oneof = field.oneof
        lines += _proto_lines(field, "    " if oneof else "  ")
    return "\n".join([*lines, *["  }"] * bool(oneof)]) + "\n"


def _proto_lines(field: GrpcField, indent: str) -> list[str]:
    comment = [f"{indent}// {field.comment}"] if field.comment else []
    return [*comment, f"{indent}{field.type} {field.name} = {field.number};"]


def proto(text: str, options: Sequence[RequestOption] = OPTIONS) -> str:
    """Return the text of a proto with new bodies of its option messages."""
    for message in dict.fromkeys(field.message for option in options for field in option.grpc):
        body = message_body(message, options)
        text = re.sub(
            rf"^(message {message} {{\n).*?^(}}\n)",
            lambda found, body=body: found[1] + body + found[2],
            text,
            flags=re.DOTALL | re.MULTILINE,
        )
    return text


def module(name: str, options: Sequence[RequestOption] = OPTIONS) -> str:
    """Return the source of the module `name` of `option_fields`."""
    groups = [group for group in FieldGroup if group.value[0] == name]
    classes = "\n\n\n".join(_class(group, options) for group in groups)
    types = [field.type for one in options for field in one.rest if {*field.groups} & {*groups}]
    return f"{HEADER}\n{_imports([*types, 'Field', *map(_base, groups)])}\n\n\n{classes}\n"


def _imports(types: Sequence[str]) -> str:
    """Return the imports of the names in the types, in the order of the linter.

    Raises:
        ValueError: If the module of a name is unknown.
    """
    names = {name for one in types for name in re.findall(r"\w+", re.sub(r'"[^"]*"', "", one))}
    names -= set(dir(builtins))
    if unknown := names - TYPES.keys():
        raise ValueError(f"Add the modules of these types to TYPES: {', '.join(sorted(unknown))}.")
    lines: list[str] = []
    rank = 0
    for one in sorted({TYPES[name] for name in names}, key=lambda one: (_import_rank(one), one)):
        if lines and rank != _import_rank(one):
            lines.append("")
        rank = _import_rank(one)
        of_module = sorted(name for name in names if TYPES[name] == one)
        line = f"from {one} import {', '.join(of_module)}"
        if len(line) <= MAX_COLUMNS:
            lines.append(line)
        else:
            lines += [f"from {one} import (", *(f"    {name}," for name in of_module), ")"]
    return "\n".join(lines)


def _import_rank(name: str) -> int:
    """Return the place of a module: the standard library, then other packages, then this package."""
    return 0 if name == "typing" else 1 if name == "pydantic" else 2


def _base(group: FieldGroup) -> str:
    """Return the base class of a group's class."""
    return "StrictModel" if group is FieldGroup.SPECULATION else "BaseModel"


def _class(group: FieldGroup, options: Sequence[RequestOption]) -> str:
    """Return the source of the class of a group.

    Raises:
        ValueError: If two fields of the group have the same name.
    """
    _, name, about = group.value
    rows = [(one, field) for one in options for field in one.rest if group in field.groups]
    names = [field.name for _, field in rows]
    if len(set(names)) < len(names):
        raise ValueError(f"Two fields of {name} have the same name: {sorted(names)}.")
    lines = [line for option, field in rows for line in _rest_lines(option, field)]
    docstring = about.replace("\n\n", "\n\n    ") + ("\n    " if "\n" in about else "")
    return "\n".join([f"class {name}({_base(group)}):", f'    """{docstring}"""', "", *lines])


def _rest_lines(option: RequestOption, field: RestField) -> list[str]:
    """Return the lines of a field, broken as the formatter breaks them."""
    optional = "" if field.default or field.required else " | None"
    default = "" if field.required else f"default={field.default or None}"
    description = f'description="{field.about or option.about}"'
    arguments = [one for one in (default, field.bounds, description) if one]
    first, joined = f"    {field.name}: {field.type}{optional} = Field(", ", ".join(arguments)
    if len(first) + len(joined) + 1 <= MAX_COLUMNS:
        return [f"{first}{joined})"]
    if len(joined) + 8 <= MAX_COLUMNS:
        return [first, f"        {joined}", "    )"]
    begin = description.rfind(" ", 0, MAX_COLUMNS - 10) + 1 if len(description) + 9 > MAX_COLUMNS else 0
    if begin:
        arguments[-1:] = [f'{description[:begin]}"\n        "{description[begin:]}']
    return [first, *(f"        {one}," for one in arguments), "    )"]


def sources() -> dict[Path, str]:
    """Return the new text of every file that this script writes.

    Raises:
        ValueError: If the protos lack an option message, or have it twice.
    """
    protos = {path: path.read_text() for path in PROTOS}
    for message in {field.message for option in OPTIONS for field in option.grpc}:
        if sum(text.count(f"\nmessage {message} {{\n") for text in protos.values()) != 1:
            raise ValueError(f"The protos need exactly one message {message}.")
    modules = dict.fromkeys(group.value[0] for group in FieldGroup)
    return {
        **{path: proto(text) for path, text in protos.items()},
        **{FIELDS / f"{name}.py": module(name) for name in modules},
    }


def main(arguments: list[str]) -> int:
    """Write the files. With ``--check``, only list the files that are out of date, and return 1 if any is."""
    checks = "--check" in arguments
    stale = {path: text for path, text in sources().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if checks:
            print(f"{path.relative_to(ROOT)} is out of date. Run: python scripts/option_sources.py")
        else:
            path.write_text(text)
    return int(checks and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
