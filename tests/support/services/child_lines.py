"""Lines that supervised children print, and whether a process is running."""

from __future__ import annotations

import queue
from pathlib import Path


class Lines:
    """Collects the lines that children print. `next_of` waits for a child's next line."""

    def __init__(self) -> None:
        self._lines: dict[str, queue.Queue[str]] = {}

    def __call__(self, name: str, line: str) -> None:
        self._lines.setdefault(name, queue.Queue()).put(line)

    def next_of(self, name: str) -> str:
        return self._lines.setdefault(name, queue.Queue()).get(timeout=20)


def is_running(process_id: int) -> bool:
    """Return True if the process is alive. A zombie, which still awaits reaping, is not."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "\nState:\tZ" not in status
