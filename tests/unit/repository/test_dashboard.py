"""Dashboard and alerts: their PromQL is valid, and names only metrics and labels that the services have."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from support.suite.scripts import import_script

from outrider.services.draft.metrics import DraftMetrics
from outrider.services.gateway.metrics import GatewayMetrics
from outrider.services.target.metrics import TargetMetrics
from outrider.shared.obs.metrics import Metrics

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "outrider.json").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
QUERIES = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
}
# The gateway adds these to the metrics of each target and its draft.
TARGET_LABELS = {"model", "target"}
# Prometheus adds these itself.
SCRAPED = {"up": {"job", "instance"}}
SCRAPE_LABELS = {"job", "instance"}


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Sample → labels of all metrics that the gateway and the target register."""
    found = dict(SCRAPED)
    added = TARGET_LABELS
    with pytest.MonkeyPatch.context() as patch:
        for kind, suffixes, extra in (
            ("counter", ("_total",), set()),
            ("gauge", ("",), set()),
            ("histogram", ("_bucket", "_sum", "_count"), {"le"}),
        ):
            real = getattr(Metrics, kind)

            def note(
                self: Metrics,
                name: str,
                *rest: Any,
                _real: Any = real,
                _suffixes: tuple[str, ...] = suffixes,
                _extra: set[str] = extra,
                **more: Any,
            ) -> Any:
                metric = _real(self, name, *rest, **more)
                for suffix in _suffixes:
                    found[f"outrider_{name}{suffix}"] = {*metric._labelnames, *_extra, *added, *SCRAPE_LABELS}
                return metric

            patch.setattr(Metrics, kind, note)
        TargetMetrics()
        DraftMetrics()
        added = set()
        GatewayMetrics()  # last, because the gateway's own metrics hide those with the same names
    assert len(found) > 40
    return found


def selectors(node: Any) -> Iterator[Any]:
    """Yield all vector selectors of a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "param"):
        child = getattr(node, name, None)
        if child is not None and not isinstance(child, (str, float, int)):
            yield from selectors(child)
    args = getattr(node, "args", None)
    for child in args if isinstance(args, Iterable) else ():
        yield from selectors(child)


def check(query: str, exposed: dict[str, set[str]]) -> set[str]:
    """Check an expression, and return the names of its samples."""
    parsed = promql_parser.parse(
        query.replace("$__rate_interval", "1m").replace("$instance", ".+").replace("$model", ".*")
    )
    names = set()
    for selector in selectors(parsed):
        assert selector.name in exposed, query
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= exposed[selector.name], query
        names.add(selector.name)
    assert names == set(re.findall(r"\b(?:outrider_\w+|up(?={))", query)), "every name was checked"
    return names


@pytest.mark.parametrize("title", QUERIES)
def test_a_panel_asks_for_metrics_that_exist(title: str, exposed: dict[str, set[str]]) -> None:
    assert check(QUERIES[title], exposed)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_metrics_that_exist(rule: dict[str, Any], exposed: dict[str, set[str]]) -> None:
    assert check(rule["expr"], exposed)
    assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"\d+[smh]", rule["for"])
    assert rule["labels"]["severity"] in ("page", "warn")
    assert rule["annotations"]["summary"].endswith(".")
    assert rule["annotations"]["summary"].count("{{") == rule["annotations"]["summary"].count("}}")
    page = (ROOT / "docs" / "operations.md").read_text()
    assert f"| `{rule['alert']}` |" in page, "the page says what to do"


def test_a_panel_shows_the_chosen_models(exposed: dict[str, set[str]]) -> None:
    for query in QUERIES.values():
        for selector in selectors(promql_parser.parse(query.replace("$__rate_interval", "1m"))):
            labels = {matcher.name for matcher in selector.matchers.matchers}
            assert ("model" in labels) == ("model" in exposed[selector.name]), query


def test_a_wrong_query_is_found(exposed: dict[str, set[str]]) -> None:
    for query in ("rate(outrider_no_such_total[1m])", 'outrider_num_requests_running{shape="x"}'):
        with pytest.raises(AssertionError):
            check(query, exposed)
    with pytest.raises(ValueError, match=r"\S"):
        check("sum(rate(outrider_num_requests_running)", exposed)


def test_speculation_has_its_panels(exposed: dict[str, set[str]]) -> None:
    asked = {name for query in QUERIES.values() for name in check(query, exposed)}
    wanted = {name for name in exposed if "spec_decode" in name or "auto_" in name or "draft_" in name}
    wanted |= {"outrider_verify_seconds_sum", "outrider_kv_cache_usage_perc"}
    left_out = {"outrider_auto_looks_lost_seconds"}
    assert {name for name in wanted - asked if not name.endswith("_bucket")} == left_out


def test_each_metric_is_on_the_operations_page(exposed: dict[str, set[str]]) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    families = {re.sub(r"_(bucket|sum|count)$", "", name.removeprefix("outrider_")) for name in exposed}
    assert [name for name in families - {"up"} if not re.search(rf"`{name}[`{{]", page)] == []


def test_legends_name_labels_of_their_query() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"], target


def test_panels_fit_the_grid_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_dashboard_is_written_by_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    dashboard = import_script("dashboard")
    assert dashboard.rendered() == dashboard.FILE.read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["dashboard.py", "check"])
    assert dashboard.main() == 0


def test_the_containers_find_each_other() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    (address,) = scrape["static_configs"][0]["targets"]
    for name in ("outrider", "gateway", "gateway-cpu"):
        assert compose["services"][name]["networks"]["default"]["aliases"] == [address.partition(":")[0]]
        assert "--port 8000" in compose["services"][name]["command"]
    prometheus = compose["services"]["prometheus"]
    assert scrape["authorization"]["credentials_file"] in prometheus["command"][0]
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    assert source["datasources"][0]["uid"] == DASHBOARD["templating"]["list"][0]["datasource"]["uid"]
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/outrider.yml").read_text())
    mounts = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert provider["providers"][0]["options"]["path"] in mounts
