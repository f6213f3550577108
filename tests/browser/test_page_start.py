"""The start of the playground, and what it keeps when the user leaves it: requests, errors, storage."""

from __future__ import annotations

import json
from typing import Any

import pytest
from page_steps import PROMPT, OpenPage, answer_with, ask, set_fields
from playwright.sync_api import Page, Route, expect
from support.services.stack import Stack

MODELS = "**/v1/models"
CHATS = "**/v1/chat/completions"


def reload_holding_models(page: Page) -> Route:
    """Reload the page, and return its request for the models, which waits."""
    routes: list[Route] = []
    page.route(MODELS, lambda route: routes.append(route), times=1)
    with page.expect_request(MODELS):
        page.reload()
    while not routes:
        page.evaluate("0")  # Playwright calls the handler of the route while it waits for the page.
    return routes[0]


@pytest.mark.parametrize("tab", ["Chat", "Race"])
def test_a_question_waits_for_the_name_of_the_model(open_page: OpenPage, stack: Stack, tab: str) -> None:
    page = open_page()
    models = reload_holding_models(page)
    page.get_by_role("tab", name=tab).click()
    sent: list[Any] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.method == "POST" else None)
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator("#message")).to_have_text("Waiting for the name of the model.")
    assert sent == []
    models.continue_()
    expect(page.locator("#race-result" if tab == "Race" else ".summary")).to_contain_text("t")
    served = page.request.get(f"{stack.base_url}/v1/models").json()["data"][0]["id"]
    assert {body["model"] for body in sent} == {served}


def test_a_question_that_waits_can_be_stopped(open_page: OpenPage) -> None:
    page = open_page()
    models = reload_holding_models(page)
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#message")).to_have_text("Stopped.")
    expect(page.locator("#prompt")).to_have_value(PROMPT)
    models.continue_()
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    expect(page.locator("#message")).to_have_text("Stopped.")
    assert ask(page)


def test_a_failed_connection_is_shown_and_tried_again(open_page: OpenPage) -> None:
    page = open_page(may_log="net::ERR_FAILED")
    reload_holding_models(page).abort()
    expect(page.locator("#message.error")).to_contain_text("does not answer")
    expect(page.locator("#server")).to_have_text("not connected")
    assert ask(page)
    expect(page.locator("#server")).to_contain_text("EAGLE3")


@pytest.mark.parametrize("tab", ["Chat", "Race"])
def test_every_refused_request_shows_its_error(open_page: OpenPage, tab: str) -> None:
    page = open_page(may_log="404")
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    reply = {"error": {"message": "The model 'x' does not exist."}}
    page.route(CHATS, lambda route: route.fulfill(status=404, json=reply))
    page.get_by_role("tab", name=tab).click()
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator("#message.error")).to_have_text("The model 'x' does not exist.")
    expect(page.locator("#prompt")).to_have_value(PROMPT)
    # The question is not part of the chat, and the page asks for the name of the model again.
    expect(page.locator(".message")).to_have_count(0)
    page.unroute(CHATS)
    page.get_by_role("tab", name="Chat").click()
    with page.expect_request(MODELS):
        ask(page)


def test_an_answer_without_text_is_reported(page: Page) -> None:
    answer_with(page, [])
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator("#message")).to_have_text("The answer is empty.")
    expect(page.locator(".message")).to_have_count(0)


def test_chat_race_and_settings_survive_another_page_and_a_reload(page: Page) -> None:
    set_fields(page, depth="3", seed="7")
    answer = ask(page)
    spans = page.locator(".message.assistant .token").count()
    page.get_by_role("tab", name="Race").click()
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator("#race-result")).not_to_be_empty()
    result = page.locator("#race-result").inner_text()
    page.fill("#prompt", "half a question")
    page.get_by_role("link", name="Status").click()
    expect(page.locator("#services")).to_contain_text("ready")
    page.go_back()
    for leave in (True, False):
        expect(page.locator("#server")).to_contain_text("EAGLE3")
        expect(page.locator("#race-result")).to_have_text(result)
        expect(page.locator("#prompt")).to_have_value("half a question")
        assert page.locator("#fast-text").inner_text() == page.locator("#slow-text").inner_text()
        values = [page.input_value(f"#{name}") for name in ("mode", "depth", "seed")]
        assert values == ["on", "3", "7"]
        page.get_by_role("tab", name="Chat").click()
        assert page.locator(".message.assistant .text").inner_text() == answer
        assert page.locator(".message.assistant .token").count() == spans
        page.get_by_role("tab", name="Race").click()
        if leave:
            page.reload()
    # The restored chat goes on, and a token of it shows its round.
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("button", name="Show its rounds").click()
    page.locator(".message.assistant .token.draft").first.click()
    expect(page.locator("#round-caption")).to_contain_text("Round 1 of")
    with page.expect_request(CHATS) as sent:
        ask(page, "And 2 more?")
    assert json.loads(sent.value.post_data or "")["messages"][1]["content"] == answer


