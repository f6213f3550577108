"""Declares the `outrider doctor` command and its flags. Heavy imports happen when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.spec.algorithm import FIELD, Algorithm

# Flags that `outrider doctor`, `outrider verify` and `outrider tune` share. `outrider up` uses the revisions.
TargetDir = Annotated[
    Path | None,
    typer.Option(
        "--target",
        help="Target model: a folder in Hugging Face layout, or ORG/NAME on the hub.",
        show_default="the embedded demo model",
        metavar="DIR|ORG/NAME",
    ),
]
DraftDir = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "--speculative-draft-model-path",
        help="Draft head or draft model: a folder, or ORG/NAME on the hub.",
        show_default="the embedded head; none with another --target",
        metavar="DIR|ORG/NAME|none",
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of a --target on the hub.", show_default="main"),
]
DraftRevision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of a --draft on the hub.", show_default="main"),
]
AlgorithmName = Annotated[
    str,
    typer.Option("--speculative-algorithm", help="Drafting method, as in `outrider up`."),
]
TokenMap = Annotated[
    Path | None,
    typer.Option(
        "--speculative-token-map", help="FR-Spec token map (.pt, .safetensors or .json).", metavar="FILE"
    ),
]
DtypeName = Annotated[
    str,
    typer.Option(
        help="Data type of the weights: auto (bfloat16 on CUDA, float32 on a CPU), float32, bfloat16 or "
        "float16."
    ),
]


def doctor(
    target: TargetDir = None,
    draft: DraftDir = None,
    revision: Revision = None,
    draft_revision: DraftRevision = None,
    algorithm: AlgorithmName = "auto",
    token_map: TokenMap = None,
    device: Annotated[str, typer.Option(help="Device to plan for: auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: DtypeName = "auto",
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
    """Check whether a target and a draft can be served; without --target, the embedded pair.

    Examines files, sizes, conventions and memory use without starting a service.

    Exit code 0: the target and the draft can be served, perhaps with warnings. Exit code 2: they would be
    refused.
    """
    from outrider.shared.obs.progress import importing

    with importing():
        from outrider.services.doctor.command import DoctorOptions, run_doctor
        from outrider.services.hub.pair import pair_folders

    method = parse_algorithm(algorithm)
    target_folder, draft_folder = pair_folders(target, draft, method, revision, draft_revision)
    options = DoctorOptions(
        target=target_folder,
        draft=draft_folder,
        algorithm=method,
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


def parse_algorithm(name: str) -> Algorithm:
    """Return the algorithm of the flag `--speculative-algorithm`.

    Raises:
        ConfigurationError: The name is unknown.
    """
    try:
        return Algorithm(name)
    except ValueError:
        known = ", ".join(member.value for member in Algorithm)
        raise ConfigurationError(
            f"--speculative-algorithm: {name!r} is not one of {known}.", field=FIELD
        ) from None
