"""Generates a service's command-line options from its settings class.

Only flags that the user gave are passed to the settings class. The settings class resolves the precedence:
flags override environment variables, environment variables override the configuration file, and the
configuration file overrides the defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from outrider.services.cli.flags import keyword, signed, switch_names
from outrider.shared.base.settings import ServiceSettings, flag_name

# Additional flag names of settings. The long names are SGLang's, for users who know SGLang.
ALIASES: dict[str, tuple[str, ...]] = {
    "num_steps": ("--speculative-num-steps",),
    "topk": ("--speculative-eagle-topk",),
    "num_draft_tokens": ("--speculative-num-draft-tokens",),
    "max_steps": ("--speculative-max-steps",),
    "max_topk": ("--speculative-max-topk",),
    "max_nodes": ("--speculative-max-nodes",),
    "model": ("--model-path",),
    "draft": ("--speculative-draft-model-path",),
}


def settings_command(
    settings_type: type[ServiceSettings], run: Callable[[ServiceSettings], int], help_text: str
) -> Callable[..., None]:
    """Return a function that serves as a Typer command: pass it to `typer.Typer.command`.

    The returned function has one option for each field of the settings class, and ``--config FILE``.

    Args:
        settings_type: The service's settings class. Descriptions of its fields become the help texts.
        run: Called with the resolved settings. Its return value is the exit code.
        help_text: First paragraph of ``--help``.
    """

    def command(config: Path | None = None, **flags: Any) -> None:
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in flags.items()
            if value not in (None, [])
        }
        raise typer.Exit(run(settings_type.load(given, config)))

    parameters = settings_options(settings_type)
    config_option = Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="TOML or JSON file with settings. Flags and environment variables override it.",
        ),
    ]
    parameters.append(
        inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=config_option)
    )
    command.__doc__ = help_text
    return signed(command, parameters)


def settings_options(
    settings_type: type[ServiceSettings], omitted: Collection[str] = ()
) -> list[inspect.Parameter]:
    """Return one option for each settings field, except the omitted ones."""
    prefix = str(settings_type.model_config.get("env_prefix", ""))
    return [
        _parameter(name, field, prefix)
        for name, field in settings_type.model_fields.items()
        if name not in omitted
    ]


def _parameter(name: str, field: FieldInfo, env_prefix: str) -> inspect.Parameter:
    """Return a keyword parameter annotated with the option for one settings field."""
    default = _default_text(field)
    origin = f"{default}; {env_prefix}{name.upper()}" if default else f"{env_prefix}{name.upper()}"
    help_text = f"{field.description or ''} [{origin}]".strip()
    kind: Any = (
        bool if field.annotation is bool else list[str] if get_origin(field.annotation) is tuple else str
    )
    names = switch_names(flag_name(name)) if kind is bool else (flag_name(name), *ALIASES.get(name, ()))
    return keyword(
        name, kind, typer.Option(*names, help=help_text, show_default=False, metavar=_metavar(field))
    )


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default()
    if value in (None, (), "", PydanticUndefined):
        return ""
    text = (
        ",".join(str(item) for item in value)
        if isinstance(value, tuple)
        else str(getattr(value, "value", value))
    )
    return f"default {text}"


def _metavar(field: FieldInfo) -> str | None:
    if field.annotation is bool:
        return None
    kinds = [
        kind
        for kind in (get_args(field.annotation) or (field.annotation,))
        if kind not in (type(None), Ellipsis)
    ]
    return "|".join(getattr(kind, "__name__", str(kind)) for kind in kinds).upper()
