"""The race: mode `off`, lanes without a draft, and the origin of the tokens of both lanes."""

from __future__ import annotations

import json
from pathlib import Path

from page_steps import PROMPT, answer_with, set_fields
from playwright.sync_api import Page, expect


def race(page: Page) -> None:
    """Run a race, and wait for its result."""
    page.get_by_role("tab", name="Race").click()
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator("#race-result")).to_contain_text("texts are equal")


def test_mode_off_races_in_mode_auto_and_says_so(page: Page) -> None:
    set_fields(page, mode="off")
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data) if request.method == "POST" else None)
    race(page)
    assert [json.loads(body or "")["speculation"]["mode"] for body in bodies] == ["auto", "off"]
    expect(page.locator("#race-result")).to_contain_text("the first lane runs in mode “auto”")


def test_a_race_without_a_draft_announces_no_speed(page: Page) -> None:
    answer_with(page, [({"content": "A"}, ["A"]), ({"content": " b"}, [" b"])])
    race(page)
    expect(page.locator("#race-result")).to_contain_text("No round of the first lane had a draft")
    expect(page.locator("#race-result")).not_to_contain_text("times as fast")


def test_both_lanes_explain_and_save_their_tokens(page: Page, tmp_path: Path) -> None:
    race(page)
    origin = page.locator("#origin")
    expect(page.locator(".legend .token.draft").first).to_be_visible()
    page.locator("#fast-text .token.draft").first.hover()
    expect(origin).to_contain_text("drafted at depth 1")
    page.focus("#slow-text")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(origin).to_contain_text("decoded without a draft (round 1)")
    modes = []
    for lane, name in (
        ("fast", "Save trace of the lane with speculation"),
        ("slow", "Save trace of plain decoding"),
    ):
        page.locator(f"#{lane}-text .token").nth(2).click()
        with page.expect_download() as download:
            page.get_by_role("button", name=name).click()
        file = tmp_path / f"{lane}.json"
        download.value.save_as(file)
        modes.append(json.loads(file.read_text())["settings"]["speculation"]["mode"])
    assert modes == ["on", "off"]
    page.get_by_role("tab", name="Chat").click()
    expect(page.locator(".legend .token.draft").first).to_be_visible()
