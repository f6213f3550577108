"""How the playground shows an answer: speed, accept length, the end of the answer, chains and hints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from page_steps import PROMPT, OpenPage, answer_with, ask, set_fields
from playwright.sync_api import Page, expect

WIDTHS = (1280, 360)
CHAIN = [" syllables"] * 16


def connected(open_page: OpenPage, width: int) -> Page:
    page = open_page(viewport={"width": width, "height": 800})
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    return page


def test_the_speed_is_that_of_the_tokens_after_the_first(page: Page, tmp_path: Path) -> None:
    ask(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save trace").click()
    file = tmp_path / "trace.json"
    download.value.save_as(file)
    parts = json.loads(file.read_text())["parts"]
    tokens = sum(part["tokens"] for part in parts)
    speed = (tokens - parts[0]["tokens"]) / (parts[-1]["ms"] - parts[0]["ms"]) * 1000
    shown = page.locator(".summary").inner_text()
    assert f"{tokens} tokens in {parts[-1]['ms'] / 1000:.2f} s, {speed:.0f} tokens/s after the first" in shown
    expect(page.locator("#n-speed")).to_have_text(f"{speed:.{1 if speed < 100 else 0}f}")


def test_the_speeds_of_a_race_agree_with_the_times_below_them(page: Page) -> None:
    page.get_by_role("tab", name="Race").click()
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator("#race-result")).not_to_be_empty()
    for lane in ("fast", "slow"):
        note = page.locator(f"#{lane}-note").inner_text()
        tokens, whole, first = map(float, re.findall(r"[\d.]+", note))
        speed = float(page.locator(f"#{lane}-speed").inner_text())
        # The note rounds both times to 0.01 s, and the page rounds a speed to a whole number.
        rounding = 0.011 + 0.5 * (tokens - 1) / speed**2
        assert (tokens - 1) / speed == pytest.approx(whole - first, abs=rounding)


def test_an_answer_that_arrives_at_once_has_no_speed(page: Page) -> None:
    answer_with(page, [({"content": "A"}, ["A"]), ({"content": " b c d"}, [" b", " c", " d"])])
    ask(page)
    expect(page.locator("#n-tokens")).to_have_text("4")
    expect(page.locator("#n-speed")).to_have_text("–")
    expect(page.locator(".summary")).not_to_contain_text("tokens/s")


def test_the_accept_length_names_the_rounds_that_it_counts(page: Page) -> None:
    answer_with(page, [({"content": "A"}, ["A"]), ({"content": " b c"}, [" b", " c", " d", " e"])], cut=2)
    ask(page)
    expect(page.locator("#n-accept")).to_have_text("4.00")
    expect(page.locator("#n-rounds")).to_have_text("1 of 2")
    expect(page.locator(".summary")).to_contain_text("3 tokens in")
    expect(page.locator(".summary")).to_contain_text("accept length 4.00 over 1 of 2 rounds")


def test_tokens_after_the_end_of_the_answer_are_marked(page: Page) -> None:
    answer_with(page, [({"content": "A"}, ["A"]), ({"content": " b."}, [" b", ".", " C", " d", " e"])], cut=3)
    ask(page)
    expect(page.locator("#round-caption")).to_contain_text(
        "4 drafted, 4 accepted (2 after the end of the answer), 2 emitted"
    )
    expect(page.locator("#tree .node.accepted:not(.after)")).to_have_count(2)
    after = page.locator("#tree .node.accepted.after")
    expect(after).to_have_count(2)
    expect(page.locator("#tree .node.bonus")).to_have_count(0)
    after.first.hover()
    expect(page.locator("#node-detail")).to_contain_text("Accepted after the end of the answer")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_long_chain_continues_on_the_next_line(open_page: OpenPage, width: int) -> None:
    page = connected(open_page, width)
    answer_with(page, [({"content": "".join(CHAIN)}, CHAIN)])
    ask(page)
    tree = page.locator("#tree")
    assert tree.evaluate("one => one.scrollWidth <= one.clientWidth")
    places = tree.locator(".node").evaluate_all("all => all.map((one) => one.getBoundingClientRect().top)")
    # The root, 15 drafted tokens and the bonus.
    assert len(places) == len(CHAIN) + 1
    assert len(set(places)) > 1
    page.focus("#tree")
    for _ in CHAIN:
        page.keyboard.press("ArrowRight")
    expect(page.locator("#node-detail")).to_contain_text("after the drafted tokens")
    # A short chain needs little room.
    answer_with(page, [({"content": "Yes."}, ["Yes", "."])])
    ask(page)
    assert tree.evaluate("one => one.offsetHeight") < 80


def test_a_tree_that_is_too_wide_says_so_and_scrolls(open_page: OpenPage) -> None:
    page = connected(open_page, 360)
    set_fields(page, mode="on")
    ask(page)
    tree = page.locator("#tree")
    page.fill("#round", "0")
    expect(tree).to_have_class("tree more")
    tree.evaluate("one => { one.scrollLeft = one.scrollWidth; }")
    expect(tree).to_have_class("tree")


@pytest.mark.parametrize("width", WIDTHS)
def test_no_option_of_the_settings_is_cut(open_page: OpenPage, width: int) -> None:
    page = connected(open_page, width)
    set_fields(page)
    needed = page.locator("#mode").evaluate(
        """one => {
            const probe = document.createElement('span');
            probe.style.font = getComputedStyle(one).font;
            document.body.append(probe);
            const widths = [...one.options].map(({text}) => {
                probe.textContent = text;
                return probe.offsetWidth;
            });
            probe.remove();
            return Math.max(...widths);
        }"""
    )
    box = page.locator("#mode").bounding_box()
    assert box is not None
    # Some 45 pixels are padding and the arrow.
    assert box["width"] > needed + 45


def test_a_hint_is_shown_by_pointer_and_keyboard(page: Page) -> None:
    hint = page.get_by_role("tooltip").filter(has_text="property of the draft")
    expect(hint).to_be_hidden()
    button = page.get_by_role("button", name="Accept length")
    button.focus()
    expect(hint).to_be_visible()
    page.keyboard.press("Escape")
    expect(hint).to_be_hidden()
    button.hover()
    expect(hint).to_be_visible()


def test_a_race_says_why_its_result_differs_from_the_estimate(page: Page) -> None:
    set_fields(page, mode="auto")
    answer_with(page, [({"content": "Yes."}, ["Yes", "."])], speculation={"speedup_estimate": 1.5})
    ask(page)
    expect(page.locator("#choices-why")).to_contain_text(
        "On this server, recent drafted rounds gave 1.50 times the tokens per second of plain decoding."
    )
    expect(page.locator("#choices-why")).not_to_contain_text("race")
    page.get_by_role("tab", name="Race").click()
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator("#race-result")).not_to_be_empty()
    expect(page.locator("#choices-why")).to_contain_text("The race compares two answers only")
