"""`outrider bench mixed` against small fake servers: its cases, its report and its errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.services.fake_openai import FakeServer
from typer.testing import CliRunner

from outrider.bench.mixed import command, pauses, ratios, soak
from outrider.bench.mixed.cases import AUTO, MIXES, PAIRINGS, PLAIN
from outrider.services.cli.commands import app
from outrider.services.stack.options import StackOptions
from outrider.shared.base.errors import ConfigurationError, OutriderError, UnavailableError

RUNNER = CliRunner()
TINY = (
    *("--pairs", "1", "--batch", "2", "--prompt-tokens", "3", "--new-tokens", "4"),
    *("--auto-batch", "2", "--auto-tokens", "5", "--longest", "40", "--ttft", "2,9"),
    *("--seconds", "0.2", "--clients", "3"),
)
OUTRIDER_INFO = {
    "vocab_size": 50,
    "max_running_requests": 8,
    "max_model_len": 2000,
    "speculative_max_steps": 16,
    "speculative_max_topk": 16,
    "speculative_max_nodes": 128,
    "internal_states": [{"draft_state": "on"}],
}


@pytest.fixture
def peer() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture
def gateway() -> Iterator[FakeServer]:
    fake = FakeServer("outrider")
    fake.limits = dict(OUTRIDER_INFO)
    yield fake
    fake.close()


def run(url: str, output: Path, *flags: str, code: int = 0) -> dict[str, Any]:
    result = RUNNER.invoke(
        app, ["bench", "mixed", "--url", url, *TINY, *flags, "--output", str(output / "mixed.json")]
    )
    if isinstance(result.exception, OutriderError):
        raise result.exception
    assert result.exit_code == code, result.output
    return {
        **json.loads((output / "mixed.json").read_text()),
        "printed": result.stdout,
    }


def test_any_server_runs_the_cases_without_speculation(peer: FakeServer, tmp_path: Path) -> None:
    peer.limits = {"max_model_len": 5000}
    written = run(f"{peer.url}/v1", tmp_path, "--api", "openai")
    assert {path for path, _ in peer.seen} == {"/v1/completions"}
    assert all("speculation" not in body for body in peer.bodies)
    assert all(10 <= token < 1000 for body in peer.bodies for token in body["prompt"])
    odd = {row["name"]: row for row in written["rows"] if row["section"] == "odd"}
    assert list(odd) == [pairing.name for pairing in PAIRINGS if pairing.name.startswith("greedy")] + [
        "sampled beside one greedy"
    ]
    row = odd["greedy beside one with top_p"]
    assert row["ratio"] == pytest.approx(row["ratios"][0])
    assert row["value"] == pytest.approx(row["ratio"] * row["tok_s_alike"], rel=1e-3)
    assert (row["goal"], row["goal_is"]) == (0.97, "at least")
    assert row["met"] == (row["ratio"] >= row["goal"])
    names = {row["case"] for row in written["rows"]}
    assert names >= {
        "gap: longest pause of plain streams",
        "gap: TTFT of the long prompt beside plain streams",
        "ttft: prompt of 9",
        "soak: plain: tokens",
        "soak: plain: latency, p99",
        "soak: plain: failed",
    }
    assert not any(name.startswith("auto") for name in names)
    assert written["skipped"]["odd: plain beside one tree"] == "the case needs Outrider's speculation field"
    assert "soak: every shape" in written["skipped"]
    assert written["settings"]["model"] == "toy"
    assert written["settings"]["server"]["owner"] == "vllm"
    assert written["command"][0] == "outrider"
    assert {"environment", "machine", "source", "date"} <= set(written)
    assert "greedy beside one with seed" in written["printed"]


def test_an_outrider_server_runs_every_case(gateway: FakeServer, tmp_path: Path) -> None:
    written = run(gateway.url, tmp_path)
    assert {path for path, _ in gateway.seen} == {"/generate"}
    assert written["skipped"] == written["failed"] == {}
    rows = {row["case"]: row for row in written["rows"]}
    assert len(rows) == len(written["rows"])
    assert [row["name"] for row in rows.values() if row["section"] == "odd"] == [one.name for one in PAIRINGS]
    assert rows["auto: auto ÷ off, batch 2, 5 tokens"]["goal"] == 0.985
    assert rows["odd: plain beside one tree"]["goal"] == 0.76
    for mix in MIXES:
        assert rows[f"soak: {mix.name}: tokens"]["completed"] > 0
    sent = {json.dumps(body["speculation"], sort_keys=True) for body in gateway.bodies}
    assert len(sent) >= 8, "plain, auto, chain, tree, their traces and the soak's shapes"
    assert {token < 50 for body in gateway.bodies for token in body["input_ids"]} == {True}
    assert {"ignore_eos", "max_new_tokens", "temperature"} <= set(gateway.bodies[0]["sampling_params"])


def test_the_odd_request_runs_beside_the_batch(gateway: FakeServer, tmp_path: Path) -> None:
    run(gateway.url, tmp_path, "--only", "odd:plain beside one tree")
    streamed = [body["speculation"]["mode"] for body in gateway.bodies if body["stream"]]
    batched = [body["speculation"]["mode"] for body in gateway.bodies if not body["stream"]]
    assert set(streamed) == {"off", "on"}, "one more usual request, then the odd one"
    assert batched.count("on") == 1, "only the check of the request itself"
    assert batched.count("off") == 1 + 2 * 4, "a batch of two: two warm-ups, and a pair of runs"


async def test_pairs_alternate_their_order_and_give_medians() -> None:
    speeds = {False: iter([1.0, 10.0, 20.0, 10.0]), True: iter([1.0, 5.0, 30.0, 9.0])}
    asked: list[tuple[bool, int]] = []

    async def speed(kind: Any, new: int) -> float:
        asked.append((kind is AUTO, new))
        return next(speeds[kind is AUTO])

    base, other, found = await ratios._in_pairs(speed, PLAIN, AUTO, 100, 3)
    assert (base, other, found) == (10.0, 9.0, [0.5, 1.5, 0.9])
    warm = ratios.WARM_UP_TOKENS
    assert asked[:2] == [(False, warm), (True, warm)]
    assert [is_auto for is_auto, _ in asked[2:]] == [False, True, True, False, False, True]


def test_pauses_are_those_that_overlap_with_the_long_prompt() -> None:
    times = [1.0, 2.0, 5.0, 6.0, 9.0]
    assert pauses._pauses(times, 2.5, 5.5) == [(3.0, 2.0), (1.0, 5.0)]
    assert pauses._pauses(times, 0.0, 1.0) == []
    assert pauses._pauses(times, 3.0, 4.0) == [(3.0, 2.0)]


def test_streams_that_end_are_followed_by_others(gateway: FakeServer, tmp_path: Path) -> None:
    gateway.limits |= {"max_model_len": 18}
    streamed = threading.Semaphore(0)

    def hold_back(body: dict[str, Any]) -> None:
        if body["stream"]:
            streamed.release()
        elif len(body["input_ids"]) == 5 and any(one["stream"] for one in gateway.bodies):
            for _ in range(12):  # the long prompt is answered when four streams have been followed by eight
                assert streamed.acquire(timeout=20)

    gateway.refuse = hold_back
    written = run(gateway.url, tmp_path, "--longest", "5", "--ttft", "2", "--only", "gap:plain")
    assert written["settings"]["stream"] == 15
    pause, ttft = written["rows"]
    # The usual gap and the time alone are rounded to microseconds. A gap of the fake server is a few of them.
    assert pause["value"] / pause["ratio"] == pytest.approx(pause["usual_ms"], abs=0.001)
    assert len(pause["runs_at_ms"]) == 1
    assert pause["goal"] is ttft["goal"] is None, "the goals hold for other sizes"
    assert ttft["value"] / ttft["ratio"] == pytest.approx(ttft["alone_ms"], abs=0.001)


def test_a_case_that_fails_leaves_the_others(gateway: FakeServer, tmp_path: Path) -> None:
    def refuse(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        return (503, {"error": {"message": "gone"}}) if len(body["input_ids"]) == 9 else None

    gateway.refuse = refuse
    written = run(gateway.url, tmp_path, "--only", "ttft", code=1)
    assert [row["case"] for row in written["rows"]] == ["ttft: prompt of 2"]
    assert "gone" in written["failed"]["ttft: prompt of 9"]


def test_the_soak_counts_errors_by_kind_and_what_is_left(
    gateway: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[int] = []

    def refuse(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        served.append(1)
        late = len(served) > 1 and len(served) % 2 == 0
        return (429, {"error": {"message": f"{len(served)} sequences wait"}}) if late else None

    gateway.refuse = refuse
    gateway.metrics = (
        '# HELP x y\nnum_requests_running{model="a b"} 2.0\nkv_tokens{state="leaked"} 0\n'
        "queue_waiting_seconds_sum 9\nrequests_total 7\n"
    )
    monkeypatch.setattr(soak, "SETTLE_S", 0.0)
    monkeypatch.setattr(soak, "PAUSE_AFTER_ERROR_S", 0.0)
    written = run(gateway.url, tmp_path, "--only", "soak:plain")
    rows = {row["name"]: row for row in written["rows"]}
    failed = rows["plain: failed"]
    assert failed["value"] == sum(failed["errors"].values()) > 1
    (kind,) = failed["errors"]
    assert "429: " in kind
    assert "# sequences wait" in kind
    assert failed["met"] is False
    assert rows["plain: left over"]["left_over"] == {'num_requests_running{model="a b"}': 2.0}


def test_defaults_are_reduced_to_what_the_server_allows(gateway: FakeServer, tmp_path: Path) -> None:
    gateway.limits |= {"max_model_len": 100, "max_running_requests": 3}
    output = tmp_path / "mixed.json"
    flags = ("--pairs", "1", "--prompt-tokens", "3", "--new-tokens", "4", "--auto-tokens", "5")
    soak_flags = ("--seconds", "0.1", "--clients", "2", "--only", "odd:plain*off,auto,gap,ttft,soak:plain")
    result = RUNNER.invoke(
        app, ["bench", "mixed", "--url", gateway.url, *flags, *soak_flags, "--output", str(output)]
    )
    assert result.exit_code == 0, result.output
    settings = json.loads(output.read_text())["settings"]
    assert settings["batch"] == 2
    assert settings["auto_batches"] == [1]
    assert settings["ttft"] == [16]
    assert settings["longest"] == 98
    assert settings["soak_prompts"] == [1, 5]
    assert settings["soak_answers"] == [1, 2]


def test_a_stack_of_its_own_runs_the_whole_batch_at_once(
    gateway: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[StackOptions] = []

    @contextmanager
    def stack(options: StackOptions, *_: Any) -> Iterator[Any]:
        started.append(options)
        yield SimpleNamespace(url=gateway.url)

    monkeypatch.setattr(command, "started_services", stack)
    gateway.limits |= {"max_running_requests": 65}
    flags = ("--device", "cpu", "--batch", "7", "--only", "odd:chain 3 beside one off,auto", "--pairs", "1")
    sizes = ("--prompt-tokens", "3", "--new-tokens", "4", "--auto-tokens", "2")
    result = RUNNER.invoke(app, ["bench", "mixed", *flags, *sizes, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert started[0].max_running_requests == 64, "the largest default batch of auto"
    written = json.loads((tmp_path / "mixed-cpu.json").read_text())
    assert written["settings"]["device"] == "cpu"
    assert written["settings"]["auto_batches"] == [1, 16, 64]


def test_a_stack_of_its_own_has_outriders_format(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["bench", "mixed", "--api", "openai", "--output", str(tmp_path)])
    assert isinstance(result.exception, ConfigurationError)
    assert result.exception.field == "--url"


def test_a_draft_that_is_not_ready_is_waited_for(
    gateway: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.limits |= {"internal_states": [{"draft_state": "draft_down"}]}
    monkeypatch.setattr(command, "DRAFT_WAIT_S", 0.0)
    run(gateway.url, tmp_path, "--only", "ttft")
    with pytest.raises(UnavailableError, match="state draft_down"):
        run(gateway.url, tmp_path, "--only", "gap:tree", "--force")
    monkeypatch.setattr(command, "DRAFT_WAIT_S", 20.0)
    monkeypatch.setattr(command, "POLL_S", 0.0)
    found = command.find_server
    states = iter(["draft_down", "connecting"])

    def one_state_later(*arguments: Any) -> Any:
        server = found(*arguments)
        gateway.limits |= {"internal_states": [{"draft_state": next(states, "on")}]}
        return server

    monkeypatch.setattr(command, "find_server", one_state_later)
    assert run(gateway.url, tmp_path, "--only", "gap:tree", "--force")["failed"] == {}
    assert next(states, "") == "", "every state was seen"


def test_shapes_beyond_the_server_are_left_out(gateway: FakeServer, tmp_path: Path) -> None:
    gateway.limits |= {"speculative_max_nodes": 16}
    written = run(gateway.url, tmp_path, "--only", "odd:tree*,odd:chain 3 beside one off")
    assert written["skipped"] == {"odd: tree beside one off": "the server allows max_nodes up to 16"}
    assert [row["name"] for row in written["rows"]] == ["chain 3 beside one off"]


def refuse_min_p(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    if "min_p" not in body:
        return None
    return 400, {"object": "error", "message": "Unrecognized request argument: min_p", "param": None}


@pytest.mark.parametrize(
    ("change", "flags", "field", "words"),
    [
        ({}, (), "--api", "Use --api openai"),
        ({"owner": "outrider"}, ("--api", "soap"), "--api", "expected outrider or openai"),
        ({"refuse": refuse_min_p}, ("--api", "openai"), "--omit", "--omit min_p"),
        ({}, ("--api", "openai", "--only", "auto"), "--only", "speculation field"),
        ({}, ("--only", "speed"), "--only", "expected a comma-separated list of odd"),
        ({}, ("--api", "openai", "--only", "odd:none"), "--only", "no case has such a name"),
        ({}, ("--omit", "ignore-eos"), "--omit", "expected ignore_eos"),
        ({}, ("--seconds", "0"), "--seconds", "above 0"),
        ({}, ("--ttft", "1,x"), "--ttft", "numbers above 0"),
        ({"limits": OUTRIDER_INFO, "owner": "outrider"}, ("--batch", "8"), "--batch", "allows 8 running"),
        ({"limits": OUTRIDER_INFO, "owner": "outrider"}, ("--vocab", "51"), "--vocab", "the model's 50"),
        (
            {"limits": OUTRIDER_INFO, "owner": "outrider"},
            ("--ttft", "2000"),
            "--ttft",
            "2000 tokens of context",
        ),
        ({"limits": OUTRIDER_INFO, "owner": "outrider"}, ("--longest", "1999"), "--longest", "2000 tokens"),
        (
            {"limits": {"internal_states": [{"draft_state": "none"}]}, "owner": "outrider"},
            ("--only", "auto"),
            "--only",
            "the server has no draft",
        ),
        (
            {"refuse": lambda body: (400, {"message": "Token id 999 is out of vocabulary"})},
            ("--api", "openai"),
            "--vocab",
            "Set --vocab",
        ),
        (
            {"refuse": lambda body: (400, {"message": "maximum context length is 8 tokens"})},
            ("--api", "openai"),
            "--prompt-tokens",
            "Lower --prompt-tokens",
        ),
        ({"refuse": lambda body: (401, {})}, ("--api", "openai"), "--api-key", "--api-key"),
        ({"refuse": lambda body: (404, {})}, ("--api", "openai"), "--api", "no such route"),
    ],
)
def test_what_cannot_run_is_refused_with_the_option_to_change(
    peer: FakeServer,
    tmp_path: Path,
    change: dict[str, Any],
    flags: tuple[str, ...],
    field: str,
    words: str,
) -> None:
    for name, value in change.items():
        setattr(peer, name, value)
    with pytest.raises(ConfigurationError, match=words) as refused:
        run(peer.url, tmp_path, *flags)
    assert refused.value.field == field
    assert not (tmp_path / "mixed.json").exists()


def test_a_refused_field_can_be_left_out(peer: FakeServer, tmp_path: Path) -> None:
    peer.refuse = refuse_min_p
    written = run(peer.url, tmp_path, "--api", "openai", "--omit", "min_p,ignore_eos", "--only", "odd,soak")
    assert written["skipped"]["odd: greedy beside one with filters"] == "--omit min_p"
    assert all("min_p" not in body and "ignore_eos" not in body for body in peer.bodies)
    rows = {row["name"]: row for row in written["rows"]}
    assert "greedy beside one with top_k" in rows
    assert rows["plain: failed"]["value"] == 0


def test_the_address_must_be_a_server(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no server answers") as unreachable:
        run("http://127.0.0.1:9", tmp_path)
    assert unreachable.value.field == "--url"
    for wrong in ("http://", "ftp://host", "http://host:port"):
        with pytest.raises(ConfigurationError, match="expected an address"):
            run(wrong, tmp_path)


def test_a_result_is_not_overwritten_unless_forced(peer: FakeServer, tmp_path: Path) -> None:
    flags = ("--api", "openai", "--only", "ttft")
    run(peer.url, tmp_path, *flags)
    sent = len(peer.seen)
    with pytest.raises(ConfigurationError, match="--force") as refused:
        run(peer.url, tmp_path, *flags)
    assert refused.value.field == "--output"
    assert len(peer.seen) == sent, "refused before anything is measured"
    run(peer.url, tmp_path, *flags, "--force")
    assert len(peer.seen) == 2 * sent


def test_the_key_is_sent_and_not_recorded(
    peer: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--api", "openai", "--only", "ttft", "--api-key", "hush")
    monkeypatch.setattr("sys.argv", ["outrider", "bench", "mixed", *flags, "--api-key=hush"])
    written = run(peer.url, tmp_path, *flags)
    assert peer.keys == {"Bearer hush"}
    assert "hush" not in json.dumps(written)
    assert written["command"][-2:] == ["***", "--api-key=***"]
