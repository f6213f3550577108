"""Values that `outrider up` refuses before it starts anything, each by the flag that was typed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.services import cli
from outrider.services.launch import StackOptions
from outrider.services.option_checks import check_values
from outrider.shared.base.errors import ConfigurationError


@pytest.mark.parametrize(
    ("options", "flag", "message"),
    [
        ({"port": 99999}, "--port", "--port must be between 1 and 65534, not 99999"),
        ({"port": 65535}, "--port", "gRPC listens on the port after it"),
        ({"port": 0}, "--port", "not 0"),
        ({"port": -1}, "--port", "not -1"),
        ({"dtype": "int8"}, "--dtype", "--dtype must be one of auto, float32, bfloat16, float16, not int8"),
        ({"device": "gpu"}, "--device", "--device must be auto, cpu, cuda or cuda:N, not gpu"),
        ({"log_level": "loud"}, "--log-level", "one of debug, info, warning, error, not loud"),
        ({"num_steps": 0}, "--num-steps", "--num-steps must be at least 1, not 0; --draft none serves"),
        ({"topk": -1}, "--topk", "not -1"),
        ({"num_draft_tokens": 0}, "--num-draft-tokens", "not 0"),
        ({"max_steps": 0}, "--speculative-max-steps", "not 0"),
        ({"max_topk": 0}, "--speculative-max-topk", "not 0"),
        ({"max_nodes": 0}, "--speculative-max-nodes", "not 0"),
        ({"max_running_requests": 0}, "--max-running-requests", "must be at least 1, not 0"),
        ({"kv_tokens": 0}, "--kv-tokens", "must be at least 1, not 0"),
        ({"mem_fraction_static": 1.0}, "--mem-fraction-static", "between 0 and 1, both excluded, not 1.0"),
        ({"mem_fraction_static": float("nan")}, "--mem-fraction-static", "not nan"),
        ({"num_steps": 5, "max_steps": 4}, "--num-steps", "--num-steps 5 is above --speculative-max-steps 4"),
        ({"topk": 5, "max_topk": 4}, "--topk", "--topk 5 is above --speculative-max-topk 4"),
        ({"num_draft_tokens": 9, "max_nodes": 8}, "--num-draft-tokens", "9 is above --speculative-max-nodes 8"),
    ],
)
def test_a_wrong_value_is_refused_by_its_flag(options: dict[str, Any], flag: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        check_values(StackOptions(**options))
    assert caught.value.field == flag


def test_defaults_and_limits_pass() -> None:
    check_values(StackOptions())
    check_values(StackOptions(port=65534, device="cpu", dtype="float16", num_steps=4, max_steps=4))


def test_cuda_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--device cuda:1: this machine shows no GPU; use --device cpu") as caught:
        check_values(StackOptions(device="cuda:1"), devices=tmp_path)
    assert caught.value.field == "--device"
    (tmp_path / "nvidia0").touch()
    check_values(StackOptions(device="cuda"), devices=tmp_path)


def test_an_impossible_port_of_a_peer_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["outrider", "health", "--grpc", "localhost:99999"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    expected = "error: --grpc: expected host:port (a port is at most 65535) or unix:/path, not 'localhost:99999'.\n"
    assert capsys.readouterr().err == expected


def test_up_ends_with_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["outrider", "up", "--port", "99999"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: --port must be between 1 and 65534, not 99999; gRPC listens on the port after it.\n"
