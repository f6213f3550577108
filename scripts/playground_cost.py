"""Measures the processor time that the playground needs while an answer streams at 300 tokens per second.

`make playground-cost` runs this script. It needs the `browser` extra and Chromium, but no model. A small
server in this process serves the real files of the page, and streams invented answers:

- 60 rounds of 5 tokens per second,
- 300 rounds of one token per second,
- 60 rounds of 5 tokens per second, without a line break.

Each round has a tree of 17 nodes. The first figure of a window of 5 s is the processor time of Chromium's
renderer process, as a share of one core. The others are:

- ``tokens_shown``: the tokens on the page at the end of the window;
- ``main_thread``, of which ``script``, ``layout`` and ``style`` are parts: the time in tasks of the page, as
  a share of the elapsed time. Other work on the machine makes it larger;
- the processor time of Chromium's other processes, as shares of one core;
- ``load``: the mean number of runnable processes of the machine in the last minute. Compare figures of
  similar load, because processes share caches and clock rates.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import CDPSession, Page, sync_playwright

from outrider.bench.report.record import Result, Row, result_path, show_and_save
from outrider.services.gateway.playground.pages import HEADERS, load_files

NAME = "playground"
WINDOW_S = 5.0
START_S = 2.0
"""Time before the first window, in which the page shows the first tokens."""
NODES = 17
PARAGRAPH = 150
"""Tokens of a paragraph of the invented answer."""
WORDS = (
    "the",
    "old",
    "harbour",
    "of",
    "this",
    "town",
    "has",
    "two",
    "quays",
    "and",
    "one",
    "bright",
    "light",
)
VIEW = {"width": 1280, "height": 800}
METRICS = {
    "main_thread": "TaskDuration",
    "script": "ScriptDuration",
    "layout": "LayoutDuration",
    "style": "RecalcStyleDuration",
}
TICKS = os.sysconf("SC_CLK_TCK")
SERVER_INFO = {"speculative_algorithm": "EAGLE3", "weight_version": "invented"}


@dataclass(frozen=True, slots=True)
class StreamCase:
    """One way to stream 300 tokens per second.

    Attributes:
        name: The first part of the names of the cases.
        events: Events per second. Each event is one round.
        tokens: Tokens per round.
        paragraphs: Whether the answer has line breaks.
    """

    name: str
    events: int
    tokens: int
    paragraphs: bool = True


STREAMS = (
    StreamCase("60 rounds/s of 5 tokens", 60, 5),
    StreamCase("300 rounds/s of 1 token", 300, 1),
    StreamCase("60 rounds/s of 5 tokens, one paragraph", 60, 5, paragraphs=False),
)


def word(at: int, paragraphs: bool) -> str:
    """Return the token at position `at` of the invented answer."""
    if paragraphs and at % PARAGRAPH == PARAGRAPH - 1:
        return ".\n\n"
    return " " + WORDS[at * 7 % len(WORDS)]


def event(stream: StreamCase, number: int) -> dict[str, Any]:
    """Return the event of the round `number`: its text, and its trace with a tree of `NODES` nodes.

    All tokens of the round but the last are an accepted chain. The other nodes are rejected branches. A round
    of one token rejects its whole tree.
    """
    first = number * stream.tokens
    texts = [word(first + at, stream.paragraphs) for at in range(stream.tokens)]
    accepted = list(range(1, stream.tokens))
    depths = [0, *accepted]
    nodes = [{"token": 1, "parent": -1, "depth": 0, "logprob": 0.0, "text": " root"}]
    nodes += [
        {"token": 1, "parent": at - 1, "depth": at, "logprob": -0.1 * at, "text": texts[at - 1]}
        for at in accepted
    ]
    while len(nodes) < NODES:
        parent = len(nodes) * 7 % len(depths)
        depths.append(depths[parent] + 1)
        text = word(first + len(nodes), paragraphs=False)
        nodes.append({"token": 2, "parent": parent, "depth": depths[-1], "logprob": -3.0, "text": text})
    trace = {
        "round": number,
        "base_len": 5,
        "nodes": nodes,
        "accepted": accepted,
        "emitted": list(range(stream.tokens)),
        "emitted_text": texts,
        "draft_ms": 3.1,
        "verify_ms": 4.2,
    }
    choice = {"index": 0, "delta": {"content": "".join(texts)}, "finish_reason": None}
    return {"choices": [choice], "speculation": {"trace": [trace]}}


class Handler(BaseHTTPRequestHandler):
    """Serves the page's files, and answers every chat with the server's current stream."""

    protocol_version = "HTTP/1.1"
    files = load_files()
    stream = STREAMS[0]
    seconds = 0.0

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing, because the table of results is the output."""

    def do_GET(self) -> None:
        """Send a file of the page, or one of the JSON replies that the page requests when it starts."""
        file = self.files.get(self.path)
        if file is not None:
            self._send(file.content, file.media_type)
            return
        reply = {"/server_info": SERVER_INFO, "/v1/models": {"data": [{"id": "invented"}]}}.get(self.path, {})
        self._send(json.dumps(reply).encode(), "application/json")

    def do_POST(self) -> None:
        """Stream events at fixed times: a late event does not delay the events after it."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        with suppress(ConnectionError):  # the page closes after the last window
            self._stream()

    def _stream(self) -> None:
        start = time.monotonic()
        for number in range(int(self.seconds * self.stream.events)):
            time.sleep(max(0.0, start + number / self.stream.events - time.monotonic()))
            self._event(json.dumps(event(self.stream, number)))
        end = {"index": 0, "delta": {}, "finish_reason": "stop"}
        self._event(json.dumps({"choices": [end], "speculation": {}}))
        self._event("[DONE]")

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def _send(self, content: bytes, media_type: str) -> None:
        self.send_response(200)
        for name, value in {
            **HEADERS,
            "Content-Type": media_type,
            "Content-Length": str(len(content)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def server() -> Iterator[str]:
    """Serve the page, and yield its URL."""
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_address[1]}/"
    finally:
        running.shutdown()
        running.server_close()


def process_seconds(root: int) -> dict[str, float]:
    """Return the processor seconds of the browser's processes below `root`, summed by kind of process.

    The kinds are ``renderer``, ``gpu-process``, ``utility`` and ``browser``. Playwright's own process is left
    out.
    """
    parents: dict[int, list[int]] = {}
    times: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended
        parents.setdefault(int(fields[1]), []).append(int(folder.name))
        times[int(folder.name)] = (int(fields[11]) + int(fields[12])) / TICKS
    found: dict[str, float] = {}
    waiting = list(parents.get(root, []))
    while waiting:
        process = waiting.pop()
        waiting += parents.get(process, [])
        try:
            command = Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8").replace("\0", " ")
        except OSError:
            continue
        if "chrom" not in command.split(" ")[0]:
            continue
        kind = re.search(r"--type=(\S+)", command)
        name = kind[1] if kind else "browser"
        found[name] = found.get(name, 0.0) + times[process]
    return found


def counters(devtools: CDPSession) -> dict[str, float]:
    """Return the seconds of `METRICS` and of the browser's processes since their start, and the time now."""
    values = {one["name"]: one["value"] for one in devtools.send("Performance.getMetrics")["metrics"]}
    seconds = {name: float(values[metric]) for name, metric in METRICS.items()}
    return {**seconds, **process_seconds(os.getpid()), "now": time.monotonic()}


