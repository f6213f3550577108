"""What `outrider top` shows of several targets and of times."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.services.scripted_gateway import model_stats

from outrider.services.gateway.playground import pages
from outrider.services.terminal.status_panels import render, short_duration


def shown(targets: list[dict[str, Any]], metrics: dict[str, float] | None = None) -> str:
    answering = [one["stats"] for one in targets if one["stats"]]
    status = {
        "at": 1.0,
        "version": "9.9",
        "uptime_s": 5.0,
        "draining": False,
        "gateway": {
            "waiting": 0,
            "max_queued_requests": 512,
            "waiting_prompt_tokens": 1234,
            "speculation_mode": "off",
        },
        "model": {"names": ["m"], "device": "cpu", "dtype": "float32"} if answering else None,
        "target": answering[0] if answering else None,
        "targets": targets,
        "metrics": metrics or {},
        "errors": [],
    }
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(render(status))
    return capture.get()


def test_each_target_has_a_line() -> None:
    up = {"address": "10.0.0.1:7001", "model": "m", "ready": True, "load_tokens": 9, "stats": model_stats(3)}
    down = {"address": "10.0.0.2:7001", "model": None, "ready": False, "load_tokens": 0, "stats": None}
    text = shown([up, down])
    assert "1 of 2 ready" in text
    [line] = [line for line in text.splitlines() if "10.0.0.1:7001" in line]
    assert all(part in line for part in ("m", "ready", "3 of 16", "25 %", "2.50"))
    assert line.count("ready") == 2  # the target and its draft
    [line] = [line for line in text.splitlines() if "10.0.0.2:7001" in line]
    assert "not ready" in line


def test_one_target_needs_no_list() -> None:
    one = {"address": "10.0.0.1:7001", "model": "m", "ready": True, "load_tokens": 9, "stats": model_stats(3)}
    assert "10.0.0.1:7001" not in shown([one])


def test_services_have_times_and_lost_connections() -> None:
    draft = {"state": "draft_down", "algorithm": "EAGLE3", "uptime_s": None, "connections_lost": 2}
    one = {"address": "a:1", "model": "m", "ready": True, "load_tokens": 9, "connections_lost": 1}
    text = shown([one | {"stats": model_stats(3) | {"uptime_s": 185.0, "draft": draft}}])
    assert all(part in text for part in ("target up for", "3 min", "target 1 ×, draft 2 ×"))
    assert "does not answer" in text
    assert "draft_down" not in text
    assert "lost connections" in shown([one | {"ready": False, "stats": None}])


def test_names_and_numbers_have_the_form_of_the_page() -> None:
    """Each name is also a name on the page (`status.js`), where it begins with a capital letter."""
    one = {"address": "a:1", "model": "m", "ready": True, "load_tokens": 9}
    busy = model_stats(3) | {"uptime_s": 185.0, "kv_pages": {"total": 5000, "free": 1000, "held": 0}}
    metrics = {
        'outrider_kv_cache_tokens{kind="committed"}': 23456.0,
        "outrider_num_preemptions_total": 1024.0,
        "outrider_generation_tokens_total": 1_234_567.0,
    }
    text = shown([one | {"stats": busy}], metrics)
    page = Path(pages.FOLDER, "status.js").read_text()
    for name, value in (
        ("gateway up for", "5 s"),
        ("target up for", "3 min"),
        ("draft up for", "–"),
        ("lost connections", "none"),
        ("waiting in the target", "1"),
        ("waiting in the gateway", "0 of 512"),
        ("prompt tokens waiting", "1,234"),
        ("generated tokens", "1,234,567"),
        ("pages in use", "4,000 of 5,000"),
        ("committed tokens", "23,456"),
        ("retractions", "1,024"),
        ("speed-up of recent drafted rounds", "–"),
        ("mode of requests that name none", "off"),
        ("draft time per round", "–"),
        ("verify time per pass", "–"),
    ):
        assert re.search(rf"{name} +{value} ", text), (name, text)
        assert f"'{name.capitalize()}'" in page


def test_memory_graphs_transport_and_the_decision_are_shown() -> None:
    used: dict[str, Any] = {
        "weight_bytes": 3 * 2**30,
        "kv_bytes": 5 * 2**29,
        "process_bytes": 200 * 2**20,
        "gpu_used_bytes": 40 * 2**30,
        "gpu_total_bytes": 80 * 2**30,
        "graphs_recorded": 31,
        "graph_bytes": 2**28,
        "graphs_left": 4,
        "draft_transport": "ipc",
        "draft_on_device": True,
        "draft_features": [],
    }
    auto = {
        "reason": "pays",
        "shapes": [{"depth": 3, "topk": 1, "max_nodes": 4, "rows": 2}],
        "plain_rows": 1,
    }
    one = {"address": "a:1", "model": "m", "ready": True, "load_tokens": 9}
    metrics = {
        'outrider_draft_fallback_total{reason="late"}': 4.0,
        'outrider_draft_fallback_total{reason="budget"}': 0.0,
        "outrider_spec_decode_num_drafts_total": 8.0,
        'outrider_accepted_tokens_total{depth="1"}': 6.0,
        'outrider_accepted_tokens_total{depth="2"}': 1.0,
        'outrider_drafted_rounds_total{depth="1"}': 8.0,
        'outrider_drafted_rounds_total{depth="2"}': 4.0,
        "outrider_estimated_speedup": 1.5,
    }
    text = shown([one | {"stats": model_stats(3) | {"resources": used, "auto": auto}}], metrics)
    sizes = ("3.0 GiB", "2.5 GiB", "200.0 MiB", "40.0 GiB of 80.0 GiB", "256.0 MiB")
    assert all(part in text for part in (*sizes, "31 recorded, 4 left", "IPC, on the device"))
    without_gpu = used | {"gpu_used_bytes": 0, "gpu_total_bytes": 0}
    on_cpu = shown([one | {"stats": model_stats(3) | {"resources": without_gpu, "auto": auto}}])
    assert "IPC" in on_cpu
    assert "on the device" not in on_cpu
    assert "2 × chain of 3, 1 × plain decoding" in text
    assert "drafting is estimated to be faster than plain decoding" in text
    assert "the draft answered too late (4)" in text
    assert "no room" not in text
    assert all(part in text for part in ("depth 1", "75.0 %", "depth 2", "25.0 %", "1.50 ×"))


def test_without_any_answer_this_is_said() -> None:
    down = {"address": "a:1", "model": None, "ready": False, "load_tokens": 0, "stats": None}
    text = shown([down, down])
    assert "No target answers." in text
    assert re.search(r"draft +unknown ", text)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (428.6, "7 min"),
        (3599, "59 min"),
        (3600, "1 h 0 min"),
        (47 * 3600 + 59 * 60, "47 h 59 min"),
        (52 * 3600, "2 d 4 h"),
    ],
)
def test_times_are_in_words(seconds: float, words: str) -> None:
    """The operator's page writes times in the same form (`duration` in `status.js`)."""
    assert short_duration(seconds) == words
