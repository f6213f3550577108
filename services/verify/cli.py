"""Declares the `outrider verify` command and its flags. Heavy imports happen when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.services.doctor.cli import parse_algorithm


def verify(
    target: Annotated[
        Path,
        typer.Option(
            "--target",
            help="Target model: a folder in Hugging Face layout, or ORG/NAME on the hub.",
            metavar="DIR|ORG/NAME",
        ),
    ],
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            "--speculative-draft-model-path",
            help="Draft head or draft model: a folder, or ORG/NAME on the hub.",
            metavar="DIR|ORG/NAME|none",
        ),
    ] = "none",
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a --target on the hub.", show_default="main"),
    ] = None,
    draft_revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a --draft on the hub.", show_default="main"),
    ] = None,
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
    device: Annotated[str, typer.Option(help="Device to run on: auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            help="Data type of the weights: auto (bfloat16 on CUDA, float32 on a CPU), float32, bfloat16 or "
            "float16."
        ),
    ] = "auto",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts: JSON lines with `prompt`, `messages` or `prompt_ids`.",
            show_default="the embedded prompts",
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 4,
    tokens: Annotated[int, typer.Option(min=4, help="Tokens per answer.")] = 48,
    samples: Annotated[
        int, typer.Option(min=16, help="Number of sampled answers for the test of the output law.")
    ] = 512,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Check on your own pair that speculation changes nothing.

    Answers prompts with every sampling option, with speculation (chains, trees, auto, mixed) and without, and
    compares all tokens. Also compares sampled tokens with the target's probabilities.

    Exit code 0: nothing changed. 1: a difference that rounding does not explain. 2: the pair cannot be run.
    """
    from outrider.services.hub.model_folder import model_folder
    from outrider.services.verify.command import VerifyOptions, run_verify

    options = VerifyOptions(
        target=model_folder(target, "--target", revision),
        draft=None if draft == "none" else model_folder(draft, "--draft", draft_revision),
        algorithm=parse_algorithm(algorithm),
        token_map=token_map,
        device=device,
        dtype=dtype,
        prompts=prompts,
        num_prompts=num_prompts,
        tokens=tokens,
        samples=samples,
        as_json=as_json,
    )
    raise typer.Exit(run_verify(options))
