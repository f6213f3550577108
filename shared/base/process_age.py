"""Measures how long this process has run."""

from __future__ import annotations

import os
import time
from pathlib import Path

START_FIELD = 19
"""Index of the process's start time in /proc/self/stat, counted from the field after the parenthesised name.

The start time is in clock ticks since boot.
"""


def process_age_s() -> float | None:
    """Return the number of seconds since this process started, including the time of its imports.

    Returns None if Linux's /proc is not there.
    """
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[START_FIELD]) / os.sysconf("SC_CLK_TCK")
