"""Steps that several browser tests share: filling the settings, and asking a question."""

from __future__ import annotations

from collections.abc import Callable

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
