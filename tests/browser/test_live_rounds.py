"""The live drawing of rounds: each one in its turn, and a note if they come too fast."""

from __future__ import annotations

import re

from page_steps import answer_with, ask
from playwright.sync_api import Page, expect

RECORD_CAPTIONS = """() => {
    window.captions = [];
    const caption = document.getElementById('round-caption');
    const note = () => window.captions.push(caption.textContent);
    new MutationObserver(note).observe(caption, { childList: true });
}"""


def drawn(page: Page) -> list[int]:
    """Return the numbers of the rounds that were drawn, in their order."""
    numbers = [re.match(r"Round (\d+) of", one) for one in page.evaluate("window.captions")]
    return [int(one[1]) for one in numbers if one]


def test_every_round_is_drawn_while_the_page_keeps_up(page: Page) -> None:
    page.evaluate(RECORD_CAPTIONS)
    ask(page)
    rounds = int((page.locator("#n-rounds").text_content() or "").rpartition(" of ")[2])
    assert rounds > 5
    expect(page.locator("#round-caption")).to_contain_text(f"Round {rounds} of {rounds}")
    assert list(dict.fromkeys(drawn(page))) == list(range(1, rounds + 1))
    expect(page.locator("#left-out")).to_be_hidden()


def test_rounds_that_come_too_fast_are_thinned_out_and_counted(page: Page) -> None:
    page.evaluate(RECORD_CAPTIONS)
    answer_with(page, [({"content": f" {at}"}, [f" {at}"]) for at in range(300)])
    ask(page)
    expect(page.locator("#round-caption")).to_contain_text("Round 300 of 300")
    shown = list(dict.fromkeys(drawn(page)))
    assert 15 < len(shown) < 300
    assert shown == sorted(shown)
    expect(page.locator("#left-out")).to_contain_text(f"{len(shown)} of 300 were drawn")
    # A choice of the user ends the live drawing.
    answer_with(page, [({"content": f" {at}"}, [f" {at}"]) for at in range(30)])
    ask(page)
    page.fill("#round", "3")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    expect(page.locator("#round-caption")).to_contain_text("Round 4 of 30")
    expect(page.locator("#left-out")).to_be_hidden()
