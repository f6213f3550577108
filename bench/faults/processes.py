"""Reads memory, threads and open files of the services' processes, and kills or suspends one of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.services.stack.supervisor import Supervisor

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Memory, open files and threads of one process.

    Attributes:
        process: Id of the process, and the number of starts of its service so far.
        rss_mib: Resident memory, in MiB.
        descriptors, threads: Number of open files, and number of threads.
    """

    process: tuple[int, int]
    rss_mib: float
    descriptors: int
    threads: int

    def as_json(self) -> dict[str, object]:
        """Return the usage as JSON values, without the id of the process."""
        return {name: value for name, value in asdict(self).items() if name != "process"}


def usage_of(process: int) -> ProcessUsage | None:
    """Return what a process uses, or None if it has ended. Linux only."""
    folder = Path("/proc") / str(process)
    try:
        fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        descriptors = len(os.listdir(folder / "fd"))
    except OSError:
        return None
    started, threads, pages = int(fields[19]), int(fields[17]), int(fields[21])
    return ProcessUsage(
        (process, started), round(pages * os.sysconf("SC_PAGE_SIZE") / MIB, 1), descriptors, threads
    )


def cpu_seconds(process: int) -> float:
    """Return the time that all threads of a process have run, without waits for a core, in seconds."""
    nanoseconds = 0
    for thread in (Path("/proc") / str(process) / "task").iterdir():
        with suppress(OSError):  # a thread may end at any time
            nanoseconds += int((thread / "schedstat").read_text(encoding="ascii").split()[0])
    return nanoseconds / 1e9


def main_thread_seconds(process: int) -> float:
    """Return the time that the main thread of a process has run, without waits for a core, in seconds."""
    file = Path("/proc") / str(process) / "task" / str(process) / "schedstat"
    return int(file.read_text(encoding="ascii").split()[0]) / 1e9


def usages(supervisor: Supervisor) -> dict[str, ProcessUsage]:
    """Return what each running service uses, by name."""
    found = {}
    for child in supervisor.children:
        usage = usage_of(child.process_id) if child.process_id is not None else None
        if usage is not None:
            found[child.spec.name] = usage
    return found


def survivors(
    before: Mapping[str, ProcessUsage], after: Mapping[str, ProcessUsage]
) -> dict[str, tuple[ProcessUsage, ProcessUsage]]:
    """Return the services that ran all the time between two samples, with both samples."""
    return {
        name: (first, after[name])
        for name, first in before.items()
        if name in after and after[name].process == first.process
    }
