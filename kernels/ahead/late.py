"""Logs the Triton kernels that no rehearsal found, and that are therefore compiled when they are launched."""

from __future__ import annotations

import logging
from typing import Any

from triton import knobs

_log = logging.getLogger("outrider.kernels")


def log_late_compilations() -> None:
    """Log name, constants and time of each compilation of a Triton kernel in this process from now on.

    Such a compilation stops the thread that launches the kernel, and therefore all requests. Kernels from
    Triton's cache, and kernels that the worker processes of `compile_ahead` compile, are not logged.

    Example:
        >>> from outrider.kernels.ahead.late import log_late_compilations
        >>> from triton import knobs
        >>> log_late_compilations()
        >>> knobs.compilation.listener is None
        False
        >>> knobs.compilation.listener = None  # log nothing from now on
    """
    knobs.compilation.listener = _compiled


def _compiled(*, src: Any, times: Any, cache_hit: bool, **_more: Any) -> None:
    if not cache_hit:
        names = src.fn.arg_names
        constants = {names[path[0]]: value for path, value in src.constants.items() if len(path) == 1}
        _log.info(
            "kernel %s was compiled when it was launched, in %.2f s, with %s",
            src.name,
            times.total / 1e6,
            ", ".join(f"{name}={value}" for name, value in constants.items()),
        )
