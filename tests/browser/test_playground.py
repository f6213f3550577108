"""The playground in a browser: chat, trees, race, settings, replay, pictures, keys, phone size, colours."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from page_steps import PROMPT, OpenPage, answer_with, ask, set_fields
from playwright.sync_api import Page, expect
from support.services.stack import DEMO_TARGET, Process, Stack, free_port

PHONE = {"width": 360, "height": 740}


def test_a_chat_colours_every_token_by_how_it_came(page: Page) -> None:
    text = ask(page)
    assert "capital" in text
    tokens = page.locator(".message.assistant .token")
    # The first token comes from the prompt's pass. In mode "on", all others come from drafted rounds.
    expect(tokens.first).to_have_class("token plain")
    assert page.locator(".message.assistant .token.draft").count() > 3
    assert page.locator(".message.assistant .token.bonus").count() > 0
    assert "".join(tokens.all_inner_texts()) == text
    tokens.nth(1).hover()
    expect(page.locator("#origin")).to_contain_text("drafted at depth 1 (round 1)")
    for name in ("speed", "accept", "draft", "verify"):
        expect(page.locator(f"#n-{name}")).not_to_have_text("–")
    expect(page.locator("#histogram")).to_have_attribute(
        "aria-label", re.compile("Rounds by accepted tokens")
    )
    expect(page.locator("#choices")).to_contain_text("depth 5")
    expect(page.locator("#choices-why")).to_contain_text("requests the same tree in every round")


def test_reasoning_is_shown_above_the_answer(page: Page) -> None:
    answer_with(
        page,
        [
            ({"reasoning_content": "So"}, ["<think>", "So"]),
            ({"reasoning_content": " 2"}, [" 2", "</think>", "\n\n"]),
            ({"content": "Two"}, ["Two", "."]),
            ({"content": "."}, None),
        ],
    )
    ask(page)
    answer = page.locator(".message.assistant .text")
    assert answer.locator(".reasoning .token").all_inner_texts() == ["So", " 2"]
    assert answer.locator("> .block > .token").all_inner_texts() == ["Two", "."]
    assert answer.locator("> :first-child").get_attribute("class") == "reasoning"
    expect(page.locator("#n-tokens")).to_have_text("7")
    # The answer alone goes back to the model. Each token has the colour of its own round.
    answer.locator("> .block > .token").first.hover()
    expect(page.locator("#origin")).to_contain_text("drafted at depth 1 (round 3)")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Why?")
    assert json.loads(sent.value.post_data or "")["messages"][1]["content"] == "Two."


def test_a_second_question_remembers_the_first(page: Page) -> None:
    first = ask(page)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And 2 more?")
    assert [one["content"] for one in json.loads(sent.value.post_data or "")["messages"]] == [
        PROMPT,
        first,
        "And 2 more?",
    ]


def test_every_round_has_a_tree_with_texts_and_probabilities(page: Page) -> None:
    ask(page)
    page.fill("#round", "0")
    expect(page.locator("#round-caption")).to_contain_text("Round 1 of")
    accepted, rejected = page.locator("#tree .node.accepted"), page.locator("#tree .node.rejected")
    assert accepted.count() > 0
    assert rejected.count() > 0
    expect(page.locator("#tree .node.bonus")).to_have_count(1)
    rejected.first.hover()
    expect(page.locator("#node-detail")).to_contain_text("probability")
    expect(page.locator("#node-detail")).to_contain_text("Rejected.")
    page.focus("#tree")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#node-detail")).to_contain_text("drafted at depth 1")
    expect(page.locator("#node-detail")).to_contain_text("Accepted.")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#node-detail")).to_contain_text("Rejected.")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#node-detail")).to_contain_text("the last token before this round")


def test_a_race_compares_speed_and_texts_of_the_same_request(page: Page) -> None:
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data) if request.method == "POST" else None)
    set_fields(page, seed="7", temperature="0.8")
    page.get_by_role("tab", name="Race").click()
    page.fill("#prompt", PROMPT)
    page.get_by_role("button", name="Race", exact=True).click()
    expect(page.locator("#race-result")).to_contain_text("times as fast. Both texts are equal")
    fast, slow = (json.loads(body or "") for body in bodies)
    assert (fast.pop("speculation")["mode"], slow.pop("speculation")["mode"]) == ("on", "off")
    assert fast == slow
    assert fast["seed"] == 7
    text = page.locator("#fast-text").inner_text()
    assert page.locator("#slow-text").inner_text() == text
    assert page.locator("#slow-text .token:not(.plain)").count() == 0
    page.get_by_role("button", name="Replay side by side").click()
    expect(page.locator("#slow-note")).to_contain_text("tokens in")
    assert page.locator("#slow-text").inner_text() == text


def test_a_race_in_the_mode_of_the_server_compares_with_plain_decoding(open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data) if request.method == "POST" else None)
    set_fields(page, max_tokens="16")
    page.get_by_role("tab", name="Race").click()
    page.fill("#prompt", PROMPT)
    page.get_by_role("button", name="Race", exact=True).click()
    expect(page.locator("#race-result")).to_contain_text("times as fast. Both texts are equal")
    fast, slow = (json.loads(body or "") for body in bodies)
    assert (fast.pop("speculation"), slow.pop("speculation")) == (
        {"trace": True},
        {"mode": "off", "trace": True},
    )
    assert fast == slow
    # In mode "off", there would be no difference that a race could show.
    set_fields(page, mode="off")
    page.fill("#prompt", PROMPT)
    page.get_by_role("button", name="Race", exact=True).click()
    expect(page.locator("#race-result")).to_contain_text(
        "Mode “off” has nothing to race against, so the first lane runs in mode “auto”."
    )


def test_settings_reach_the_request(page: Page) -> None:
    set_fields(
        page, depth="2", topk="3", max_nodes="6", temperature="0.5", top_p="0.9", seed="5", max_tokens="9"
    )
    page.fill("#system", "Be brief.")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page)
    body = json.loads(sent.value.post_data or "")
    assert body["speculation"] == {"mode": "on", "depth": 2, "topk": 3, "max_nodes": 6, "trace": True}
    assert (body["temperature"], body["top_p"], body["seed"], body["max_tokens"]) == (0.5, 0.9, 5, 9)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


def test_a_schema_gives_the_answer_its_form(page: Page) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    page.fill("#schema", "{")
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator("#message")).to_contain_text("JSON schema:")
    page.fill("#schema", json.dumps(schema))
    assert json.loads(ask(page))["size"] in ("small", "large")


def test_a_value_out_of_range_is_named_and_not_sent(page: Page) -> None:
    sent = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    set_fields(page, depth="99")
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator("#message")).to_contain_text("Depth:")
    expect(page.locator("#depth")).to_be_focused()
    assert sent == []


def test_a_saved_trace_is_opened_and_replayed(page: Page, open_page: OpenPage, tmp_path: Path) -> None:
    text = ask(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save trace").click()
    file = tmp_path / "trace.json"
    download.value.save_as(file)
    other = open_page()
    other.set_input_files("#file", file)
    answer = other.locator(".message.assistant .text")
    assert answer.inner_text() == text
    assert other.locator(".message.user .text").inner_text() == PROMPT
    rounds = len([part for part in json.loads(file.read_text())["parts"] if part["round"]])
    expect(other.locator("#round-caption")).to_contain_text(f"Round {rounds} of {rounds}")
    other.select_option("#pace", "1")
    other.get_by_role("button", name="Replay", exact=True).click()
    expect(other.locator("#play")).to_have_text("Replay")
    assert answer.inner_text() == text
    for damaged in (
        "{",
        "{}",
        json.dumps({"format": "outrider-trace/1", "messages": [], "parts": [{"ms": 1}]}),
    ):
        file.write_text(damaged)
        other.set_input_files("#file", file)
        expect(other.locator("#message.error")).not_to_be_empty()


def test_an_answer_is_saved_as_an_animated_picture(page: Page, tmp_path: Path) -> None:
    ask(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as SVG").click()
    file = tmp_path / "rounds.svg"
    download.value.save_as(file)
    root = ElementTree.fromstring(file.read_text())
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert {"animate", "text", "rect", "path"} <= tags
    assert "script" not in tags
    words = "".join(element.text or "" for element in root.iter() if element.get("textLength"))
    assert "Here are 3 countries" in words


def test_an_answer_can_be_stopped(page: Page) -> None:
    set_fields(page, mode="off", max_tokens="1500")
    # The answer is long, so that it cannot end before the click.
    page.fill("#schema", '{"type": "array", "items": {"enum": [1, 2]}, "minItems": 400}')
    page.fill("#prompt", "Count from 1 to 300, one number a line.")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .token").nth(3)).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#message")).to_have_text("Stopped.")
    expect(page.locator(".summary")).to_contain_text("(stopped)")
    set_fields(page, schema="")
    ask(page)


def test_an_error_of_the_server_is_shown_and_the_prompt_kept(open_page: OpenPage) -> None:
    page = open_page(may_log="400")
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    set_fields(page, schema='{"type": "array", "uniqueItems": true}')
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator("#message.error")).to_contain_text("uniqueItems")
    expect(page.locator("#prompt")).to_have_value(PROMPT)


def test_a_page_is_used_by_keyboard_alone(open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type(PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator(".summary")).to_have_count(1)
    expect(page.locator("#prompt")).to_be_focused()
    seen = []
    for _ in range(18):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id"))
    order = ["send", "tree", "round", "play", "save"]
    assert [name for name in seen if name in order] == order
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#panel-race")).to_be_visible()
    expect(page.locator("#tab-race")).to_be_focused()


def test_a_phone_shows_everything_in_one_column(open_page: OpenPage) -> None:
    page = open_page(viewport=PHONE)
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    ask(page)
    for tab in ("Chat", "Race"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    send = page.locator("#send").bounding_box()
    assert send is not None
    assert send["height"] >= 44


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_colours_follow_the_system_until_they_are_chosen(
    open_page: OpenPage, scheme: str, dark: bool
) -> None:
    page = open_page(color_scheme=scheme)
    is_dark = "parseInt(getComputedStyle(document.body).backgroundColor.slice(4)) < 128"
    assert page.evaluate(is_dark) is dark
    button = page.get_by_role("button", name="Colours")
    button.click()
    assert page.evaluate(is_dark) is False
    button.click()
    assert page.evaluate(is_dark) is True


def test_with_keys_the_page_asks_for_one_and_forgets_it(
    open_page: OpenPage, stack: Stack, tmp_path: Path
) -> None:
    port = free_port()
    gateway = Process(
        *("serve", "gateway", "--port", str(port), "--grpc-port", str(port + 1), "--api-key", "right"),
        *("--target", stack.target_address, "--tokenizer", str(DEMO_TARGET)),
        log=tmp_path / "gateway.log",
    )
    try:
        gateway.wait_serving(f"127.0.0.1:{port + 1}")
        page = open_page(url=f"http://127.0.0.1:{port}", may_log="401")
        refused: list[str] = []
        page.on("response", lambda one: refused.append(one.url) if one.status == 401 else None)
        key = page.get_by_label("API key")
        for given, accepted in (("wrong", False), ("right", True)):
            problem = "This key is not valid." if accepted else "This server needs an API key."
            expect(page.locator("#message")).to_have_text(problem)
            key.fill(given)
            page.get_by_role("button", name="Use this key").click()
            expect(page.locator("#server")).to_contain_text("EAGLE3" if accepted else "not connected")
        # Only the wrong key was refused, and only once. Without a key, the page sends nothing.
        assert len(refused) == 1
        expect(key).to_be_hidden()
        assert ask(page)
        status = open_page("/status", url=f"http://127.0.0.1:{port}", may_log="401")
        expect(status.locator("#message")).to_have_text("This server needs an API key.")
        status.get_by_label("API key").fill("wrong")
        status.get_by_role("button", name="Use this key").click()
        expect(status.locator("#message")).to_have_text("This key is not valid.")
        page.reload()
        expect(key).to_be_visible()
        expect(page.locator(".summary")).to_have_count(1)
        errors = page.request.get(
            f"http://127.0.0.1:{port}/status.json", headers={"Authorization": "Bearer right"}
        ).json()["errors"]
        wrong = "This key is not valid. Send one of this server's API keys."
        assert {one["message"] for one in errors} == {wrong}
        kept = page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])")
        assert "capital" in kept
        assert "right" not in kept
    finally:
        gateway.stop()
