"""What `outrider top` shows: every value of the operator's page, charts, and a footer below them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from support.services.scripted_gateway import model_stats

from outrider.services.gateway.playground import pages
from outrider.services.terminal.charts import ChartHistory, bars
from outrider.services.terminal.keys import key_names
from outrider.services.terminal.scrolled import Scrolled
from outrider.services.terminal.status_panels import render


def printed(content: RenderableType, height: int = 25) -> str:
    console = Console(width=100, height=height, color_system=None)
    with console.capture() as capture:
        console.print(content)
    return capture.get()


def whole_status() -> dict[str, Any]:
    """Return a status with all fields, 16 depths and 22 errors."""
    draft = {"state": "on", "algorithm": "EAGLE3", "num_steps": 5, "topk": 4, "num_draft_tokens": 16}
    used = dict.fromkeys(
        ("weight_bytes", "kv_bytes", "process_bytes", "gpu_used_bytes", "gpu_total_bytes", "graph_bytes"),
        2**20,
    )
    auto = {"reason": "pays", "shapes": [], "plain_rows": 1, "estimated_speedup": 1.75, "round_ms": 12.5}
    target = model_stats(3) | {
        "draft": draft,
        "auto": auto,
        "resources": used
        | {
            "graphs_recorded": 1,
            "graphs_left": 0,
            "draft_transport": "ipc",
            "draft_on_device": True,
            "draft_features": ["hidden_states"],
        },
    }
    return {
        "at": 1.0,
        "version": "9.9",
        "uptime_s": 5.0,
        "draining": False,
        "gateway": {"waiting": 0, "max_queued_requests": 512, "waiting_prompt_tokens": 0},
        "model": {
            "names": ["m"],
            "device": "cpu",
            "dtype": "float32",
            "architecture": "LlamaForCausalLM",
            "max_model_len": 8192,
            "vocab_size": 128256,
            "weight_version": "main",
        },
        "target": target,
        "targets": [],
        "metrics": {
            "outrider_spec_decode_num_drafts_total": 80.0,
            "outrider_spec_decode_num_accepted_tokens_total": 120.0,
            "outrider_spec_decode_num_draft_tokens_total": 400.0,
            "outrider_verify_seconds_sum": 1.0,
            "outrider_verify_seconds_count": 100.0,
            **{f'outrider_accepted_tokens_total{{depth="{depth}"}}': 80.0 - depth for depth in range(1, 17)},
        },
        "recent": {
            "tokens": [0, 40, 80, 40],
            "running": [1, 1, 1, 1],
            "accept_length": [None, 2.0, 2.0, None],
        },
        "errors": [
            {
                "at": 1.0,
                "route": "/v1/chat/completions",
                "status": 429,
                "reason": "overloaded",
                "message": f"message {number}.",
                "request_id": f"req-{number}",
                "count": 1,
            }
            for number in range(22)
        ],
    }


def test_all_values_of_the_operators_page_are_shown() -> None:
    status = whole_status()
    text = printed(render(status, None, ChartHistory()))
    for part in (
        *("LlamaForCausalLM", "8,192 tokens", "128,256", "main"),
        *("depth 5, topk 4, 16", "120 of 400", "drafted rounds", "80 ", "hidden states"),
        *("1.75 × plain decoding", "12.5 ms"),
        *(f"depth {depth} " for depth in range(1, 17)),
        *(f"message {number}." for number in range(22)),
        *("/v1/chat/completions", "req-21"),
        *("running requests", "accept length", "KV cache in use", "draft time per round", "verify time per"),
    ):
        assert part in text, part


def test_every_card_of_the_page_has_a_panel() -> None:
    one = {"address": "a:1", "model": "m", "ready": True, "load_tokens": 9, "stats": model_stats(1)}
    text = printed(render(whole_status() | {"targets": [one, one]}, None, ChartHistory()))
    titles = re.findall(r'<h2 id="\w+-title">(.*?)</h2>', Path(pages.FOLDER, "status.html").read_text())
    assert len(titles) >= 9
    assert [title for title in titles if f" {title} ─" not in text] == []


def test_charts_show_the_last_values_of_the_gateway_and_those_since_the_start() -> None:
    before, status = whole_status(), whole_status()
    metrics = before["metrics"]
    status["metrics"] = metrics | {
        "outrider_verify_seconds_sum": metrics["outrider_verify_seconds_sum"] + 0.03,
        "outrider_verify_seconds_count": metrics["outrider_verify_seconds_count"] + 10,
    }
    history = ChartHistory()
    history.add(status, before)
    lines = printed(render(status, before, history)).splitlines()
    [speed] = [line for line in lines if "tokens/s" in line and "█" in line]
    assert "▁▅█▅" in speed
    assert "40" in speed
    [*_, verify] = [line for line in lines if "verify time per pass" in line]
    assert "3.0 ms" in verify


@pytest.mark.parametrize(
    ("values", "width", "text"),
    [
        ([], 5, ""),
        ([0, 4, 8], 5, "▁▅█"),
        ([0, None, 8], 5, "▁ █"),
        ([0, 0, 8, 8, 4], 3, "▁█▅"),
        ([None, None], 5, "  "),
        ([0, 0], 5, "▁▁"),
    ],
)
def test_bars(values: list[float | None], width: int, text: str) -> None:
    assert bars(values, width) == text


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        ("xq", ["x", "q"]),
        ("\x1b[A\x1bOBq", ["up", "down", "q"]),
        ("\x1b[5~\x1b[1;5Q", ["page up", "\x1b[1;5Q"]),
    ],
)
def test_special_keys_have_names(typed: str, keys: list[str]) -> None:
    assert key_names(typed) == keys


def test_a_short_content_leaves_the_footer_on_the_last_line() -> None:
    view = Scrolled("q quits", can_scroll=True)
    view.content, view.message = "one\ntwo", "No server answers."
    lines = printed(view, height=8).splitlines()
    assert [line.rstrip() for line in lines] == ["one", "two", *[""] * 4, "No server answers.", "q quits"]
