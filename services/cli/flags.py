"""Flags that are made from a table, for Typer, which reads them from a function's signature.

`TARGET_FLAGS` are those that `outrider up` only hands to the target. They are a table of their own, since the target's settings class needs
torch, and `outrider up --help` must neither need it nor wait for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer


@dataclass(frozen=True, slots=True)
class TargetFlag:
    """A flag of `outrider up` that only the target reads: its type, help, what its value looks like, and what holds without it."""

    kind: type[bool | int | float | str]
    help: str
    metavar: str | None = None
    default: str = ""


TARGET_FLAGS: Mapping[str, TargetFlag] = {
    "deterministic": TargetFlag(
        bool, "A token's logits have the same bits in every tree, batch and chunking; slower."
    ),
    "quantization": TargetFlag(
        str, "fp8: layers' products from 8-bit weights and activations.", "none|fp8", "none"
    ),
    "kv_cache_dtype": TargetFlag(str, "fp8_e4m3: half the memory per token.", "auto|fp8_e4m3", "auto"),
    "attention_backend": TargetFlag(
        str, "The target's attention.", "auto|reference|triton|flashinfer", "auto"
    ),
    "enable_torch_compile": TargetFlag(
        bool, "Compile norms and MLPs of models that run through transformers' modules."
    ),
    "torch_compile_max_bs": TargetFlag(int, "Passes with more rows run uncompiled.", default="32"),
    "cuda_graph_max_bs": TargetFlag(int, "Largest batch that CUDA graphs are recorded for.", default="64"),
    "disable_tile_trial": TargetFlag(bool, "Try no tiles of products at start."),
    "disable_cuda_graph": TargetFlag(bool, "Record no CUDA graphs."),
    "overlap_schedule": TargetFlag(
        str, "Launch a round before the last one is read; auto: on a GPU.", "auto|on|off", "auto"
    ),
    "disable_overlap_schedule": TargetFlag(bool, "The same as --overlap-schedule off."),
    "tp_timeout_s": TargetFlag(
        float, "With --tp: a step that a GPU does not join for so long ends the target.", default="120.0"
    ),
    "tp_all_reduce": TargetFlag(
        str, "With --tp: how GPUs add up; see docs/architecture.md.", "auto|one-shot|group", "auto"
    ),
    "draft_rounds": TargetFlag(
        str, "Where rounds with a draft apart run; auto: on GPUs.", "auto|host|device", "auto"
    ),
}
"""Setting of the target → flag of `outrider up`. The target alone says which values it takes, and which not together."""


def with_target_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` an option per row of `TARGET_FLAGS` for its ``**`` parameter."""
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters.values()
    parameters = [
        parameter.replace(annotation=hints[parameter.name])
        for parameter in own
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    for name, flag in TARGET_FLAGS.items():
        spelled = "--" + name.replace("_", "-")
        names = switch_names(spelled) if flag.kind is bool else (spelled,)
        option = typer.Option(
            *names, help=flag.help, show_default=flag.default or False, metavar=flag.metavar
        )
        parameters.append(keyword(name, flag.kind, option))
    return signed(command, parameters)


def signed(command: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """Show Typer these parameters in place of the ones that were written."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def keyword(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """Return the parameter of one option; None is a flag that was not given."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def switch_names(flag: str) -> tuple[str]:
    """Return what Typer calls a switch that can be turned off as well."""
    return (f"{flag}/--no-{flag[2:]}",)
