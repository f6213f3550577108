"""The tests that docs/security.md and docs/promises.md name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize(("page", "rows"), [("security.md", 20), ("promises.md", 10)])
def test_the_named_tests_exist(page: str, rows: int) -> None:
    lines = (ROOT / "docs" / page).read_text().splitlines()
    table = [found for line in lines if line.startswith("|") and (found := NAMED.findall(line))]
    assert len(table) >= rows
    missing = [
        f"{file}::{name}"
        for found in table
        for file, name in found
        if not re.search(rf"^ *((async )?def {name}\(|{name} = )", _text(file), re.MULTILINE)
    ]
    assert missing == []


def _text(file: str) -> str:
    path = ROOT / "tests" / file
    return path.read_text() if path.exists() else ""
