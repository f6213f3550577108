"""Writes the table of REST fields and their gRPC fields into docs/api.md.

The table comes from the table of options, `services/gateway/options/table.py`. Run
`python scripts/grpc_fields.py` after a change. With ``--check``, the script only checks the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from page_section import replaced, update_page

from outrider.services.gateway.options.rows import FieldGroup, RequestOption
from outrider.services.gateway.options.table import OPTIONS, grpc_path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
BEGIN, END = "<!-- gRPC fields: begin -->\n", "<!-- gRPC fields: end -->"


def table() -> str:
    """Return the table as Markdown. The last row lists the fields that have the same name in both APIs."""
    rows = ["| REST | gRPC |", "| --- | --- |"]
    same, renamed = set(), {}
    for one in OPTIONS:
        for path in map(grpc_path, one.grpc):
            for name in _rest_names(one):
                if path.rsplit(".", 1)[-1] == name:
                    same.add(path)
                else:
                    renamed.setdefault(path, set()).add(name)
    for path, names in sorted(renamed.items()):
        rows.append(f"| {', '.join(f'`{name}`' for name in sorted(names))} | `{path}` |")
    alone = sorted((one for one in OPTIONS if one.only), key=lambda one: one.name)
    for one in alone:
        rows += [f"| `{name}` | no field: {one.only} |" for name in one.rest_names]
    for one in alone:
        rows += [f"| no field | `{grpc_path(field)}`: {one.only} |" for field in one.grpc]
    rows.append(f"| fields of the same name | {', '.join(f'`{path}`' for path in sorted(same))} |")
    return "\n".join(rows) + "\n"


def _rest_names(option: RequestOption) -> Iterator[str]:
    """Yield the names of the option's fields in REST bodies, without the fields of `speculation`."""
    for field in option.rest:
        if FieldGroup.SPECULATION not in field.groups:
            yield field.name
    for place in option.objects:
        if place.startswith("/generate:"):
            yield place.removeprefix("/generate:")


def main(arguments: list[str]) -> int:
    """Write the table into the page. With ``--check``, only return 1 if the page's table is out of date."""
    page = replaced(PAGE.read_text(encoding="utf-8"), BEGIN, END, f"\n{table()}\n")
    return update_page(PAGE, page, arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
