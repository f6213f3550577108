"""Reads the sampling defaults that a model recommends in ``generation_config.json``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.services.gateway.json_file import read_json_object
from outrider.shared.base.errors import CheckpointError

FILE = "generation_config.json"
_RANGES: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: value >= 0,
    "top_k": lambda value: value >= 0 and value == int(value),
    "top_p": lambda value: 0 < value <= 1,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value <= 1e6,
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for parameters that a request leaves out. With None, the server's own default applies."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def load(cls, path: Path) -> SamplingDefaults:
        """Read ``generation_config.json`` of a model folder. If the file does not exist, set no defaults.

        Args:
            path: The model folder, or any file in this folder.

        Raises:
            CheckpointError: If the file is broken, or a value is out of range. The error names the file.
        """
        file = (path.parent if path.is_file() else path) / FILE
        content = read_json_object(file)
        found: dict[str, float] = {}
        for name, in_range in _RANGES.items():
            value = content.get(name)
            if value is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not in_range(value):
                raise CheckpointError(
                    f"{file}: {name} is {value!r}. Correct it, or use --sampling-defaults openai.",
                    field=name,
                )
            found[name] = value
        top_k = found.pop("top_k", None)
        return cls(**found, top_k=None if top_k is None else int(top_k))


NO_DEFAULTS = SamplingDefaults()
