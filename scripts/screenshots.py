"""Takes the pictures of the playground and of the operator's page for the documentation.

`make screenshots` starts the embedded pair (target and draft in one process) and runs this script.
The pictures are stored without loss, but smaller than the browser writes them.
`python scripts/screenshots.py URL` takes the pictures from a running server. Both commands need the `browser`
extra and Chromium. The animated picture is the file that the playground's save button produces.
"""

from __future__ import annotations

import shutil
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

from outrider.services.hub.pair import demo_name
from outrider.services.stack.launch import free_port, running_stack
from outrider.services.stack.options import StackOptions

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
PROMPT = "List 3 countries and their capitals."
DESKTOP = {"width": 1360, "height": 860}
PHONE = {"width": 390, "height": 844}
WAIT_MS = 60_000
RACES = 5
PNG_HEADER = b"\x89PNG\r\n\x1a\n"


def chromium_path() -> str:
    """Return the path of the system's Chromium.

    Raises:
        SystemExit: If Chromium is not installed.
    """
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        sys.exit("Chromium is not installed. On Debian: apt-get install chromium")
    return path


def shrink(path: Path) -> None:
    """Compress a PNG file of 8-bit RGB or RGBA pixels again, without row filters, and keep the smaller file.

    Pages consist of flat colours, which deflate best without filters. Browsers use filters to save time.
    """
    data = path.read_bytes()
    at, chunks = len(PNG_HEADER), []
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        chunks.append((kind, data[at + 8 : at + 8 + size]))
        at += 12 + size
    width, height, _, colours = struct.unpack(">IIBB", chunks[0][1][:10])
    pixel = {2: 3, 6: 4}[colours]
    packed = zlib.decompress(b"".join(body for kind, body in chunks if kind == b"IDAT"))
    rows = np.frombuffer(packed, np.uint8).reshape(height, 1 + width * pixel)
    above, plain = np.zeros((width, pixel), np.int32), []
    for row in rows:
        above = _unfilter(int(row[0]), row[1:].reshape(width, pixel).astype(np.int32), above)
        plain.append(b"\0" + above.astype(np.uint8).tobytes())
    small = PNG_HEADER
    for kind, body in [chunks[0], (b"IDAT", zlib.compress(b"".join(plain), 9)), (b"IEND", b"")]:
        small += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    if len(small) < len(data):
        path.write_bytes(small)


def _unfilter(kind: int, row: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Return the pixels of a row that PNG's filter `kind` has encoded. `above` are those of the row above."""
    if kind == 0:
        return row
    if kind == 1:
        return np.cumsum(row, axis=0) & 255
    if kind == 2:
        return (row + above) & 255
    pixels = np.zeros_like(row)
    left = corner = np.zeros(row.shape[1], np.int32)
    for x, up in enumerate(above):
        guess = (left + up) >> 1
        if kind == 4:
            to_left, to_up, to_corner = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
            nearest = np.where(to_up <= to_corner, up, corner)
            guess = np.where((to_left <= to_up) & (to_left <= to_corner), left, nearest)
        left = pixels[x] = (row[x] + guess) & 255
        corner = up
    return pixels


def open_chat(page: Page, url: str) -> None:
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
    """Run races in mode auto until the controller has measured this machine, and show the last one."""
    page.click("#tab-race")
    page.locator("summary").click()
    page.select_option("#mode", "auto")
    page.locator("summary").click()
    for _ in range(RACES):
        page.fill("#prompt", PROMPT)
        page.keyboard.press("Enter")
        page.locator("#send").wait_for(timeout=WAIT_MS)
    page.locator("#race-result:not(:empty)").wait_for(timeout=WAIT_MS)


def main(url: str) -> None:
    """Write all pictures."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        # The operator's page is opened first, because some of its charts begin at that time.
        status = browser.new_page(viewport=DESKTOP, color_scheme="light")
        status.goto(f"{url}/status")
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=DESKTOP, color_scheme=scheme, device_scale_factor=1)
            open_chat(page, url)
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
        open_chat(page, url)
        show_round(page, 2)
        page.screenshot(path=IMAGES / "playground-phone.png", full_page=True)
        page.close()
        other = browser.new_page()
        for _ in range(3):
            open_chat(other, url)
        status.locator(".chart .line[d*='L']").first.wait_for(state="attached")
        status.screenshot(path=IMAGES / "status.png", full_page=True)
        browser.close()
    for name in ("playground-light", "playground-dark", "playground-phone", "race", "status"):
        shrink(IMAGES / f"{name}.png")


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
