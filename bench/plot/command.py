"""`outrider bench plot`: writes the pictures of the documents, or checks that they are current."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

DOCUMENTS = Path("docs/images")
"""Folder of the pictures that the documentation shows."""


def plot(
    results: Annotated[Path, typer.Option(help="Folder of JSON results.")] = Path("bench/results"),
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the pictures.", show_default="the current folder; docs/images with --check"
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Name of a picture to make, such as mixed-load; repeatable.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing. Exit with code 1 if a picture is out of date.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite pictures that exist.")] = False,
) -> None:
    """Make the pictures of the documents from recorded results: SVG, light and dark."""
    from outrider.bench.plot.canvas import DARK, LIGHT
    from outrider.bench.plot.pictures import PICTURES
    from outrider.shared.base.errors import ConfigurationError

    names = only or list(PICTURES)
    if unknown := [name for name in names if name not in PICTURES]:
        raise ConfigurationError(
            f"--only {unknown[0]}: there is no such picture. Known: {', '.join(PICTURES)}.", field="--only"
        )
    folder = output or (DOCUMENTS if check else Path())
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(
            f"--output {folder} is a file. Give a folder for the pictures.", field="--output"
        )
    files = {name: [folder / f"{name}-{theme.name}.svg" for theme in (LIGHT, DARK)] for name in names}
    existing = [file for pair in files.values() for file in pair if file.exists()]
    if existing and not (force or check):
        raise ConfigurationError(
            f"{existing[0]} exists. Choose another folder with --output, or pass --force to overwrite it.",
            field="--output",
        )
    stale = []
    for name in names:
        for theme, file in zip((LIGHT, DARK), files[name], strict=True):
            text = PICTURES[name](results, theme)
            if check:
                if not file.exists() or file.read_text(encoding="utf-8") != text:
                    stale.append(str(file))
                continue
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file}")
    if stale:
        print(f"Out of date: {', '.join(stale)}. Run: make pictures", file=sys.stderr)
    raise typer.Exit(bool(stale))
