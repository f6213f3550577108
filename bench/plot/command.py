"""`outrider bench plot`: writes the pictures of the documents, or checks that they are current."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def plot(
    results: Annotated[Path, typer.Option(help="Folder of JSON results.")] = Path("bench/results"),
    output: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("docs/images"),
    only: Annotated[
        list[str] | None, typer.Option(help="Name of a picture to make, such as mixed-load; repeatable.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing. Exit with code 1 if a picture is out of date.")
    ] = False,
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
    stale = []
    for name in names:
        for theme in (LIGHT, DARK):
            file = output / f"{name}-{theme.name}.svg"
            text = PICTURES[name](results, theme)
            if check:
                if not file.exists() or file.read_text(encoding="utf-8") != text:
                    stale.append(str(file))
                continue
            output.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file}")
    if stale:
        print(f"Out of date: {', '.join(stale)}. Run: outrider bench plot", file=sys.stderr)
    raise typer.Exit(bool(stale))
