"""`outrider convert` on the command line. Heavy parts are imported by the command that needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.shared.base.errors import ConfigurationError

convert = typer.Typer(help="Convert draft heads and tokenizers.", no_args_is_help=True, rich_markup_mode=None)

LAYOUTS = ("outrider", "eagle")


@convert.command("head")
def convert_head(
    source: Annotated[
        Path, typer.Argument(help="Folder of a draft head, in any dialect that serves.", metavar="SOURCE")
    ],
    destination: Annotated[
        Path, typer.Argument(help="Folder to write; must not exist, or be empty.", metavar="DESTINATION")
    ],
    to: Annotated[
        str, typer.Option("--to", help=f"Layout: {' or '.join(LAYOUTS)} (the official code's).")
    ] = "outrider",
) -> None:
    """Write a draft head anew: safetensors, one spelling of names, a flat config.json, d2t as offsets."""
    from outrider.services.convert.head import HeadLayout, convert_head
    from outrider.shared.obs.logging import configure_logging

    configure_logging("convert", "warning")
    if to not in LAYOUTS:
        raise ConfigurationError(f"--to: {to!r} is none of {', '.join(LAYOUTS)}.", field="--to")
    done = convert_head(source, destination, HeadLayout(to))
    for note in done.notes:
        typer.echo(note)
    typer.echo(f"{destination}: {done.tensors} tensors of an {done.algorithm} head, layout {to}")


@convert.command("tokenizer")
def convert_tokenizer(
    folder: Annotated[
        Path, typer.Argument(help="Model folder with a slow tokenizer's files.", metavar="DIR")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="File to write.", show_default="tokenizer.json in the folder", metavar="FILE"),
    ] = None,
) -> None:
    """Make a tokenizer.json from a slow tokenizer's files. Needs transformers: pip install 'outrider[train]'."""
    from outrider.services.convert.tokenizer import convert_tokenizer

    done = convert_tokenizer(folder, output)
    typer.echo(
        f"{done.file}: {done.tokens} tokens, from {done.kind}; encodes {done.compared} sample texts as the original does"
    )
