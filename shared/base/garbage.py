"""Keeps garbage collections short: pauses them during imports, and exempts objects that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 20_000
"""New objects after which the collector runs. Visiting so many takes about a millisecond."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Pause garbage collection in a block that only imports modules.

    An import makes many objects that stay until the process ends. Collections would visit them again and
    again, which takes about an eighth of the time of an import of torch. Objects that exist after the block
    are exempted from later collections. Blocks may be nested.

    Example:
        >>> import gc
        >>> with without_collections():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_objects() -> None:
    """Exempt all objects that exist now from later garbage collections, and make these collections rare.

    Call this function when most objects of the process will stay until its end. Otherwise, every full
    collection visits them, which stops all threads for tens of milliseconds. Python's own interval, 700 new
    objects, suits small programs: the tokens of answers that are not complete yet would be visited many times
    a second.

    Example:
        >>> import gc
        >>> before = gc.get_freeze_count()
        >>> kept = [[]]
        >>> freeze_objects()
        >>> gc.get_freeze_count() > before
        True
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
