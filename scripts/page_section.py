"""Writes the part of a page that is made from the code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def replaced(page: str, begin: str, end: str, section: str) -> str:
    """Return the page with `section` between the lines `begin` and `end`.

    Raises:
        ValueError: The page lacks one of the lines.
    """
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"The page needs the lines {begin.strip()} and {end.strip()}.")
    return before + begin + section + end + after


def update_page(path: Path, page: str, arguments: Sequence[str]) -> int:
    """Write the new text of a page, and return 0.

    With ``--check`` among the arguments, write nothing, and return 1 if the file has another text.
    """
    if "--check" in arguments:
        return int(path.read_text(encoding="utf-8") != page)
    path.write_text(page, encoding="utf-8")
    return 0
