"""Reads JSON files and their typed values. Errors name the key, the file and the fix."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.shared.base.errors import CheckpointError, OutriderError
from outrider.shared.base.model_paths import dangling_link

LARGEST = (1 << 31) - 1
"""Upper bound of every size. No model has larger sizes, and torch could not represent such tensors."""


class ConfigReader:
    """Typed access to a JSON object. Errors name the key and the file."""

    def __init__(self, raw: Mapping[str, Any], source: Path | str) -> None:
        self.raw = raw
        self.source = source

    def error(self, key: str, problem: str) -> CheckpointError:
        """Return an error for `key`. The message is the key followed by `problem`."""
        return CheckpointError(f"{self.source}: {key}: {problem}.", field=key)

    def positive(self, key: str, default: int | None = None) -> int:
        """Return an integer ≥ 1. Null counts as absent. If there is no default, the key is required."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self.error(
                    key, "is missing; the folder must contain the config.json that belongs to the weights"
                )
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, f"must be a positive integer, not {value!r}")
        if value > LARGEST:
            raise self.error(key, f"must be at most {LARGEST}, not {value}")
        return value

    def count(self, key: str, default: int) -> int:
        """Return an integer ≥ 0. Null counts as absent."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(key, f"must be an integer of at least 0, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number > 0. Null counts as absent. If there is no default, the key is required."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing; add it, or download the file again")
            return default
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise self.error(key, f"must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean. Null counts as absent."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string. Null counts as absent."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {value!r}")
        return value

    def strings(self, key: str) -> tuple[str, ...] | None:
        """Return a list of strings, or None if the key is absent or null."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"must be a list of strings, not {value!r}")
        return tuple(value)


@contextmanager
def faults_of(source: Path | str) -> Iterator[None]:
    """Context manager that turns exceptions of its block into an error about the file `source`.

    An invalid value in the file therefore never ends in a traceback. An `OutriderError` is not changed,
    because it already names the fault.

    Raises:
        CheckpointError: An exception was raised. The message names the file, and the cause is the original
            exception.
    """
    try:
        yield
    except OutriderError:
        raise
    except Exception as error:  # An invalid value may cause any exception, including one in transformers.
        raise CheckpointError(
            f"{source} cannot be read as a model configuration ({type(error).__name__}: {error}); "
            "correct it, or download it again.",
            field=str(source),
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: The file is missing, unreadable or not a JSON object. `field` is the file's path.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if link := dangling_link(path):
            raise CheckpointError(link, field=str(path)) from None
        hint = "check the path" if not path.parent.is_dir() else "pass a Hugging Face model folder"
        raise CheckpointError(f"{path} does not exist: {hint}.", field=str(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({error}); download the file again.", field=str(path)
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} must contain a JSON object, not {type(value).__name__}; download it again.",
            field=str(path),
        )
    return value