def test_clear_empties_the_page_and_the_storage(page: Page) -> None:
    ask(page)
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#welcome")).to_be_visible()
    kept = json.loads(page.evaluate("sessionStorage.getItem('outrider-playground')"))
    assert (kept["turns"], kept["race"]) == ([], [])
    page.reload()
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    expect(page.locator("#welcome")).to_be_visible()
    assert page.input_value("#mode") == "on"
    set_fields(page)
    page.get_by_role("button", name="Default settings").click()
    assert page.input_value("#mode") == "", "the default of the server"


@pytest.mark.parametrize("kept", ["{", '{"turns": [{"question": "x", "record": {"parts": [{"ms": 1}]}}]}'])
def test_a_damaged_storage_is_ignored(page: Page, kept: str) -> None:
    page.add_init_script(f"sessionStorage.setItem('outrider-playground', {json.dumps(kept)})")
    page.reload()
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    expect(page.locator("#welcome")).to_be_visible()
    assert ask(page)


def test_a_full_storage_keeps_the_newest_answers(page: Page) -> None:
    large = "a" * 60_000
    answer_with(page, [({"content": large}, [large, "."])] * 9)
    # Such long turns would not fit into the model's context.
    page.route("**/tokenize", lambda route: route.fulfill(json={"count": 10}))
    for count in range(3):
        ask(page, f"question {count}")
    page.evaluate(
        """import('/playground/store.js').then(({loadState, saveState}) => {
            const state = loadState();
            saveState({...state, turns: Array(4).fill(state.turns).flat()});
        })"""
    )
    kept = json.loads(page.evaluate("sessionStorage.getItem('outrider-playground')"))["turns"]
    assert 0 < len(kept) < 12
    assert kept[-1]["question"] == "question 2"


def test_the_embedded_model_offers_questions_that_it_can_answer(open_page: OpenPage, stack: Stack) -> None:
    page = open_page()
    examples = page.locator("#examples button")
    expect(examples).to_have_count(4)
    examples.nth(1).click()
    expect(page.locator(".message.assistant")).to_contain_text("return a + b")
    other = open_page()
    other.route("**/server_info", lambda route: _with_other_weights(route))
    other.reload()
    expect(other.locator("#server")).to_contain_text("EAGLE3")
    expect(other.locator("#examples-row")).to_be_hidden()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("on", "Mode “on”, the default of the server, requests the same tree in every round."),
        (
            "auto",
            "Mode “auto”, the default of the server, lets the controller choose the shape of each round.",
        ),
    ],
)
def test_the_server_decides_the_mode_unless_the_user_chooses_one(
    open_page: OpenPage, mode: str, words: str
) -> None:
    page = open_page()
    page.route("**/server_info", lambda route: _with(route, speculation_mode=mode))
    page.reload()
    expect(page.locator("#mode option:checked")).to_have_text(f"default of the server: {mode}")
    answer_with(page, [({"content": "Yes"}, ["Ye", "s"])])
    with page.expect_request(CHATS) as sent:
        ask(page)
    assert json.loads(sent.value.post_data or "")["speculation"] == {"trace": True}
    expect(page.locator("#choices-why")).to_contain_text(words)
    # The stored answer keeps the mode that it had, whatever the default is later.
    page.unroute("**/server_info")
    page.route("**/server_info", lambda route: _with(route, speculation_mode="off"))
    page.reload()
    expect(page.locator("#mode option:checked")).to_have_text("default of the server: off")
    expect(page.locator("#choices-why")).to_contain_text(words)
    set_fields(page, mode="on")
    with page.expect_request(CHATS) as sent:
        ask(page)
    assert json.loads(sent.value.post_data or "")["speculation"] == {"mode": "on", "trace": True}
    expect(page.locator("#choices-why")).to_contain_text("Mode “on” requests the same tree in every round.")


def _with_other_weights(route: Route) -> None:
    _with(route, weight_version="0123456789abcdef")


def _with(route: Route, **values: str) -> None:
    """Let the server answer, with other values in its answer."""
    reply = route.fetch()
    route.fulfill(response=reply, json=reply.json() | values)
