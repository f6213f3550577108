"""Long answers: the page changes only their last block, follows their end, and copies their exact text."""

from __future__ import annotations

from typing import Any

import pytest
from page_steps import answer_with, ask
from playwright.sync_api import Page, expect

LINES = ["".join(f" word{at}" for at in range(line * 20, line * 20 + 20)) + ".\n" for line in range(40)]
EVENTS = [({"content": text}, [*(f" {word}" for word in text[:-2].split()), ".\n"]) for text in LINES]
GROW = """async ([texts, batch]) => {
    const { appendPieces } = await import('/playground/tokens.js');
    const answer = document.querySelector('.message.assistant .text');
    answer.replaceChildren();
    const changes = [];
    for (let at = 0; at < texts.length; at += batch) {
        const watched = new MutationObserver(() => {});
        for (const block of [...answer.children].slice(0, -1)) {
            watched.observe(block, { attributes: true, childList: true, characterData: true, subtree: true });
        }
        const pieces = texts.slice(at, at + batch)
            .map((text) => ({ text, origin: 'draft', depth: 1, round: at, reasoning: false }));
        appendPieces(answer, pieces);
        changes.push(...watched.takeRecords().map((one) => one.type));
        watched.disconnect();
    }
    return {
        changes,
        text: answer.textContent,
        blocks: [...answer.children].map((block) => block.children.length),
        starts: [...answer.children].map((block) => block.textContent[0]),
    };
}"""
DISTANCE = "one => one.scrollHeight - one.scrollTop - one.clientHeight"


def grow(page: Page, texts: list[str], batch: int = 35) -> dict[str, Any]:
    """Ask for a short answer, and replace its text by `texts` in batches.

    Returns the changes of earlier blocks, the text, and the size and the first character of each block.
    """
    answer_with(page, [({"content": "Yes."}, ["Yes", "."])])
    ask(page)
    grown: dict[str, Any] = page.evaluate(GROW, [texts, batch])
    return grown


def test_later_tokens_do_not_touch_earlier_blocks(page: Page) -> None:
    texts = [f" word{at}" if at % 20 else ".\n" for at in range(2000)]
    grown = grow(page, texts)
    assert grown["changes"] == []
    assert grown["text"] == "".join(texts)
    assert len(grown["blocks"]) > 10
    assert max(grown["blocks"]) < 150


def test_a_very_long_paragraph_continues_in_a_new_block_at_a_line_break(page: Page) -> None:
    texts = [f" word{at}" for at in range(3000)]
    grown = grow(page, texts)
    assert grown["changes"] == []
    assert grown["text"] == "".join(texts)
    assert len(grown["blocks"]) > 2
    assert max(grown["blocks"]) < 1000
    # The blank before the first word of a line stays at the end of the line before.
    assert grown["starts"][1:] == ["w"] * (len(grown["blocks"]) - 1)
    widths = page.locator(".message.assistant .block").evaluate_all(
        """all => all.slice(0, -1).map((block) => {
            const range = document.createRange();
            range.selectNodeContents(block.lastElementChild.previousElementSibling);
            return block.getBoundingClientRect().right - range.getBoundingClientRect().right;
        })"""
    )
    # The last line of each block is as full as a word allows.
    assert max(widths) < 100


def test_tokens_of_every_block_show_their_origin_and_their_round(page: Page) -> None:
    answer_with(page, EVENTS)
    ask(page)
    assert page.locator(".message.assistant .block").count() > 3
    page.locator(".token", has_text="word1").first.hover()
    expect(page.locator("#origin")).to_contain_text("“ word1” was drafted at depth 2 (round 1).")
    page.locator(".token", has_text="word799").click()
    expect(page.locator("#round-caption")).to_contain_text("Round 40 of 40")
    page.locator(".token", has_text="word0").first.click()
    expect(page.locator("#round-caption")).to_contain_text("Round 1 of 40")


def test_a_copy_has_the_exact_text_of_the_answer(page: Page) -> None:
    answer_with(page, [({"reasoning_content": "So"}, ["So"]), *EVENTS])
    ask(page)
    copied = page.locator(".message.assistant .text").evaluate(
        """one => {
            getSelection().selectAllChildren(one);
            const event = new ClipboardEvent('copy', {
                clipboardData: new DataTransfer(), bubbles: true, cancelable: true,
            });
            one.dispatchEvent(event);
            return event.clipboardData.getData('text/plain');
        }"""
    )
    assert copied == "So\n\n" + "".join(LINES)


@pytest.mark.parametrize("stays", [True, False], ids=["at the end", "scrolled up"])
def test_the_log_follows_the_end_unless_the_user_scrolls_up(page: Page, stays: bool) -> None:
    answer_with(page, EVENTS)
    ask(page)
    log = page.locator("#log")
    page.wait_for_function(f"({DISTANCE})(document.getElementById('log')) < 2")
    place = log.evaluate(
        """async (one, stays) => {
            const { appendPieces } = await import('/playground/tokens.js');
            const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
            if (!stays) one.scrollTop = 0;
            await frame();
            await frame();
            const before = one.scrollHeight;
            const piece = { text: ' more\\n', origin: 'plain', depth: 0, round: 0 };
            appendPieces(one.querySelector('.assistant .text'), Array(100).fill(piece));
            await frame();
            await frame();
            return { top: one.scrollTop, rest: one.scrollHeight - one.scrollTop - one.clientHeight,
                grown: one.scrollHeight - before };
        }""",
        stays,
    )
    assert place["grown"] > 1000
    if stays:
        assert place["rest"] < 2
    else:
        assert place["top"] == 0
