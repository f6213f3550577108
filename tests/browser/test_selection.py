"""Selecting a node of the tree or a token of the answer by touch, mouse and keyboard keeps its text shown."""

from __future__ import annotations

import pytest
from page_steps import PROMPT, OpenPage, ask, set_fields
from playwright.sync_api import Page, expect

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def with_first_round(page: Page) -> Page:
    """Ask a question in mode `on`, and show the first round."""
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    set_fields(page, mode="on")
    ask(page)
    page.fill("#round", "0")
    return page


def test_taps_on_a_phone_keep_the_text_of_a_node_and_of_a_token(open_page: OpenPage) -> None:
    page = with_first_round(open_page(**PHONE))
    detail, origin = page.locator("#node-detail"), page.locator("#origin")
    for kind, words in (
        ("rejected", "Rejected."),
        ("accepted", "Accepted."),
        ("bonus", "chosen by the target"),
    ):
        node = page.locator(f"#tree .node.{kind}").first
        node.tap()
        expect(detail).to_contain_text(words)
        assert (node.locator("text").text_content() or "").strip("…") in (detail.text_content() or "")
        if kind != "bonus":
            expect(detail).to_contain_text("probability")
        expect(page.locator("#tree .node.selected")).to_have_count(1)
    page.locator(".message.assistant .token.draft").first.tap()
    expect(origin).to_contain_text("drafted at depth 1 (round 1)")
    # The tree still shows this round, and a tap elsewhere changes neither text.
    page.locator("#round-caption").tap()
    expect(origin).to_contain_text("drafted at depth 1 (round 1)")
    expect(detail).to_contain_text("chosen by the target")


def test_a_click_keeps_a_node_when_the_mouse_leaves(open_page: OpenPage) -> None:
    page = with_first_round(open_page())
    detail = page.locator("#node-detail")
    page.locator("#tree .node.rejected").first.click()
    expect(detail).to_contain_text("Rejected.")
    page.locator("#tree .node.root").hover()
    expect(detail).to_contain_text("the last token before this round")
    page.mouse.move(1, 1)
    expect(detail).to_contain_text("Rejected.")
    page.keyboard.press("ArrowLeft")
    expect(detail).not_to_contain_text("Rejected.")
    page.locator(".message.assistant .token.bonus").first.click()
    page.mouse.move(1, 1)
    expect(page.locator("#origin")).to_contain_text("chosen by the target after the drafted tokens")


def test_the_arrow_keys_move_between_the_tokens_of_an_answer(open_page: OpenPage) -> None:
    page = with_first_round(open_page())
    origin = page.locator("#origin")
    page.focus("#log")
    page.keyboard.press("ArrowRight")
    expect(origin).to_contain_text("decoded without a draft")
    page.keyboard.press("ArrowRight")
    expect(origin).to_contain_text("drafted at depth 1 (round 1)")
    page.keyboard.press("ArrowLeft")
    expect(origin).to_contain_text("decoded without a draft")


def test_a_screen_reader_gets_the_selected_node(open_page: OpenPage) -> None:
    page = with_first_round(open_page())
    page.focus("#tree")
    page.keyboard.press("ArrowRight")
    item = page.get_by_role("treeitem", selected=True)
    expect(item).to_have_count(1)
    assert item.get_attribute("aria-label") == page.locator("#node-detail").text_content()
    assert page.locator("#tree").get_attribute("aria-activedescendant") == item.get_attribute("id")


def test_the_end_of_an_answer_leaves_the_focus_where_the_user_put_it(open_page: OpenPage) -> None:
    page = with_first_round(open_page())
    set_fields(page, mode="off", max_tokens="300")
    page.fill("#prompt", "Count from 1 to 300, one number a line.")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant").nth(1).locator(".token").nth(3)).to_be_visible()
    page.focus("#tree")
    expect(page.locator(".summary")).to_have_count(2)
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#tree")).to_be_focused()


@pytest.mark.parametrize("place", ["#stop", "body", "#temperature", "#log"])
def test_escape_stops_an_answer_from_everywhere(open_page: OpenPage, place: str) -> None:
    page = open_page()
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    set_fields(page, mode="off", max_tokens="1500")
    # The answer is long, so that it cannot end before the key is pressed.
    page.fill("#schema", '{"type": "array", "items": {"enum": [1, 2]}, "minItems": 400}')
    page.fill("#prompt", "Count from 1 to 300, one number a line.")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .token").nth(3)).to_be_visible()
    expect(page.get_by_role("button", name="Stop")).to_have_attribute("aria-keyshortcuts", "Escape")
    if place == "body":
        page.evaluate("document.activeElement.blur()")
    else:
        page.focus(place)
    page.keyboard.press("Escape")
    expect(page.locator("#message")).to_have_text("Stopped.")
    expect(page.locator(".summary")).to_contain_text("(stopped)")


def test_clear_and_a_race_forget_the_origin_of_a_token_that_is_gone(open_page: OpenPage) -> None:
    page = with_first_round(open_page())
    origin = page.locator("#origin")
    page.locator(".message.assistant .token.draft").first.click()
    expect(origin).to_contain_text("drafted at depth 1 (round 1)")
    page.get_by_role("button", name="Clear").click()
    expect(origin).to_be_empty()
    page.get_by_role("tab", name="Race").click()
    for _ in range(2):
        page.fill("#prompt", PROMPT)
        page.keyboard.press("Enter")
        expect(page.locator("#send")).to_be_hidden()
        expect(origin).to_be_empty()
        expect(page.locator("#race-result")).not_to_be_empty()
        page.locator("#slow-text .token").first.click()
        expect(origin).to_contain_text("was ")
