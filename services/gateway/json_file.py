"""Reads a JSON file of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.shared.base.errors import CheckpointError


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object that a file contains, or an empty object if the file does not exist.

    Raises:
        CheckpointError: The file contains something else. The error names the file.
    """
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}.", field=str(file)) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must contain a JSON object.", field=str(file))
    return content
