"""ahead: kernels are compiled by several processes at once, before what launches them runs.

A first start on a machine compiles some hundred variants of kernels, a third of a second each, one after the other. Which ones they are is
known only to the code that launches them. So that code is rehearsed: it runs as usual, but no kernel is launched. Of one that is not
compiled yet, the name and the types and constants that it was called with go to a process that compiles it into Triton's cache on the
disk. What kernels would have written is zeros meanwhile (`_launch.empty`). Then the real run finds everything there.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from outrider.kernels._launch import outputs_of_zeros

if TYPE_CHECKING:
    from outrider.kernels.ahead.pool import CompilerPool

__all__ = ["Compiled", "Work", "compile_ahead", "rehearsing", "state_of"]

Work = Callable[[], object]
Tell = Callable[[int, int], None]

PIECES_TO_SEE = 2
"""Pieces of work after which nothing is expected to be missing if nothing was until then."""

_log = logging.getLogger("outrider.kernels")
_rehearsing = False


class Compiled(enum.Enum):
    """Whether the kernels of a piece of work are compiled: NO = one cannot be, NOT_YET = one is on its way, or left for later."""

    YES = enum.auto()
    NOT_YET = enum.auto()
    NO = enum.auto()


def rehearsing() -> bool:
    """Whether kernels are left out now: nothing that depends on what they compute may be kept."""
    return _rehearsing


def compile_ahead(
    device: torch.device, works: Sequence[Work], tell: Tell | None = None, *, limit_s: float = math.inf
) -> int:
    """Rehearse pieces of work on this thread, and wait until the kernels that they miss are compiled.

    A piece must stand the zeros: it neither waits for what kernels compute nor keeps it. One that fails ends the rehearsal; what was
    missed until then is compiled all the same, and the rest when it is launched.

    Args:
        device: Where they run; nothing happens but on a GPU.
        works: The pieces. If the first few miss nothing, the others are taken to be compiled too.
        tell: Hears how many kernels of how many are compiled.
        limit_s: Wait for them no longer; those that nobody has begun by then are compiled when they are launched.

    Returns:
        How many kernels were compiled.
    """
    if device.type != "cuda" or not works:
        return 0
    pool = _pool()
    before, compiled = pool.submitted, pool.compiled
    try:
        with torch.cuda.device(device), _rehearsal(pool):
            for index, work in enumerate(works):
                if index == PIECES_TO_SEE and pool.submitted == before:
                    break
                work()
    except Exception as error:
        _log.warning("kernels are compiled as they are launched: %s: %s", type(error).__name__, error)
    torch.cuda.synchronize(device)
    if pool.submitted > before:
        torch.cuda.empty_cache()  # what was rehearsed on this stream is done on others
        pool.wait(before, tell, limit_s)
    return pool.compiled - compiled


def state_of(device: torch.device, work: Work) -> Compiled:
    """Rehearse a piece of work to see whether all its kernels are compiled; none is submitted for it."""
    if device.type != "cuda":
        return Compiled.YES
    pool = _pool()
    try:
        with torch.cuda.device(device), _rehearsal(pool):
            return pool.state_of(work)
    except Exception as error:
        _log.debug("work that does not run: %s: %s", type(error).__name__, error)
        return Compiled.NO


@functools.cache
def _pool() -> CompilerPool:
    from outrider.kernels.ahead.pool import CompilerPool

    return CompilerPool()


@contextlib.contextmanager
def _rehearsal(pool: CompilerPool) -> Iterator[None]:
    global _rehearsing
    assert not _rehearsing, "a rehearsal within a rehearsal"
    _rehearsing = True
    try:
        with pool.instead_of_launches(), outputs_of_zeros():
            yield
    finally:
        _rehearsing = False
