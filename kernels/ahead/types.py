"""Result type of a rehearsal: whether the kernels of a function are compiled."""

from __future__ import annotations

import enum


class Compiled(enum.Enum):
    """Compilation state of all Triton kernels that a function launches.

    Attributes:
        YES: All kernels are compiled.
        NOT_YET: A kernel is being compiled, or its compilation was deferred.
        NO: A kernel cannot be compiled.
    """

    YES = enum.auto()
    NOT_YET = enum.auto()
    NO = enum.auto()
