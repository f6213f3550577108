"""The version of the installed package (`installed_version`)."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Return the version of the installed package, or "unknown" if the package is not installed."""
    try:
        return version("outrider")
    except PackageNotFoundError:
        return "unknown"
