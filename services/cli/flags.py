"""Defines the flags that `outrider up` passes on to one service, and helpers that build Typer options.

The flags are listed here because the target's settings class imports torch, which `outrider up --help` must
not load. Typer reads options from a function's signature, so the helpers below generate signatures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer


@dataclass(frozen=True, slots=True)
class ServiceFlag:
    """A flag of `outrider up` that only one service reads.

    Attributes:
        kind: Type of the value.
        help: Help text.
        metavar: Placeholder for the value in the help. None shows the type instead.
        default: The service's default value, as text. Empty for flags without a value.
    """

    kind: type[bool | int | float | str]
    help: str
    metavar: str | None = None
    default: str = ""


TARGET_FLAGS: Mapping[str, ServiceFlag] = {
    "deterministic": ServiceFlag(
        bool, "Compute bit-identical logits for a token in every tree, batch and prefill chunk; slower."
    ),
    "quantization": ServiceFlag(
        str, "fp8 computes matrix products with 8-bit weights and activations.", "none|fp8", "none"
    ),
    "kv_cache_dtype": ServiceFlag(
        str,
        "Data type of the target's KV cache; fp8_e4m3 halves the memory per token.",
        "auto|fp8_e4m3",
        "auto",
    ),
    "attention_backend": ServiceFlag(
        str, "Attention implementation of the target.", "auto|reference|triton|flashinfer", "auto"
    ),
    "grammar_backend": ServiceFlag(
        str,
        "Library that enforces JSON schemas and other forms; auto: xgrammar for the forms that it enforces "
        "exactly, else llguidance.",
        "llguidance|xgrammar|auto",
        "llguidance",
    ),
    "enable_torch_compile": ServiceFlag(
        bool, "Compile the norms and MLPs of models that run on transformers' modules."
    ),
    "torch_compile_max_bs": ServiceFlag(
        int, "Maximum number of rows in a compiled pass; larger passes run uncompiled.", default="32"
    ),
    "cuda_graph_max_bs": ServiceFlag(
        int, "Maximum batch size for which CUDA graphs are captured.", default="256"
    ),
    "disable_tile_trial": ServiceFlag(bool, "Do not tune the tile sizes of matrix products at startup."),
    "disable_prefix_cache": ServiceFlag(bool, "Keep no K/V of ended requests for later ones."),
    "disable_cuda_graph": ServiceFlag(bool, "Capture no CUDA graphs."),
    "overlap_schedule": ServiceFlag(
        str,
        "Launch the next round before reading the results of the last; auto: on a GPU.",
        "auto|on|off",
        "auto",
    ),
    "disable_overlap_schedule": ServiceFlag(bool, "Same as --overlap-schedule off."),
    "max_packed_rows": ServiceFlag(
        int, "Maximum nodes of all trees in a round; further trees wait for their turn.", default="2048"
    ),
    "prefill_budget_ms": ServiceFlag(
        float, "Time to compute prompts between two rounds while other requests decode.", default="20.0"
    ),
    "tp_timeout_s": ServiceFlag(
        float, "With --tp: exit if a GPU does not join a step within this many seconds.", default="120.0"
    ),
    "tp_all_reduce": ServiceFlag(
        str, "With --tp: all-reduce method; see docs/tensor-parallelism.md.", "auto|one-shot|group", "auto"
    ),
    "draft_rounds": ServiceFlag(
        str,
        "With a draft in its own process: run rounds through the host, or keep them on the device. auto "
        "keeps them on the device on a GPU.",
        "auto|host|device",
        "auto",
    ),
}
"""Maps a target setting to its flag of `outrider up`. The target checks the values."""


def with_options(
    options: Sequence[inspect.Parameter],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces the ``**`` parameter of a command with these options."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = inspect.signature(command).parameters.values()
        parameters = [
            parameter.replace(annotation=hints[parameter.name])
            for parameter in own
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        return signed(command, [*parameters, *options])

    return decorate


def target_options() -> list[inspect.Parameter]:
    """Return one option for each entry of `TARGET_FLAGS`."""
    parameters = []
    for name, flag in TARGET_FLAGS.items():
        spelled = "--" + name.replace("_", "-")
        names = switch_names(spelled) if flag.kind is bool else (spelled,)
        option = typer.Option(
            *names, help=flag.help, show_default=flag.default or False, metavar=flag.metavar
        )
        parameters.append(keyword(name, flag.kind, option))
    return parameters


def signed(command: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """Give a function a new signature for Typer to read."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def keyword(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """Return the parameter for one option. The parameter's value is None if the flag is not given."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def switch_names(flag: str) -> tuple[str]:
    """Return Typer's declaration of a switch with a ``--no-`` form."""
    return (f"{flag}/--no-{flag[2:]}",)
