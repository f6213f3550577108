"""GuideLLM benchmarks the server, as the command that its manual shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.services.stack import DEMO_TARGET, Stack

GUIDELLM = str(Path(sys.executable).parent / "guidellm")


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_benchmark_completes_every_request(stack: Stack, tmp_path: Path, route: str) -> None:
    report = tmp_path / "report.json"
    command = [
        *(GUIDELLM, "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={stack.base_url},request_format={route}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", "kind=max_requests,count=4"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
        *("--tokenizer", f"kind=huggingface_auto,model={DEMO_TARGET}"),
        *("--output", f"kind=json,path={report}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {
        "successful": 4,
        "errored": 0,
        "incomplete": 0,
        "total": 4,
    }
    for request in benchmark["requests"]["successful"]:
        assert request["output_metrics"]["text_tokens"] == 16
