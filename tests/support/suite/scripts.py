"""Imports the programs of the folder `scripts/`, which is no package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def import_script(name: str) -> Any:
    """Import ``scripts/NAME.py`` as the module `name`. Like a program, it can import other scripts."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))
