"""No Python file is longer than 400 lines, except generated stubs."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("kernels", "shared", "services", "bench", "train", "tests", "scripts")
MOST_LINES = 400


def test_no_file_is_too_long() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 500
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}
