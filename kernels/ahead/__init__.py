"""ahead: compiles Triton kernels in several processes before the code that launches them runs.

The first start on a machine compiles about a hundred kernel variants, each in about a third of a second. Only
the launching code determines which variants are needed. This package therefore rehearses that code:

1. The rehearsal runs the code, but launches no kernel. The outputs of kernels are zeros (`_launch.empty`).
2. Worker processes compile the missing kernels into Triton's cache on disk. They receive the name, the
   argument types and the constants of each kernel.
3. When the code runs again, it finds every kernel in the cache.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from outrider.kernels._launch import outputs_of_zeros
from outrider.kernels.ahead.types import Compiled

if TYPE_CHECKING:
    from outrider.kernels.ahead.pool import CompilerPool

__all__ = [
    "CompileWork",
    "Compiled",
    "compile_ahead",
    "compiled_or_soon",
    "covers_all_sizes",
    "rehearsing",
    "state_of",
]

CompileWork = Callable[[], object]
"""A piece of work: a function that launches kernels."""
TellCompiled = Callable[[int, int], None]

PIECES_TO_SEE = 2
"""Number of pieces of work that are always rehearsed. If none of them misses a kernel, the rehearsal ends."""

_log = logging.getLogger("outrider.kernels")
_rehearsing: int | None = None
"""The thread that rehearses. Other threads launch kernels as usual."""
_covered: set[Hashable] | None = None


def rehearsing() -> bool:
    """Return True during a rehearsal of this thread, in which kernel launches are skipped.

    During a rehearsal, do not store results that depend on outputs of kernels.

    Example:
        >>> from outrider.kernels.ahead import rehearsing
        >>> rehearsing()
        False
    """
    return _rehearsing == threading.get_ident()


def covers_all_sizes(launch: Hashable) -> bool:
    """Return True if a launch must stand for launches with all other numbers of sequences, rows and tokens.

    This is the case in a rehearsal with ``all_sizes=True`` (see `compile_ahead`). An operation whose kernels
    have different variants for different sizes then calls each variant once.

    Args:
        launch: Everything else on which the variants depend. For each value, the result is True only once in
            a rehearsal.

    Example:
        >>> from outrider.kernels.ahead import covers_all_sizes
        >>> covers_all_sizes("attention with 32 heads")  # no rehearsal
        False
    """
    if _covered is None or launch in _covered:
        return False
    _covered.add(launch)
    return True


def compile_ahead(
    device: torch.device,
    works: Sequence[CompileWork],
    tell: TellCompiled | None = None,
    *,
    limit_s: float | None = math.inf,
    all_sizes: bool = False,
) -> int:
    """Rehearse functions on this thread, and wait until the Triton kernels that they need are compiled.

    A rehearsal calls a function, but launches no kernel. The outputs of kernels are zeros. The function must
    therefore neither wait for kernel results nor store them. If a function raises an exception, the rehearsal
    ends. Missing kernels found before the exception are still compiled. All others are compiled when they
    are launched.

    Args:
        device: Device that the functions use. Only a GPU needs compiled kernels.
        works: The functions. If all kernels of the first `PIECES_TO_SEE` functions are compiled already, the
            other functions are skipped.
        tell: Progress callback, called with the number of compiled kernels and the total.
        limit_s: Longest wait in seconds. Kernels whose compilation has not started by then are compiled when
            they are launched. With None, this call does not wait, and all kernels are compiled in the
            background.
        all_sizes: True to also compile the kernels that the functions would launch for other numbers of
            sequences, rows and tokens; see `covers_all_sizes`.

    Returns:
        The number of kernels that were compiled; 0 if `device` is not a GPU.

    Example:
        >>> import torch
        >>> from outrider.kernels.ahead import compile_ahead
        >>> compile_ahead(torch.device("cpu"), [lambda: print("rehearsed")])  # nothing to compile on a CPU
        0
    """
    if device.type != "cuda" or not works:
        return 0
    pool = _pool()
    before, compiled = pool.submitted, pool.compiled
    try:
        with torch.cuda.device(device), _rehearsal(pool, all_sizes):
            for index, work in enumerate(works):
                if index == PIECES_TO_SEE and pool.submitted == before:
                    break
                work()
    except Exception as error:
        _log.warning("kernels are compiled as they are launched: %s: %s", type(error).__name__, error)
    torch.cuda.synchronize(device)
    if pool.submitted > before:
        torch.cuda.empty_cache()  # the real run uses other streams, which cannot reuse this stream's memory
        if limit_s is not None:
            pool.wait(before, tell, limit_s)
    return pool.compiled - compiled


def state_of(device: torch.device, work: CompileWork) -> Compiled:
    """Return whether all Triton kernels that a function launches are compiled. Compile no kernel.

    On a GPU, the function is rehearsed (called without kernel launches) to find its kernels. On any other
    device, it is not called, and its kernels count as compiled.

    Example:
        >>> import torch
        >>> from outrider.kernels.ahead import state_of
        >>> state_of(torch.device("cpu"), lambda: print("rehearsed")).name
        'YES'
    """
    if device.type != "cuda":
        return Compiled.YES
    pool = _pool()
    try:
        with torch.cuda.device(device), _rehearsal(pool):
            return pool.state_of(work)
    except Exception as error:
        _log.debug("rehearsed work failed: %s: %s", type(error).__name__, error)
        return Compiled.NO


def compiled_or_soon(device: torch.device, work: CompileWork) -> bool:
    """Return whether all Triton kernels that a function launches are compiled. Start to compile missing ones.

    On a GPU, the function is rehearsed (called without kernel launches) to find its kernels. On any other
    device, its kernels count as compiled. Kernels that cannot be compiled ahead also count as compiled.

    Example:
        >>> import torch
        >>> from outrider.kernels.ahead import compiled_or_soon
        >>> compiled_or_soon(torch.device("cpu"), lambda: print("rehearsed"))
        True
    """
    if state_of(device, work) is not Compiled.NOT_YET:
        return True
    compile_ahead(device, [work], limit_s=None)
    return False


@functools.cache
def _pool() -> CompilerPool:
    from outrider.kernels.ahead.pool import CompilerPool

    return CompilerPool()


@contextlib.contextmanager
def _rehearsal(pool: CompilerPool, all_sizes: bool = False) -> Iterator[None]:
    global _rehearsing, _covered
    assert _rehearsing is None, "rehearsals can neither be nested nor run on two threads"
    _rehearsing, _covered = threading.get_ident(), set() if all_sizes else None
    try:
        with pool.instead_of_launches(), outputs_of_zeros():
            yield
    finally:
        _rehearsing, _covered = None, None
