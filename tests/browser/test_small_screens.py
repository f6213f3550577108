"""On a phone, tree and speed are in view with the answer, and errors of the status page are readable."""

from __future__ import annotations

import httpx
from page_steps import OpenPage, ask
from playwright.sync_api import expect
from support.services.stack import Stack

PHONE = {"viewport": {"width": 375, "height": 667}, "has_touch": True, "is_mobile": True}


def test_answer_tree_and_speed_are_in_view_together(open_page: OpenPage) -> None:
    page = open_page(**PHONE)
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    expect(page.locator("#tree")).to_be_hidden()
    page.get_by_text("Settings", exact=True).click()
    page.select_option("#mode", "on")
    page.get_by_text("Settings", exact=True).click()
    page.evaluate("scrollTo(0, 0)")
    ask(page)
    for place in ("#log", "#brief", "#tree", "#prompt"):
        expect(page.locator(place)).to_be_in_viewport(ratio=0.6)
    expect(page.locator("#brief")).to_contain_text("tokens/s · accept length")
    # A wide screen has room for the tree beside the answer.
    page.set_viewport_size({"width": 1280, "height": 800})
    expect(page.locator("#tree-card #tree")).to_be_visible()
    expect(page.locator("#brief")).to_be_hidden()


def test_the_messages_of_errors_have_lines_of_their_own(open_page: OpenPage, stack: Stack) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 9}
    assert httpx.post(f"{stack.base_url}/v1/chat/completions", json=body).status_code == 400
    status = open_page("/status", **PHONE)
    message = status.get_by_role("cell").filter(has_text="temperature must be").first
    box = message.bounding_box()
    assert box is not None
    assert box["x"] < 60
    assert box["width"] > 250
    assert status.evaluate("document.documentElement.scrollWidth") <= 375
