"""README, docs/ and the other pages name only files that exist, and their links have existing targets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("models/**/*.md")])
FOLDERS = tuple(
    f"{name}/"
    for name in ("services", "shared", "kernels", "bench", "tests", "train", "protos", "docs", "models")
)
PLACEHOLDER = re.compile(r"[A-Z]{2,}|services/[XY]$|[<*{…]")
"""Names such as kernels/OPERATION/ and services/X stand for many files."""


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_pages() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    named = re.findall(r"`([^`\s]+)`", page.read_text())
    paths = [name.rstrip("/") for name in named if name.startswith(FOLDERS)]
    missing = [path for path in paths if not PLACEHOLDER.search(path) and not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    text = page.read_text()
    for link in [
        *re.findall(r"\]\(([^)\s]+)\)", text),
        *re.findall(r"(?:src|srcset|href)=\"([^\"]+)\"", text),
    ]:
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_merge_conflict_is_left(page: Path) -> None:
    assert re.findall(r"^(?:<{7}|>{7}) .*$", page.read_text(), flags=re.MULTILINE) == []
