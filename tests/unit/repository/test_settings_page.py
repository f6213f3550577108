"""docs/settings.md lists every setting of the three services, as they are in the source code."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.suite.scripts import import_script

from outrider.shared.base.settings import flag_name

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "settings.md").read_text()


SCRIPT = import_script("settings_tables")


@pytest.mark.parametrize("service", ["gateway", "target", "draft"])
def test_each_setting_is_on_the_page(service: str) -> None:
    part = PAGE.partition(f"<!-- {service}: begin -->")[2].partition(f"<!-- {service}: end -->")[0]
    fields = SCRIPT.SERVICES[service].model_fields
    assert len(fields) > 20
    assert [name for name in fields if f"| `{flag_name(name)}`" not in part] == []
    assert part.count("\n| `--") == len(fields), "and nothing else"


def test_the_tables_are_current() -> None:
    assert SCRIPT.main(["--check"]) == 0, "run: python scripts/settings_tables.py"


def test_a_stale_table_is_found() -> None:
    stale = PAGE.replace("--drain-grace-s", "--gone", 1)
    assert stale != PAGE
    assert SCRIPT.updated(stale) == PAGE


def test_the_operations_page_leads_there() -> None:
    assert "(settings.md)" in (ROOT / "docs" / "operations.md").read_text()
