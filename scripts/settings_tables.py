"""Writes the tables of docs/settings.md from the settings classes, or checks that they are up to date.

Run `python scripts/settings_tables.py` after a change of a setting. With `--check`, the script writes
nothing, and its exit code is 1 if the page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from page_section import replaced, update_page
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from outrider.services.cli.settings_options import ALIASES
from outrider.services.draft.settings import DraftSettings
from outrider.services.gateway.settings import GatewaySettings
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.settings import ServiceSettings, flag_name

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
SERVICES: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "target": TargetSettings,
    "draft": DraftSettings,
}


def table(settings_type: type[ServiceSettings]) -> str:
    """Return the table of one service's settings, in alphabetical order."""
    rows = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for name, field in sorted(settings_type.model_fields.items()):
        flags = ", ".join(f"`{flag}`" for flag in (flag_name(name), *ALIASES.get(name, ())))
        meaning = (field.description or "").replace("|", "\\|")
        rows.append(f"| {flags} | {_default(field)} | {meaning} |")
    return "\n".join(rows) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default()
    if value in (None, (), "", PydanticUndefined):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{getattr(value, 'value', value)}`"


def updated(page: str) -> str:
    """Return the page with new tables between its markers."""
    for service, settings_type in SERVICES.items():
        begin, end = f"<!-- {service}: begin -->\n", f"<!-- {service}: end -->\n"
        page = replaced(page, begin, end, table(settings_type))
    return page


def main(arguments: Sequence[str]) -> int:
    """Write the tables into the page. With ``--check``, only return 1 if the page is out of date."""
    return update_page(PAGE, updated(PAGE.read_text(encoding="utf-8")), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
