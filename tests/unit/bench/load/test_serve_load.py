"""`outrider bench serve` against servers that are not Outrider: the requests it sends and what it counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.services.fake_openai import FakeServer
from typer.testing import CliRunner

from outrider.bench.load.samplings import GREEDY, SAMPLINGS
from outrider.services.cli.commands import app
from outrider.shared.base.errors import ConfigurationError, OutriderError

RUNNER = CliRunner()
TINY = ("--duration", "0.2", "--concurrency", "3", "--max-tokens", "6")


@pytest.fixture
def peer() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


def run(url: str, output: Path, *flags: str) -> dict[str, Any]:
    result = RUNNER.invoke(app, ["bench", "serve", "--url", url, *TINY, *flags, "--output", str(output)])
    if isinstance(result.exception, OutriderError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(output.read_text())  # type: ignore[no-any-return]


def values(written: dict[str, Any]) -> dict[str, float]:
    return {row["case"]: row["value"] for row in written["rows"]}


def test_clients_of_a_closed_loop_send_one_request_after_the_other(peer: FakeServer, tmp_path: Path) -> None:
    written = run(peer.url, tmp_path / "a.json", "--prompt-tokens", "5,9", "--max-tokens", "2,6")
    assert written["failed"] == 0
    assert written["requests"] >= 3
    assert written["requests"] + 6 == len(peer.seen)
    assert {path for path, _ in peer.seen} == {"/v1/completions"}
    assert {len(body["prompt"]) for body in peer.bodies} == {5, 9}
    assert {body["max_tokens"] for body in peer.bodies} == {2, 6}
    assert all("speculation" not in body for body in peer.bodies)
    prompts = [tuple(body["prompt"]) for body in peer.bodies]
    assert len(set(prompts)) == len(prompts), "a prefix cache must not help"
    assert written["settings"]["server"] == {
        "model": "toy",
        "owner": "vllm",
        "max_model_len": None,
        "vocab_size": None,
        "max_running_requests": None,
        "draft_state": None,
    }
    assert (written["settings"]["concurrency"], written["settings"]["request_rate"]) == (3, None)
    figures = values(written)
    assert figures["tokens"] > 0
    assert 0 < figures["time to first token, p50"] <= figures["whole request (e2e), p50"]
    assert figures["between pieces (ITL), p99"] > 0
    rows = {row["case"]: row for row in written["rows"]}
    assert rows["requests"]["floor_of"] == "clients × alone"


def test_two_servers_get_the_same_requests(peer: FakeServer, tmp_path: Path) -> None:
    other = FakeServer("sglang")
    flags = ("--prompt-tokens", "4,7", "--max-tokens", "1,2", "--sampling", "greedy,top_k,filters")
    try:
        for server in (peer, other):
            run(server.url, tmp_path / f"{server.owner}.json", *flags)
        assert [body["prompt"] for body in peer.bodies[:6]] == [body["prompt"] for body in other.bodies[:6]]
    finally:
        other.close()
    sampled = {name: set() for name in ("temperature", "top_k", "top_p")}  # type: ignore[var-annotated]
    for body in peer.bodies:
        for name, found in sampled.items():
            found.add(body.get(name))
    wanted = [GREEDY, SAMPLINGS["top_k"], SAMPLINGS["filters"]]
    for name, found in sampled.items():
        assert found == {sampling.get(name) for sampling in wanted}


def test_prompts_of_a_file_are_messages_or_text(peer: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hi"}\n{"messages": [{"role": "user", "content": "hello"}]}\n')
    run(peer.url, tmp_path / "chat.json", "--prompts", str(file))
    assert {path for path, _ in peer.seen} == {"/v1/chat/completions"}
    assert peer.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]
    peer.seen.clear()
    written = run(peer.url, tmp_path / "text.json", "--prompts", str(file), "--route", "completions")
    assert {path for path, _ in peer.seen} == {"/v1/completions"}
    assert {body["prompt"] for body in peer.bodies} == {"hi", "hello"}
    assert written["failed"] == 0


@pytest.mark.parametrize("with_text", [True, False])
@pytest.mark.parametrize("with_usage", [True, False])
def test_tokens_are_counted_with_and_without_texts_and_usage(
    peer: FakeServer, tmp_path: Path, with_text: bool, with_usage: bool
) -> None:
    peer.with_text, peer.with_usage = with_text, with_usage
    written = run(peer.url, tmp_path / "a.json", "--prompt-tokens", "4")
    assert written["failed"] == 0, written["errors"]
    figures = values(written)
    # Without both, the piece that ends the stream cannot be told from an ending without a token.
    tokens = 5 if not with_text and not with_usage else 6
    assert figures["tokens"] == pytest.approx(tokens * figures["requests"])


def test_an_answer_of_one_token_without_text_has_a_first_token(peer: FakeServer, tmp_path: Path) -> None:
    peer.with_text = False
    written = run(peer.url, tmp_path / "a.json", "--prompt-tokens", "4", "--max-tokens", "1")
    assert written["failed"] == 0
    assert values(written)["time to first token, p50"] > 0


def refuse(field: str) -> Any:
    return lambda body: (
        (422, {"detail": [{"loc": ["body", field], "msg": "extra"}]}) if field in body else None
    )


@pytest.mark.parametrize(
    ("change", "flags", "field", "words"),
    [
        (None, ("--speculation", "on"), "--speculation", r"\(vllm\) is not Outrider"),
        (None, ("--sampling", "hot"), "--sampling", "expected a comma-separated list of greedy"),
        (None, ("--sampling", "top_k", "--temperature", "1"), "--temperature", "exclude each other"),
        (None, ("--request-rate", "3"), "--request-rate", "exclude each other"),
        (None, ("--prompt-tokens", "3", "--prompts", "a"), "--prompts", "exclude each other"),
        (None, ("--prompt-tokens", "0"), "--prompt-tokens", "above 0"),
        (None, ("--route", "post"), "--route", "expected chat or completions"),
        (refuse("ignore_eos"), (), "--omit", "--omit ignore_eos"),
        (
            lambda body: (400, {"message": "a chat template must be provided"}),
            (),
            "--route",
            "--route completions",
        ),
        (
            lambda body: (400, {"error": {"message": "This model's maximum context length is 8"}}),
            (),
            "--prompt-tokens",
            "Lower --prompt-tokens or --max-tokens",
        ),
    ],
)
def test_what_a_server_refuses_names_the_option(
    peer: FakeServer, tmp_path: Path, change: Any, flags: tuple[str, ...], field: str, words: str
) -> None:
    if change is not None:
        peer.refuse = change
    with pytest.raises(ConfigurationError, match=words) as refused:
        run(peer.url, tmp_path / "a.json", *flags)
    assert refused.value.field == field


def test_a_refused_field_can_be_left_out(peer: FakeServer, tmp_path: Path) -> None:
    peer.refuse = refuse("ignore_eos")
    assert run(peer.url, tmp_path / "a.json", "--omit", "ignore_eos")["failed"] == 0


def test_a_server_without_models_is_no_openai_server(peer: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="OpenAI's API") as refused:
        run(f"{peer.url}/elsewhere", tmp_path / "a.json")
    assert refused.value.field == "--url"


def test_a_result_is_not_overwritten_unless_forced(peer: FakeServer, tmp_path: Path) -> None:
    run(peer.url, tmp_path / "a.json")
    with pytest.raises(ConfigurationError, match="--force"):
        run(peer.url, tmp_path / "a.json")
    run(peer.url, tmp_path / "a.json", "--force")
