"""Declares the `outrider verify` command and its flags. Heavy imports happen when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.services.doctor.cli import (
    AlgorithmName,
    DraftDir,
    DraftRevision,
    DtypeName,
    Revision,
    TargetDir,
    TokenMap,
    parse_algorithm,
)


def verify(
    target: TargetDir = None,
    draft: DraftDir = None,
    revision: Revision = None,
    draft_revision: DraftRevision = None,
    algorithm: AlgorithmName = "auto",
    token_map: TokenMap = None,
    device: Annotated[str, typer.Option(help="Device to run on: auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: DtypeName = "auto",
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
    """Check with your own target and draft that speculation changes nothing.

    Answers prompts with every sampling option, with speculation (chains, trees, auto, mixed) and without, and
    compares all tokens and logprobs. Also compares sampled tokens with the target's probabilities.

    Exit code 0: nothing changed. 1: a difference that rounding does not explain. 2: the models cannot be run.
    """
    from outrider.shared.obs.progress import importing

    with importing():
        from outrider.services.hub.pair import pair_folders
        from outrider.services.verify.command import VerifyOptions, run_verify

    method = parse_algorithm(algorithm)
    target_folder, draft_folder = pair_folders(target, draft, method, revision, draft_revision)
    options = VerifyOptions(
        target=target_folder,
        draft=draft_folder,
        algorithm=method,
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
