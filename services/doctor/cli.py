"""Declares the `outrider doctor` command and its flags. Heavy imports happen when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.spec.algorithm import FIELD, Algorithm


def doctor(
    target: Annotated[
        Path,
        typer.Option("--target", help="Folder of the target model, in Hugging Face layout.", metavar="DIR"),
    ],
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            "--speculative-draft-model-path",
            help="Folder of the draft head or draft model.",
            metavar="DIR|none",
        ),
    ] = "none",
    algorithm: Annotated[
        str,
        typer.Option("--speculative-algorithm", help="Drafting method, as in `outrider up`."),
    ] = "auto",
    token_map: Annotated[
        Path | None,
        typer.Option(
            "--speculative-token-map", help="FR-Spec token map (.pt, .safetensors or .json).", metavar="FILE"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device to plan for: auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            help="Data type of the weights: auto (bfloat16 on CUDA, float32 on a CPU), float32, bfloat16 or "
            "float16."
        ),
    ] = "auto",
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Also load the pair and measure its accept length, with other aux layers too."
        ),
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts of the probe: JSON lines with `prompt`, `messages` or `prompt_ids`.",
            show_default="the embedded prompts",
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of prompts that the probe uses.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that the probe generates per prompt.")] = 64,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Check whether a target and a draft can be served.

    Examines files, sizes, conventions and memory use without starting a service.

    Exit code 0: the pair can be served, perhaps with warnings. 2: the pair would be refused.
    """
    from outrider.services.doctor.command import DoctorOptions, run_doctor

    options = DoctorOptions(
        target=target,
        draft=None if draft == "none" else Path(draft),
        algorithm=_algorithm(algorithm),
        token_map=token_map,
        device=device,
        dtype=dtype,
        probe=probe,
        prompts=prompts,
        num_prompts=num_prompts,
        tokens=tokens,
        as_json=as_json,
    )
    raise typer.Exit(run_doctor(options))


def _algorithm(name: str) -> Algorithm:
    try:
        return Algorithm(name)
    except ValueError:
        known = ", ".join(member.value for member in Algorithm)
        raise ConfigurationError(
            f"--speculative-algorithm: {name!r} is not one of {known}.", field=FIELD
        ) from None
