"""Files of traces: incomplete ones, and pictures of long answers."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from page_steps import answer_with, ask
from playwright.sync_api import Page, expect


def saved(page: Page, button: str, path: Path) -> Path:
    """Save a file of the page."""
    with page.expect_download() as download:
        page.get_by_role("button", name=button).click()
    download.value.save_as(path)
    return path


def test_a_trace_without_times_and_probabilities_is_drawn(page: Page, tmp_path: Path) -> None:
    ask(page)
    file = saved(page, "Save trace", tmp_path / "trace.json")
    trace = json.loads(file.read_text())
    for part in trace["parts"]:
        if part["round"]:
            for name in ("verify_ms", "draft_ms", "reason"):
                part["round"].pop(name, None)
            for node in part["round"]["nodes"]:
                del node["logprob"]
    file.write_text(json.dumps(trace))
    page.set_input_files("#file", file)
    expect(page.locator("#message")).to_contain_text("Opened trace.json")
    expect(page.locator("#round-caption")).not_to_contain_text("verify")
    expect(page.locator("#n-verify")).to_have_text("–")
    page.fill("#round", "0")
    expect(page.locator("#round-caption")).to_contain_text("Round 1 of")
    # A tree without depths cannot be drawn.
    part = next(one for one in trace["parts"] if one["round"])
    del part["round"]["nodes"][0]["depth"]
    file.write_text(json.dumps(trace))
    page.set_input_files("#file", file)
    expect(page.locator("#message.error")).to_contain_text("damaged")


def test_a_picture_of_a_long_answer_says_what_it_leaves_out(page: Page, tmp_path: Path) -> None:
    for rounds, words in ((96, "first 40 of 96 rounds"), (3, "")):
        answer_with(page, [({"content": f" {at}"}, [f" {at}"]) for at in range(rounds)])
        ask(page)
        root = ElementTree.fromstring(saved(page, "Save as SVG", tmp_path / "one.svg").read_text())
        captions = [one.text for one in root.iter() if one.get("class") == "caption"]
        shown = "".join(one.text or "" for one in root.iter() if one.get("textLength"))
        if words:
            expect(page.locator("#message")).to_contain_text(f"The picture shows the {words}")
            assert captions[-1] == words
            assert shown.endswith(" 39 …")
            assert words in (root.get("aria-label") or "")
        else:
            expect(page.locator("#message")).to_contain_text("The picture shows all rounds")
            assert shown == " 0 1 2"
