"""The options `--config` and `--profile` of `outrider up`, and its help text in groups (`GroupedCommand`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from outrider.services.cli.flags import TARGET_FLAGS
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.settings import read_settings_file

GROUPS: Mapping[str, Sequence[str]] = {
    "Models": ("target", "draft", "revision", "draft_revision", "skip_tokenizer"),
    "Speculation": (
        *("algorithm", "num_steps", "topk", "num_draft_tokens", "max_steps", "max_topk", "max_nodes"),
        *("token_map", "ngram_corpus", "speculation_mode", "transport", "mps"),
    ),
    "Hardware and memory": (
        *("device", "dtype", "tp", "max_running_requests", "mem_fraction_static", "kv_tokens"),
    ),
    "Target": tuple(TARGET_FLAGS),
    "General": ("config", "profile", "log_level", "log_json", "help"),
}
"""Heading in the help text → options. All others are the gateway's."""
GATEWAY_GROUP = "Gateway"
HEADINGS = ("Arguments", *(name for name in GROUPS if name != "General"), GATEWAY_GROUP, "General")


class GroupedCommand(TyperCommand):
    """A command whose help text lists the options under the headings of `GROUPS`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the groups of options."""
        heading_of = {name: heading for heading, names in GROUPS.items() for name in names}
        records: dict[str, list[tuple[str, str]]] = {name: [] for name in HEADINGS}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                heading = heading_of.get(param.name or "", GATEWAY_GROUP)
                records["Arguments" if param.param_type_name == "argument" else heading].append(record)
        for heading, lines in records.items():
            if lines:
                with formatter.section(heading):
                    formatter.write_dl(lines)


FILE_OPTIONS = ("config", "profile")


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a settings file the defaults of the other options. The file overrides a profile."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **_values_of(context, path)}
    return path


def _read_profile(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a profile the defaults of the options that --config does not set."""
    if path is not None:
        context.default_map = {**_values_of(context, path), **(context.default_map or {})}
    return path


def _values_of(context: typer.Context, path: Path) -> dict[str, Any]:
    """Return option → value for a file. The file may use any of an option's names."""
    options = [param for param in context.command.params if param.param_type_name == "option"]
    known = {param.name: str(param.name) for param in options if param.name not in FILE_OPTIONS}
    for param in options:
        if param.name not in FILE_OPTIONS:
            known |= {name.lstrip("-").replace("-", "_"): str(param.name) for name in param.opts}
    values = {name.replace("-", "_"): value for name, value in read_settings_file(path).items()}
    if unknown := [name for name in values if name not in known]:
        raise ConfigurationError(
            f"The settings file {path} contains {unknown[0]}, which is no option of outrider up. Known: "
            f"{', '.join(sorted(str(name) for name in known))}.",
            field=unknown[0],
            reason="unknown_setting",
        )
    return {known[name]: value for name, value in values.items()}


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        is_eager=True,
        callback=_read_config,
        help="TOML or JSON file with options of this command, for example `num_steps = 3`. Flags and the "
        "gateway's environment variables override it.",
        metavar="FILE",
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        is_eager=True,
        callback=_read_profile,
        help="Profile that `outrider tune` wrote. --config and flags override it.",
        metavar="FILE",
    ),
]
