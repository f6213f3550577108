"""`outrider doctor` on the command line. Heavy parts are imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.spec.algorithm import FIELD, Algorithm


def doctor(
    target: Annotated[
        Path, typer.Option("--target", help="Model folder in Hugging Face layout.", metavar="DIR")
    ],
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            "--speculative-draft-model-path",
            help="Folder of the head or draft model.",
            metavar="DIR|none",
        ),
    ] = "none",
    algorithm: Annotated[
        str,
        typer.Option("--speculative-algorithm", help="As for the services; auto: what the checkpoint shows."),
    ] = "auto",
    token_map: Annotated[
        Path | None,
        typer.Option(
            "--speculative-token-map", help="FR-Spec's map: .pt, .safetensors or .json.", metavar="FILE"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto (bf16 on CUDA, fp32 on CPU), float32, bfloat16, float16.")
    ] = "auto",
    probe: Annotated[
        bool, typer.Option("--probe", help="Load the pair and measure it, with other aux layers too.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with `prompt`, `messages` or `prompt_ids`.", show_default="the embedded prompts"
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Check target and draft before anything is served: files, sizes, conventions, memory.

    Exit code 0: the pair can be served, maybe with warnings; 2: it would be refused.
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
            f"--speculative-algorithm: {name!r} is none of {known}.", field=FIELD
        ) from None
