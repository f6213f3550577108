"""Takes the pictures of the playground and of the operator's page for the documentation.

`make screenshots` starts the embedded pair (target and draft in one process) and runs this script.
`python scripts/screenshots.py URL` takes the pictures from a running server. Both commands need the `browser`
extra and Chromium. The animated picture is the file that the playground's save button produces.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from outrider.services.hub.pair import demo_name
from outrider.services.stack.launch import free_port, running_stack
from outrider.services.stack.options import StackOptions

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
PROMPT = "List 3 countries and their capitals."
DESKTOP = {"width": 1360, "height": 860}
PHONE = {"width": 390, "height": 844}
WAIT_MS = 60_000


def chromium_path() -> str:
    """Return the path of the system's Chromium.

    Raises:
        SystemExit: If Chromium is not installed.
    """
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        sys.exit("Chromium is not installed. On Debian: apt-get install chromium")
    return path


def chat(page: Page, url: str) -> None:
    """Open the playground and wait for one complete answer."""
    page.goto(url)
    page.locator("#server", has_text="·").wait_for()
    page.locator("summary").click()
    page.select_option("#mode", "on")
    page.locator("summary").click()
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    page.wait_for_selector(".summary", timeout=WAIT_MS)


def show_round(page: Page, number: int) -> None:
    """Show the round `number`, counted from 1, and select the first drafted node of this round."""
    page.fill("#round", str(number - 1))
    page.focus("#tree")
    page.keyboard.press("ArrowRight")


def race(page: Page) -> None:
    """Run one race to its end."""
    page.click("#tab-race")
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    page.locator("#race-result:not(:empty)").wait_for(timeout=WAIT_MS)


def main(url: str) -> None:
    """Write all pictures."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=DESKTOP, color_scheme=scheme, device_scale_factor=1)
            chat(page, url)
            show_round(page, 2)
            page.screenshot(path=IMAGES / f"playground-{scheme}.png")
            if scheme == "light":
                with page.expect_download() as download:
                    page.click("#save-svg")
                download.value.save_as(IMAGES / "rounds.svg")
                race(page)
                page.screenshot(path=IMAGES / "race.png")
            page.close()
        page = browser.new_page(viewport=PHONE, color_scheme="light")
        chat(page, url)
        show_round(page, 2)
        page.screenshot(path=IMAGES / "playground-phone.png", full_page=True)
        page.close()
        page = browser.new_page(viewport=DESKTOP, color_scheme="light")
        page.goto(f"{url}/status")
        other = browser.new_page()
        for _ in range(3):
            chat(other, url)
        page.locator(".chart .line[d*='L']").first.wait_for(state="attached")
        page.screenshot(path=IMAGES / "status.png")
        browser.close()


def serve_and_run() -> None:
    """Start the embedded pair on the CPU, and take the pictures from this server."""
    options = StackOptions(model_id=demo_name(None), device="cpu", port=free_port(), log_level="warning")
    with running_stack(options, lambda name, line: print(f"{name} | {line}"), print) as stack:
        main(stack.url)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1].rstrip("/"))
    else:
        serve_and_run()
