"""The controller's choice and its reason in words: for answers in mode `auto`, and on the status page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
from page_steps import OpenPage, answer_with, ask, set_fields
from playwright.sync_api import Page, expect
from support.services.stack import Stack

WORDS = re.compile(
    r"Last decision: (\d+ × [a-z ]+.*|nothing yet), "
    r"because (drafting is|plain decoding is|it is trying|it has not)"
)


def test_an_answer_in_mode_auto_says_what_was_chosen_and_why(
    open_page: OpenPage, page: Page, stack: Stack
) -> None:
    set_fields(page, mode="auto")
    ask(page)
    why = page.locator("#choices-why")
    expect(why).to_have_text(WORDS)
    # Every round of the answer has a reason.
    counts = re.findall(r"\((\d+) rounds?\)", why.text_content() or "")
    assert sum(map(int, counts)) == int(
        (page.locator("#n-rounds").text_content() or "").rpartition(" of ")[2]
    )
    # The status page shows the same decision.
    auto = httpx.get(f"{stack.base_url}/server_info").json()["internal_states"][0]["auto"]
    assert httpx.get(f"{stack.base_url}/status.json").json()["target"]["auto"] == auto
    status = open_page("/status")
    reason = (why.text_content() or "").partition("because ")[2].partition(".")[0]
    expect(status.locator("#auto")).to_contain_text(reason)
    # A reload keeps the decision of the answer.
    page.reload()
    expect(why).to_have_text(WORDS)


def test_every_round_without_a_draft_is_counted_with_its_reason(page: Page, tmp_path: Path) -> None:
    set_fields(page, mode="off")
    ask(page)
    expect(page.locator("#round-caption")).to_contain_text(
        "no draft (the request turned drafting off), 1 emitted"
    )
    # The same rounds in mode `on`, as if the draft had gone.
    with page.expect_download() as download:
        page.get_by_role("button", name="Save trace").click()
    file = tmp_path / "trace.json"
    download.value.save_as(file)
    trace = json.loads(file.read_text())
    trace["settings"]["speculation"]["mode"] = "on"
    rounds = [part["round"] for part in trace["parts"] if part["round"]]
    for at, one in enumerate(rounds):
        one["reason"] = ("late", "backing_off", "")[min(at, 2)]
    file.write_text(json.dumps(trace))
    page.set_input_files("#file", file)
    why = page.locator("#choices-why")
    expect(why).to_contain_text("Mode “on” requests the same tree in every round.")
    expect(why).to_contain_text(f"{len(rounds)} of {len(rounds)} rounds had no draft")
    expect(why).to_contain_text("the draft answered too late (1 round)")
    expect(why).to_contain_text("the target waited before it asked again (1 round)")
    expect(why).to_contain_text(f"without a reason ({len(rounds) - 2} rounds)")


def test_rounds_without_a_draft_are_explained_in_words(page: Page) -> None:
    set_fields(page, mode="auto")
    one_round = [({"content": "Yes"}, ["Yes"])]
    answer_with(page, one_round, speculation={"fallback_reason": "late"})
    ask(page)
    why = page.locator("#choices-why")
    expect(why).to_contain_text(
        "1 of 1 rounds had no draft. In at least one of them, the draft answered too late."
    )
    answer_with(page, one_round, speculation={"fallback_reason": None})
    ask(page)
    expect(why).to_contain_text("In these rounds, the controller chose plain decoding.")
    set_fields(page, mode="off")
    answer_with(page, one_round, speculation={"fallback_reason": "user"})
    ask(page)
    expect(why).to_have_text("Mode “off” decodes plainly.")