def watch(page: Page, url: str, stream: StreamCase, windows: int) -> Iterator[Row]:
    """Ask once, and yield a row for each window while the answer streams."""
    Handler.stream, Handler.seconds = stream, START_S + windows * WINDOW_S + 3
    page.goto(url)
    page.locator("#server", has_text="EAGLE3").wait_for()
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable")
    page.fill("#prompt", "Tell me about the harbour.")
    page.keyboard.press("Enter")
    time.sleep(START_S)
    before = counters(devtools)
    for window in range(windows):
        time.sleep(WINDOW_S)
        after = counters(devtools)
        elapsed = after["now"] - before["now"]
        share = {
            name: round((after[name] - before.get(name, 0.0)) / elapsed, 3) for name in after if name != "now"
        }
        more = {
            "tokens_shown": int(page.locator("#n-tokens").inner_text()),
            "tokens_per_s": float(page.locator("#n-speed").inner_text()),
            **share,
            "load": round(os.getloadavg()[0], 2),
        }
        yield Row(f"{stream.name}, window {window + 1}", more.pop("renderer"), "core", more=more)
        before = after


def main() -> int:
    """Measure every stream, print a table and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=5, help="windows of 5 s for each stream (default: 5)")
    parser.add_argument(
        "--output", type=Path, help="the JSON file, or its folder (default: a new file in bench-results)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the JSON file if it exists")
    options = parser.parse_args()
    path = result_path(options.output, NAME, "cpu")
    if path.exists() and not options.force:
        parser.error(f"{path} exists. Choose another file with --output, or pass --force to overwrite it.")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        parser.error("Chromium is not installed. On Debian: apt-get install chromium")
    rows: list[Row] = []
    with server() as url, sync_playwright() as playwright:
        for stream in STREAMS:
            # Chromium's own sandbox does not start as root, and the page comes from this process.
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            version = browser.version
            rows += watch(browser.new_page(viewport=VIEW), url, stream, options.windows)
            browser.close()
    settings = {"device": "cpu", "window_s": WINDOW_S, "nodes": NODES, "chromium": version, "view": VIEW}
    command = ["scripts/playground_cost.py", *sys.argv[1:]]
    result = Result(NAME, settings, rows, {"command": command}, "share of one core at 300 tokens/s")
    return show_and_save(result, path, ("tokens_shown", *METRICS, "gpu-process", "load"))


if __name__ == "__main__":
    sys.exit(main())
