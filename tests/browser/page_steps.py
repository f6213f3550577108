"""Steps that several browser tests share: filling the settings, and asking a question."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from playwright.sync_api import Page, expect

PROMPT = "List 3 countries and their capitals."

OpenPage = Callable[..., Page]


def set_fields(page: Page, **values: str) -> None:
    """Fill fields of the settings."""
    if not page.locator("#settings").is_visible():
        page.get_by_text("Settings", exact=True).click()
    for name, value in values.items():
        if name == "mode":
            page.select_option("#mode", value)
        else:
            page.fill(f"#{name}", value)


def ask(page: Page, prompt: str = PROMPT) -> str:
    """Send a prompt, wait for the end of the answer, and return its text."""
    answers = page.locator(".summary").count()
    page.fill("#prompt", prompt)
    page.keyboard.press("Enter")
    expect(page.locator(".summary")).to_have_count(answers + 1)
    return page.locator(".message.assistant .text").last.inner_text()


def answer_with(
    page: Page,
    events: Sequence[tuple[dict[str, str], list[str] | None]],
    *,
    cut: int = 0,
    speculation: dict[str, Any] | None = None,
) -> None:
    """Answer all chats of the page with one delivery of several events.

    Args:
        page: The playground.
        events: For each event, its delta, and the texts of its round's tokens or None.
        cut: Number of tokens of the last event's round that come after the end of the answer.
        speculation: Statistics in the last event.
    """
    lines = []
    for at, (delta, texts) in enumerate(events):
        event: dict[str, Any] = {"choices": [{"delta": delta, "finish_reason": None}]}
        if texts is not None:
            event["speculation"] = {"trace": [_round(texts, cut if at == len(events) - 1 else 0)]}
        lines.append(f"data: {json.dumps(event)}\n\n")
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}], "speculation": speculation}
    body = "".join([*lines, f"data: {json.dumps(end)}\n\n", "data: [DONE]\n\n"])
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )


def _round(texts: list[str], cut: int) -> dict[str, Any]:
    """Return a traced round that drafted a chain and accepted all of it. The last text is the bonus.

    The round emits all texts except the last `cut`.
    """
    nodes = [
        {"token": at, "parent": at - 1, "depth": at, "logprob": -0.1, "text": text}
        for at, text in enumerate(["", *texts[:-1]])
    ]
    accepted = list(range(1, len(nodes)))
    emitted = list(range(1, len(texts) + 1 - cut))
    fixed = {"round": 1, "base_len": 5, "draft_ms": 1.0, "verify_ms": 2.0}
    return fixed | {
        "nodes": nodes,
        "accepted": accepted,
        "emitted": emitted,
        "emitted_text": texts[: len(texts) - cut],
    }
