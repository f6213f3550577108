"""The operator's page in a browser, and the accessibility rules of axe-core on both pages."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from page_steps import OpenPage, ask, set_fields
from playwright.sync_api import Page, expect
from support.services.stack import Stack


def test_the_status_page_shows_services_load_charts_and_errors(
    open_page: OpenPage, stack: Stack, page: Page
) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}
    for _ in range(2):
        assert httpx.post(f"{stack.base_url}/v1/chat/completions", json=body).status_code == 400
    status = open_page("/status")
    expect(status.locator("#services")).to_contain_text("ready")
    for name in ("Gateway", "Target", "Draft"):
        times = status.locator("#services div").filter(has_text=f"{name} up for").locator("dd")
        expect(times).to_have_text(re.compile(r"\d+ (s|min)"))
    lost = status.locator("#services div").filter(has_text="Lost connections").locator("dd")
    expect(lost).to_have_text("none")
    expect(status.locator("#model")).to_contain_text("LlamaForCausalLM")
    expect(status.locator("#speculation")).to_contain_text("EAGLE3")
    expect(status.locator("#memory")).to_contain_text("of")
    for words in ("Weights", "MiB", "0 recorded", "gRPC"):
        expect(status.locator("#resources")).to_contain_text(words)
    row = status.locator("#errors tr").first
    expect(row).to_contain_text("max_tokens must be at least 1")
    expect(row.locator("td").nth(5)).to_have_text("2")
    speed = status.locator(".chart").filter(has_text="Tokens/s")
    expect(speed.locator("strong")).not_to_have_text("–")
    ask(page)
    expect(speed.locator("svg")).not_to_have_attribute("aria-label", "Tokens/s: 0, at most 0 in two minutes")
    expect(status.locator("#depths")).to_contain_text("Depth 5")
    transport = status.locator("#resources div").filter(has_text="Transport of drafts").locator("dd")
    expect(transport).to_have_text("gRPC")  # without "through the host", because there is no GPU
    tokens = status.locator("#batch div").filter(has_text="Generated tokens").locator("dd")
    expect(tokens).not_to_have_text("0")


def test_the_status_page_names_both_speeds_and_divides_by_depth(open_page: OpenPage, page: Page) -> None:
    for depth in ("2", "6"):
        set_fields(page, depth=depth, topk="1", max_nodes=str(int(depth) + 1))
        ask(page)
    status = open_page("/status")
    expect(status.locator("#speculation")).to_contain_text("Speed-up of recent drafted rounds")
    expect(status.locator("#auto, #speculation").get_by_text("Estimated speed-up")).to_have_count(0)
    metrics = httpx.get(status.url.removesuffix("/status") + "/status.json").json()["metrics"]
    drafted, accepted = (
        [metrics[f'outrider_{name}_total{{depth="{depth}"}}'] for depth in (1, 6)]
        for name in ("drafted_rounds", "accepted_tokens")
    )
    assert drafted[0] == metrics["outrider_spec_decode_num_drafts_total"]
    assert accepted[1] <= drafted[1] < drafted[0]
    deepest = status.locator("#depths > div").filter(has_text="Depth 6")
    expect(deepest).to_contain_text(f"{accepted[1] / drafted[1]:.1%}".replace("%", " %"))


def test_the_charts_begin_with_what_the_gateway_remembers(open_page: OpenPage, page: Page) -> None:
    ask(page)
    remembered = (
        "fetch('/status.json').then((one) => one.json()).then((one) => one.recent.tokens.some(Boolean))"
    )
    page.wait_for_function(remembered)
    # The page's own measurements would be 0, because no request runs any more.
    status = open_page("/status")
    for title in ("Tokens/s", "Running requests", "Accept length"):
        chart = status.locator(".chart").filter(has_text=title).locator("svg")
        expect(chart).to_have_attribute("aria-label", re.compile(r"at most [1-9]"))


def test_each_of_several_targets_has_a_line(open_page: OpenPage, stack: Stack) -> None:
    status = open_page("/status")
    expect(status.locator("#services")).to_contain_text("ready")
    expect(status.locator("#targets-card")).to_be_hidden()
    reply = httpx.get(f"{stack.base_url}/status.json").json()
    reply["targets"].append(
        {"address": "10.0.0.2:7001", "model": None, "ready": False, "load_tokens": 0, "stats": None}
    )
    status.route("**/status.json", lambda route: route.fulfill(json=reply))
    expect(status.locator("#services")).to_contain_text("1 of 2 ready")
    up, down = status.locator("#targets tr").all()
    cells = up.locator("td").all_inner_texts()
    assert cells[2] == "ready"
    assert re.fullmatch(r"\d+ of \d+", cells[3])
    assert re.fullmatch(r"\d+ %", cells[5])
    assert cells[7] == "ready"
    assert down.locator("td").all_inner_texts() == ["10.0.0.2:7001", "–", "not ready", *["–"] * 5]
    assert violations(status) == {}


def test_names_in_tables_stay_whole_on_a_phone(open_page: OpenPage) -> None:
    status = open_page("/status", viewport={"width": 360, "height": 740})
    expect(status.locator("#services")).to_contain_text("ready")
    heights = status.locator("th").evaluate_all("all => all.map((one) => one.clientHeight)")
    assert max(heights) < 40  # one line
    assert status.evaluate("document.documentElement.scrollWidth") <= 360


def violations(page: Page) -> dict[str, list[str]]:
    """Return rule → offending elements of axe-core's default rules."""
    found = Axe().run(page).response["violations"]
    return {one["id"]: [str(node["target"]) for node in one["nodes"]] for one in found}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (360, 740)])
def test_axe_finds_no_violation(open_page: OpenPage, scheme: str, size: tuple[int, int]) -> None:
    options = {"color_scheme": scheme, "viewport": {"width": size[0], "height": size[1]}}
    page = open_page(**options)
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    assert violations(page) == {}
    page.get_by_text("Settings", exact=True).click()
    page.select_option("#mode", "on")
    ask(page)
    page.fill("#round", "0")
    page.focus("#tree")
    assert violations(page) == {}
    page.get_by_role("button", name="Accept length").focus()
    assert violations(page) == {}
    page.get_by_role("tab", name="Race").click()
    assert violations(page) == {}
    status = open_page("/status", **options)
    expect(status.locator("#services")).to_contain_text("ready")
    assert violations(status) == {}
