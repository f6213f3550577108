"""The playground with a full context: old turns are dropped, limits shrink, and the page says so."""

from __future__ import annotations

from typing import Any

from page_steps import PROMPT, OpenPage, answer_with, ask, set_fields
from playwright.sync_api import Page, Route, expect

CHATS = "**/v1/chat/completions"
TOKENIZE = "**/tokenize"
MODELS = "**/v1/models"
CONTEXT = 1000
SHOWN = [
    "one",
    "Yes",
    "The context is full: the model no longer sees the messages above this line.",
    "two",
    "Yes",
    "three",
    "Yes",
]


def with_context(page: Page, tokens_of_message: int) -> list[dict[str, Any]]:
    """Reload the page with a small context. Return the list of the chats that the page sends from now on.

    Every message of a chat counts as `tokens_of_message` tokens.
    """

    def models(route: Route) -> None:
        reply = route.fetch()
        (model,) = reply.json()["data"]
        route.fulfill(response=reply, json={"data": [model | {"max_model_len": CONTEXT}]})

    def tokenize(route: Route) -> None:
        count = tokens_of_message * len(route.request.post_data_json["messages"])
        route.fulfill(json={"count": count, "max_model_len": CONTEXT})

    page.route(MODELS, models)
    page.route(TOKENIZE, tokenize)
    page.reload()
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    sent: list[dict[str, Any]] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if "completions" in one.url else None)
    return sent


def words(body: dict[str, Any]) -> list[str]:
    """Return the first word of each message of a chat."""
    return [message["content"].split()[0] for message in body["messages"]]


def ask_at_length(page: Page, word: str) -> None:
    """Ask a question that is so long that the page counts the tokens of the next one."""
    ask(page, f"{word} " * 100)


def test_the_oldest_turns_are_dropped_and_a_line_shows_where(page: Page) -> None:
    sent = with_context(page, 250)
    answer_with(page, [({"content": "Yes"}, ["Ye", "s"])])
    for word in ("one", "two"):
        ask_at_length(page, word)
    # Five messages need 1250 tokens. Three need 750, so that 250 new tokens still fit.
    assert words(sent[1]) == ["one", "Yes", "two"]
    assert sent[1]["max_tokens"] == 250
    expect(page.locator("#message")).to_contain_text("The context had room for 250 new tokens.")
    ask_at_length(page, "three")
    assert words(sent[2]) == ["two", "Yes", "three"]
    expect(page.locator("#message")).to_contain_text(
        "The context is full: the model no longer sees the oldest turn."
    )
    expect(page.locator("#log > *")).to_contain_text(SHOWN)
    # The line stays where it is after a reload, and the dropped turn is not sent again.
    page.reload()
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    expect(page.locator("#log > *")).to_contain_text(SHOWN)
    ask_at_length(page, "four")
    assert words(sent[3]) == ["three", "Yes", "four"]
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".dropped")).to_have_count(0)
    ask_at_length(page, "five")
    assert words(sent[4]) == ["five"]


def test_a_short_chat_is_not_counted_and_keeps_its_limit(page: Page) -> None:
    sent = with_context(page, 250)
    counted: list[str] = []
    page.on("request", lambda one: counted.append(one.url) if "tokenize" in one.url else None)
    answer_with(page, [({"content": "Yes"}, ["Ye", "s"])])
    ask(page)
    assert (sent[0]["max_tokens"], counted) == (256, [])


def test_a_prompt_that_fills_the_context_alone_is_named(page: Page) -> None:
    sent = with_context(page, CONTEXT)
    page.fill("#prompt", "long " * 200)
    page.keyboard.press("Enter")
    expect(page.locator("#message.error")).to_contain_text(
        f"The prompt is too long: it has {CONTEXT} tokens."
    )
    expect(page.locator("#prompt")).to_have_value(("long " * 200).strip())
    assert sent == []


def test_a_server_that_cannot_count_refuses_and_is_asked_again(open_page: OpenPage) -> None:
    page = open_page(may_log="Failed to load resource")
    sent = with_context(page, 10)
    page.unroute(TOKENIZE)
    page.route(TOKENIZE, lambda route: route.fulfill(status=404, json={}))
    answer_with(page, [({"content": "Yes"}, ["Ye", "s"])])
    ask(page, "one")
    refusals = ["max_tokens", "messages"]

    def refuse(route: Route) -> None:
        if not refusals:
            route.fallback()
            return
        error = {"message": "It does not fit.", "code": "context_length_exceeded", "param": refusals.pop(0)}
        route.fulfill(status=400, json={"error": error})

    page.route(CHATS, refuse)
    ask(page, "two " * 150)
    assert ["max_tokens" in body for body in sent[1:]] == [True, False, False]
    assert [len(body["messages"]) for body in sent[1:]] == [3, 3, 1]
    expect(page.locator(".dropped")).to_have_count(1)


def test_a_race_fits_into_the_context(page: Page) -> None:
    sent = with_context(page, 700)
    set_fields(page, max_tokens="990")
    answer_with(page, [({"content": "Yes"}, ["Ye", "s"])])
    page.get_by_role("tab", name="Race").click()
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator("#race-result")).not_to_be_empty()
    assert [body["max_tokens"] for body in sent] == [300, 300]
    expect(page.locator("#message")).to_have_text("The context had room for 300 new tokens.")
