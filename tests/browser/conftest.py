"""Fixtures of the browser tests: the embedded pair behind a gateway, and pages of headless Chromium.

`make test-browser` installs Playwright and runs these tests. Chromium is the system's own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from page_steps import OpenPage, set_fields
from playwright.sync_api import Browser, Page, expect, sync_playwright
from support.services.stack import Stack, supervised

DESKTOP = {"width": 1280, "height": 800}
TIMEOUT_MS = 30_000


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    with supervised() as running:
        yield running


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "Chromium is not installed. On Debian: apt-get install chromium"
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not start as root, and these pages come from this machine.
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Browser, stack: Stack) -> Iterator[OpenPage]:
    """Return a function that opens a page of the gateway.

    After the test, no page may have logged an error. A violation of the content policy is such an error.
    """
    contexts = []
    complaints: list[str] = []

    def open_one(path: str = "/", url: str = stack.base_url, may_log: str = "", **options: Any) -> Page:
        context = browser.new_context(**({"viewport": DESKTOP} | options))
        context.set_default_timeout(TIMEOUT_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))

        def note(message: Any) -> None:
            if message.type == "error" and not (may_log and may_log in message.text):
                complaints.append(message.text)

        page.on("console", note)
        page.goto(url + path)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def page(open_page: OpenPage) -> Page:
    """Return the connected playground, with trees in every round."""
    page = open_page()
    expect(page.locator("#server")).to_contain_text("EAGLE3")
    set_fields(page, mode="on")
    return page
