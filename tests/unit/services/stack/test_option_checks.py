"""Values that `outrider up` rejects before it starts a process. Each error names the given flag."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.services.cli import commands as cli
from outrider.services.draft.settings import DraftSettings
from outrider.services.stack import option_checks
from outrider.services.stack.option_checks import check_values
from outrider.services.stack.options import StackOptions, Transport
from outrider.services.target.request import SpeculationLimits
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.spec.algorithm import Algorithm


@pytest.mark.parametrize(
    ("options", "flag", "message"),
    [
        ({"port": 99999}, "--port", "--port must be between 1 and 65534, not 99999"),
        ({"port": 65535}, "--port", "gRPC uses the next port"),
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
        ({"draft_device": "gpu"}, "--draft-device", "must be auto, cpu, cuda or cuda:N, not gpu"),
        (
            {"draft_device": "cuda:1", "transport": Transport.INPROC},
            "--draft-device",
            "the draft runs in the target's process",
        ),
        ({"draft_device": "cuda:1", "draft": None}, "--draft-device", "the draft does not exist"),
        ({"kv_tokens": 0}, "--kv-tokens", "must be at least 1, not 0"),
        ({"mem_fraction_static": 1.0}, "--mem-fraction-static", "between 0 and 1, both exclusive, not 1.0"),
        ({"mem_fraction_static": float("nan")}, "--mem-fraction-static", "not nan"),
        ({"num_steps": 5, "max_steps": 4}, "--num-steps", "--num-steps 5 exceeds --speculative-max-steps 4"),
        ({"topk": 5, "max_topk": 4}, "--topk", "--topk 5 exceeds --speculative-max-topk 4"),
        (
            {"num_draft_tokens": 9, "max_nodes": 8},
            "--num-draft-tokens",
            "9 exceeds --speculative-max-nodes 8",
        ),
        (
            {"num_steps": 20},
            "--num-steps",
            r"--num-steps 20 exceeds --speculative-max-steps 16 \(the default\)",
        ),
        ({"topk": 17}, "--topk", r"17 exceeds --speculative-max-topk 16 \(the default\)"),
        (
            {"num_draft_tokens": 129},
            "--num-draft-tokens",
            r"129 exceeds --speculative-max-nodes 128 \(the default\)",
        ),
        (
            {"max_steps": 3},
            "--num-steps",
            r"--num-steps 5 \(the default\) exceeds --speculative-max-steps 3",
        ),
        (
            {"topk": 1, "num_draft_tokens": 7},
            "--num-draft-tokens",
            r"with --topk 1, a draft is a chain of num_steps \+ 1 = 6 nodes",
        ),
        (
            {"topk": 1, "num_steps": 3, "num_draft_tokens": 5},
            "--num-draft-tokens",
            r"num_steps \+ 1 = 4 nodes",
        ),
        ({"token_map": Path("/no/map.pt")}, "--speculative-token-map", "there is no such file"),
        (
            {"token_map": Path(__file__)},
            "--speculative-token-map",
            "must be a file of type .pt, .pth, .bin, .safetensors, .json",
        ),
        (
            {"ngram_corpus": Path("/no/corpus.txt"), "algorithm": Algorithm.NGRAM},
            "--ngram-corpus",
            "there is no such file",
        ),
        ({"ngram_corpus": Path(__file__)}, "--ngram-corpus", "is used by NGRAM only"),
        (
            {"transport": Transport.IPC, "draft": None},
            "--transport",
            "--transport ipc has no effect because there is no draft. Remove it",
        ),
        (
            {"transport": Transport.GRPC, "algorithm": Algorithm.NONE},
            "--transport",
            "--transport grpc has no effect",
        ),
        ({"transport": Transport.INPROC, "draft": None}, "--transport", "--transport inproc has no effect"),
    ],
)
def test_a_wrong_value_is_refused_by_its_flag(options: dict[str, Any], flag: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        check_values(StackOptions(**options))
    assert caught.value.field == flag


def test_defaults_and_limits_pass() -> None:
    check_values(StackOptions())
    check_values(StackOptions(port=65534, device="cpu", dtype="float16", num_steps=4, max_steps=5))
    check_values(StackOptions(num_steps=20, max_steps=20, topk=1, num_draft_tokens=21))
    check_values(StackOptions(topk=1))  # a chain may use fewer nodes than the default
    check_values(StackOptions(algorithm=Algorithm.NGRAM, draft=None, ngram_corpus=Path(__file__)))
    check_values(StackOptions(algorithm=Algorithm.NGRAM, draft=None, transport=Transport.IPC))
    check_values(StackOptions(draft=None, transport=Transport.AUTO))


@pytest.mark.parametrize(
    ("options", "why"),
    [({"algorithm": Algorithm.NGRAM}, "n-grams have no vocabulary"), ({}, "there is no draft")],
)
def test_an_unused_token_map_is_refused(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text("[1, 2]")
    check_values(StackOptions(token_map=tmp_path / "map.json"))
    with pytest.raises(ConfigurationError, match=why) as caught:
        check_values(StackOptions(draft=None, token_map=tmp_path / "map.json", **options))
    assert caught.value.field == "--speculative-token-map"


def test_the_copied_defaults_match_the_services() -> None:
    target, draft = TargetSettings.model_fields, DraftSettings.model_fields
    for name in ("num_steps", "topk", "num_draft_tokens", "max_steps", "max_topk", "max_nodes"):
        assert getattr(option_checks, f"DEFAULT_{name.upper()}") == target[name].default
    for name in ("max_steps", "max_topk", "max_nodes", "max_sessions"):
        assert getattr(option_checks, f"DEFAULT_{name.upper()}") == draft[name].default


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"topk": 1, "num_draft_tokens": 7}, "num_draft_tokens"),
        ({"topk": 1, "num_steps": 2, "num_draft_tokens": 4}, "num_draft_tokens"),
        ({"ngram_corpus": "/c.txt", "draft": "grpc://host:7002"}, "ngram_corpus"),
    ],
)
def test_a_target_service_refuses_the_same(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TargetSettings.load({"model": "/m", "device": "cpu", **values}).check()
    assert caught.value.field == field
    TargetSettings.load({"model": "/m", "device": "cpu", "topk": 1, "num_draft_tokens": 6}).check()
    TargetSettings.load({"model": "/m", "device": "cpu", "topk": 1}).check()


def test_a_request_for_a_chain_may_name_more_nodes() -> None:
    """In a request, the number of nodes is an upper bound, so a chain may use fewer."""
    assert SpeculationLimits().resolve(depth=3, topk=1, max_nodes=16).shape.max_nodes == 4


def test_a_draft_service_refuses_a_corpus_that_it_would_not_read() -> None:
    with pytest.raises(ConfigurationError, match="only NGRAM reads") as caught:
        DraftSettings.load({"draft": "/d", "ngram_corpus": "/c.txt", "device": "cpu"}).check()
    assert caught.value.field == "ngram_corpus"


def test_cuda_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"--device cuda:1: this machine has no GPU\. Use --device cpu"
    ) as caught:
        check_values(StackOptions(device="cuda:1"), devices=tmp_path)
    assert caught.value.field == "--device"
    (tmp_path / "nvidia0").touch()
    check_values(StackOptions(device="cuda"), devices=tmp_path)


def test_an_impossible_port_of_a_peer_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["outrider", "health", "--grpc", "localhost:99999"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    expected = (
        "error: --grpc: expected host:port (a port is at most 65535) or unix:/path, not 'localhost:99999'.\n"
    )
    assert capsys.readouterr().err == expected


def test_up_ends_with_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["outrider", "up", "--port", "99999"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert (
        capsys.readouterr().err
        == "error: --port must be between 1 and 65534, not 99999; gRPC uses the next port.\n"
    )
