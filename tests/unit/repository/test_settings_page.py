"""docs/settings.md lists every setting of the three services, as they are in the source code."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.shared.base.settings import flag_name

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "settings.md").read_text()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import settings_tables

    return settings_tables


@pytest.mark.parametrize("service", ["gateway", "target", "draft"])
def test_each_setting_is_on_the_page(service: str, script: object) -> None:
    part = PAGE.partition(f"<!-- {service}: begin -->")[2].partition(f"<!-- {service}: end -->")[0]
    fields = script.SERVICES[service].model_fields
    assert len(fields) > 20
    assert [name for name in fields if f"| `{flag_name(name)}`" not in part] == []
    assert part.count("\n| `--") == len(fields), "and nothing else"


def test_the_tables_are_current(script: object) -> None:
    assert script.main(["--check"]) == 0, "run: python scripts/settings_tables.py"


def test_a_stale_table_is_found(script: object) -> None:
    stale = PAGE.replace("--drain-grace-s", "--gone", 1)
    assert stale != PAGE
    assert script.updated(stale) == PAGE


def test_the_operations_page_leads_there() -> None:
    assert "(settings.md)" in (ROOT / "docs" / "operations.md").read_text()
