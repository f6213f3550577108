"""Declares the `outrider tune` command and its flags. Heavy imports happen when the command runs."""

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
from outrider.shared.base.errors import ConfigurationError

MOST_STREAMS = 256


def tune(
    target: TargetDir = None,
    draft: DraftDir = None,
    revision: Revision = None,
    draft_revision: DraftRevision = None,
    algorithm: AlgorithmName = "auto",
    token_map: TokenMap = None,
    device: Annotated[str, typer.Option(help="Device to run on: auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: DtypeName = "auto",
    url: Annotated[
        str | None,
        typer.Option(
            help="Use this running server of the pair instead of a new one.",
            show_default="start a server",
            envvar="OUTRIDER_URL",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="API key to send with --url, if the server requires one.", envvar="OUTRIDER_API_KEY"
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts: JSON lines with `prompt`, `messages` or `prompt_ids`. Use prompts like those of "
            "your clients.",
            show_default="the embedded prompts",
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 16,
    tokens: Annotated[int, typer.Option(min=8, help="Largest length of each answer.")] = 64,
    batches: Annotated[
        str, typer.Option(help="Numbers of concurrent requests, separated by commas.")
    ] = "1,4,16",
    output: Annotated[Path, typer.Option(help="The profile to write.", metavar="FILE")] = Path(
        "outrider-profile.toml"
    ),
    exhaustive: Annotated[
        bool,
        typer.Option(
            "--exhaustive",
            help="Measure every shape instead of those with the best predictions. This takes long.",
        ),
    ] = False,
    check: Annotated[
        int,
        typer.Option(
            min=0,
            help="Then measure every shape, and compare the choice with the best one in this many passes. "
            "This takes long.",
            metavar="PASSES",
            show_default="no check",
        ),
    ] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the speed-up of mode auto and the shapes: with speed.svg, write speed-light.svg and "
            "speed-dark.svg.",
            metavar="FILE",
            show_default="none",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Find the best mode and tree shape for your pair, device and prompts, and write a profile.

    Records the trees of one run to predict the accept length of every shape. Measures plain decoding, mode
    auto and the best shapes on a running server. `outrider up --profile FILE` loads the profile.
    """
    from outrider.shared.obs.progress import importing

    with importing():
        from outrider.services.clients.rest import gateway_url
        from outrider.services.hub.pair import demo_name, pair_folders
        from outrider.services.stack.options import StackOptions
        from outrider.services.tune.command import TuneOptions, run_tune

    numbers, method = parse_batches(batches), parse_algorithm(algorithm)
    target_folder, draft_folder = pair_folders(target, draft, method, revision, draft_revision)
    stack = StackOptions(
        target=target_folder,
        model_id=demo_name(target),
        draft=draft_folder,
        algorithm=method,
        token_map=token_map,
        device=device,
        dtype=dtype,
        max_running_requests=max(numbers) if max(numbers) > 16 else None,
    )
    options = TuneOptions(
        stack=stack,
        output=output,
        url=None if url is None else gateway_url(url),
        api_key=api_key,
        prompts=prompts,
        num_prompts=num_prompts,
        tokens=tokens,
        batches=numbers,
        exhaustive=exhaustive,
        check=check,
        plot=plot,
        as_json=as_json,
    )
    raise typer.Exit(run_tune(options))


def parse_batches(text: str) -> tuple[int, ...]:
    """Parse a comma-separated list of numbers of concurrent requests.

    Raises:
        ConfigurationError: An entry is not a number from 1 to `MOST_STREAMS`.
    """
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(1 <= number <= MOST_STREAMS for number in numbers):
        raise ConfigurationError(
            f"--batches {text!r} is not a list of numbers from 1 to {MOST_STREAMS}, such as 1,4,16.",
            field="--batches",
        )
    return numbers
