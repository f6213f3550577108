"""Commands `outrider convert head` and `outrider convert tokenizer`. Heavy imports happen when they run."""

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
        Path, typer.Argument(help="Folder of a draft head in any supported layout.", metavar="SOURCE")
    ],
    destination: Annotated[
        Path, typer.Argument(help="Folder to write. It must be empty or not exist.", metavar="DESTINATION")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to", help=f"Layout to write: {' or '.join(LAYOUTS)} (that of the official EAGLE code)."
        ),
    ] = "outrider",
) -> None:
    """Rewrite a draft head in a standard layout.

    Writes safetensors with canonical tensor names, a flat config.json, and d2t as offsets.
    """
    from outrider.services.convert.head import HeadLayout, rewrite_head
    from outrider.shared.obs.logging import configure_logging

    configure_logging("convert", "warning")
    if to not in LAYOUTS:
        raise ConfigurationError(f"--to: {to!r} is not one of {', '.join(LAYOUTS)}.", field="--to")
    done = rewrite_head(source, destination, HeadLayout(to))
    for note in done.notes:
        typer.echo(note)
    typer.echo(f"{destination}: {done.tensors} tensors of an {done.algorithm} head, layout {to}")


@convert.command("tokenizer")
def convert_tokenizer(
    folder: Annotated[
        Path, typer.Argument(help="Model folder with the files of a slow tokenizer.", metavar="DIR")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="File to write.", show_default="tokenizer.json in the folder", metavar="FILE"),
    ] = None,
) -> None:
    """Make a tokenizer.json from a slow tokenizer.

    Needs transformers: pip install 'outrider[train]'.
    """
    from outrider.services.convert.tokenizer import rewrite_tokenizer

    done = rewrite_tokenizer(folder, output)
    typer.echo(
        f"{done.file}: {done.tokens} tokens, converted from {done.kind}; {done.compared} sample texts encode "
        "as before"
    )
