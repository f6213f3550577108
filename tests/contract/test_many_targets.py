"""Several targets behind one gateway: names of models, choice of the target, and requests that move."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_target import FakeTarget, Script, chain_tokens
from gateway_thread import GatewayThread
from http_calls import TIMEOUT_S, MakeGateway, client_of, error_of
from support.toy_text import make_tokenizer
from tokenizers import Tokenizer

from outrider.shared.base.errors import OverloadedError, UnavailableError
from outrider.target.v1 import target_pb2

PROMPT = [9, 12, 40]
NEW_TOKENS = 12
MakeTarget = Callable[..., FakeTarget]


@pytest.fixture
def make_target(tokenizer: Tokenizer) -> Iterator[MakeTarget]:
    """Return a function that starts a target. All are stopped after the test."""
    started: list[FakeTarget] = []

    def make(**options: Any) -> FakeTarget:
        target = FakeTarget(tokenizer.get_vocab_size(), **options)
        target.start()
        started.append(target)
        return target

    yield make
    for target in started:
        target.stop()


def wait_all(gateway: GatewayThread, count: int) -> None:
    """Wait until `count` targets are ready."""

    async def all_ready() -> None:
        pool = gateway.server.core.targets
        while sum(one.client.ready for one in pool.members) != count:
            await pool.changed()

    gateway.call(all_ready())


def body(**fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 1.0, "sampling_seed": 3}
    return {"input_ids": PROMPT, "sampling_params": sampling, **fields}


def expected() -> list[int]:
    options = target_pb2.GenerateRequest(prompt_ids=PROMPT)
    options.sampling.temperature, options.sampling.seed = 1.0, 3
    return chain_tokens(options, NEW_TOKENS)


def gated(gate: threading.Semaphore) -> Callable[[target_pb2.GenerateRequest], Script]:
    """Return a script of one token a step. Each step but the first waits for the gate."""
    return lambda request: Script([[one] for one in chain_tokens(request, NEW_TOKENS)], gate=gate)


def busy_first(targets: list[FakeTarget]) -> tuple[FakeTarget, FakeTarget]:
    """Return the target that has a request, and the other one."""
    one, other = targets
    return (one, other) if one.seen else (other, one)


@pytest.mark.parametrize("emitted", [1, 5])
def test_a_stream_goes_on_at_another_target_when_its_own_dies(
    make_gateway: MakeGateway, make_target: MakeTarget, emitted: int
) -> None:
    gate = threading.Semaphore(emitted - 1)
    targets = [make_target(), make_target()]
    for target in targets:
        target.script = gated(gate)
    gateway = make_gateway(target=[one.address for one in targets])
    wait_all(gateway, 2)
    with client_of(gateway) as http, http.stream("POST", "/generate", json=body(stream=True)) as stream:
        lines = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
        assert next(one for one in lines if len(one["output_ids"]) == emitted)
        dying, other = busy_first(targets)
        dying.stop()
        gate.release(NEW_TOKENS)
        replies = list(lines)
    assert replies[-1]["output_ids"] == expected()
    assert replies[-1]["meta_info"]["prompt_tokens"] == len(PROMPT)
    assert replies[-1]["meta_info"]["completion_tokens"] == NEW_TOKENS
    lengths = [len(one["output_ids"]) for one in replies]
    assert lengths == sorted(lengths)
    [moved] = other.seen
    assert (list(moved.prompt_ids), list(moved.resume_ids)) == (PROMPT, expected()[:emitted])
    assert moved.max_new_tokens == NEW_TOKENS
    assert moved.sampling.seed == 3
    with client_of(gateway) as http:
        assert 'outrider_gateway_moved_sequences_total{reason="target_lost"} 1.0' in http.get("/metrics").text
        assert http.get("/ready").status_code == 200


def test_a_request_that_a_draining_target_refuses_goes_to_another(
    make_gateway: MakeGateway, make_target: MakeTarget
) -> None:
    targets = [make_target(), make_target()]
    draining: list[FakeTarget] = []

    def script(request: target_pb2.GenerateRequest) -> Script:
        # The first target that is asked drains, before its health has said so.
        mine = next(one for one in targets if any(seen is request for seen in one.seen))
        if not draining:
            draining.append(mine)
        if mine is draining[0]:
            return Script([], error=UnavailableError("shutting down"))
        return FakeTarget.default_script(request)

    for target in targets:
        target.script = script
    gateway = make_gateway(target=[one.address for one in targets])
    wait_all(gateway, 2)
    with client_of(gateway) as http:
        reply = http.post("/generate", json=body())
    assert reply.status_code == 200
    assert reply.json()["output_ids"] == expected()
    assert [len(one.seen) for one in targets] == [1, 1]


def test_an_error_of_the_request_itself_does_not_move_it(
    make_gateway: MakeGateway, make_target: MakeTarget
) -> None:
    targets = [make_target(), make_target()]
    for target in targets:
        target.script = lambda request: Script([], error=OverloadedError("full", retry_after_s=2))
    gateway = make_gateway(target=[one.address for one in targets])
    wait_all(gateway, 2)
    with client_of(gateway) as http:
        assert error_of(http.post("/generate", json=body()))["code"] == "overloaded"
    assert sum(len(one.seen) for one in targets) == 1


def test_a_request_that_loses_every_target_fails(make_gateway: MakeGateway, make_target: MakeTarget) -> None:
    """The request may be what kills the targets, so it is not tried for ever."""
    targets = [make_target() for _ in range(4)]
    arrived: list[FakeTarget] = []

    def killing(request: target_pb2.GenerateRequest) -> Script:
        mine = next(one for one in targets if any(seen is request for seen in one.seen))
        arrived.append(mine)
        threading.Thread(target=mine.stop).start()
        return Script([], finish=False)

    for target in targets:
        target.script = killing
    gateway = make_gateway(target=[one.address for one in targets])
    wait_all(gateway, 4)
    with client_of(gateway) as http:
        reply = http.post("/generate", json=body())
        assert (reply.status_code, error_of(reply)["code"]) == (503, "target_lost")
        assert len(arrived) == 3
        survivor = next(one for one in targets if one not in arrived)
        survivor.script = FakeTarget.default_script
        assert http.post("/generate", json=body()).json()["output_ids"] == expected()


def test_a_target_that_cannot_resume_gets_no_begun_answer(
    make_gateway: MakeGateway, make_target: MakeTarget
) -> None:
    """A target of an earlier release would ignore the emitted tokens and begin anew."""
    gate = threading.Semaphore(0)
    targets = [make_target(), make_target()]
    for target in targets:
        target.features = []
        target.script = gated(gate)
    gateway = make_gateway(target=[one.address for one in targets], target_wait_s=0)
    wait_all(gateway, 2)
    with client_of(gateway) as http, http.stream("POST", "/generate", json=body(stream=True)) as stream:
        lines = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
        assert next(lines)["output_ids"] == expected()[:1]
        dying, other = busy_first(targets)
        dying.stop()
        gate.release(NEW_TOKENS)
        assert [one["error"]["code"] for one in lines if "error" in one] == ["target_lost"]
    assert not other.seen


def test_a_request_waits_for_its_target_to_come_back(
    make_gateway: MakeGateway, make_target: MakeTarget, tokenizer: Tokenizer
) -> None:
    gate = threading.Semaphore(0)
    target = make_target(fingerprint="a")
    other_model = make_target(model_id="other", fingerprint="b")
    target.script = gated(gate)
    gateway = make_gateway(target=[target.address, other_model.address], target_wait_s=TIMEOUT_S)
    wait_all(gateway, 2)
    with client_of(gateway) as http, http.stream("POST", "/generate", json=body(stream=True)) as stream:
        lines = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
        next(lines)
        target.stop()
        again = FakeTarget(tokenizer.get_vocab_size(), fingerprint="a")
        again.start(target.address)
        assert list(lines)[-1]["output_ids"] == expected()
        again.stop()
    assert not other_model.seen


def test_a_deadline_holds_while_a_request_waits_for_a_target(
    make_gateway: MakeGateway, make_target: MakeTarget
) -> None:
    targets = [make_target(), make_target()]
    for target in targets:
        target.script = lambda request: Script([[9]], finish=False)
    gateway = make_gateway(target=[one.address for one in targets], target_wait_s=TIMEOUT_S)
    wait_all(gateway, 2)
    headers = {"X-Request-Deadline-Ms": "500"}
    with (
        client_of(gateway, headers=headers) as http,
        http.stream("POST", "/generate", json=body(stream=True)) as stream,
    ):
        lines = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
        next(lines)
        for target in targets:
            target.stop()
        assert [one["error"]["code"] for one in lines if "error" in one] == ["deadline_exceeded"]


def test_metrics_and_status_tell_the_targets_apart(
    make_gateway: MakeGateway, make_target: MakeTarget
) -> None:
    text = "# HELP outrider_x_total x\n# TYPE outrider_x_total counter\noutrider_x_total{} 2\n"
    usage = "outrider_kv_cache_usage_perc"
    text += f"# HELP {usage} x\n# TYPE {usage} gauge\n{usage} "
    targets = [
        make_target(
            model_id=name,
            fingerprint=name,
            prometheus_text=f"{text}{use}\n",
        )
        for name, use in (("a", 0.5), ("b", 0.25))
    ]
    gateway = make_gateway(target=[one.address for one in targets])
    wait_all(gateway, 2)
    with client_of(gateway) as http:
        lines = http.get("/metrics").text.splitlines()
        for target in targets:
            labels = f'{{model="{target.model_id}",target="{target.address}"}}'
            assert f"outrider_x_total{labels} 2" in lines
        assert lines.count("# TYPE outrider_x_total counter") == 1
        status = http.get("/status.json").json()
        assert [(one["address"], one["model"], one["ready"]) for one in status["targets"]] == [
            (one.address, one.model_id, True) for one in targets
        ]
        assert status["metrics"]["outrider_x_total"] == 4
        assert status["metrics"]["outrider_kv_cache_usage_perc"] == 0.375
        assert status["target"]["max_running_requests"] == 32
        assert status["model"]["names"] == ["a", "b"]
        assert len(http.get("/server_info").json()["internal_states"]) == 2
        targets[0].stop()
        wait_all(gateway, 1)
        status = http.get("/status.json").json()
        assert status["ready"]
        assert [one["ready"] for one in status["targets"]] == [False, True]
        assert status["targets"][0]["stats"] is None
        assert status["target"]["max_running_requests"] == 16


def test_requests_are_routed_by_the_model_that_they_name(
    make_gateway: MakeGateway, make_target: MakeTarget
) -> None:
    first, twin, other = (make_target(model_id=name, fingerprint=name) for name in ("a", "a", "b"))
    gateway = make_gateway(target=[one.address for one in (first, twin, other)])
    wait_all(gateway, 3)
    with client_of(gateway) as http:
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["a", "b"]
        assert http.get("/v1/models/b").json()["root"] == "b"
        for name in ("b", "b", None):
            prompt = {"prompt": PROMPT, "max_tokens": 2, "model": name}
            reply = http.post("/v1/completions", json={key: one for key, one in prompt.items() if one})
            assert reply.json()["model"] == (name or "a")
        assert len(other.seen) == 2
        assert len(first.seen) + len(twin.seen) == 1
        unknown = http.post("/v1/completions", json={"prompt": PROMPT, "model": "c"})
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")
        assert "'a', 'b'" in error_of(unknown)["message"]


def test_a_model_may_have_its_own_tokenizer(
    make_gateway: MakeGateway, make_target: MakeTarget, tokenizer_dir: Path, tmp_path: Path
) -> None:
    first, other = (make_target(model_id=name, fingerprint=name) for name in ("a", "b"))
    gateway = make_gateway(
        target=[first.address, other.address],
        tokenizer=None,
        model_tokenizer=[f"b={make_tokenizer(tmp_path)}"],
    )
    wait_all(gateway, 2)
    with client_of(gateway) as http:
        assert http.post("/v1/completions", json={"prompt": "hi", "model": "b"}).status_code == 200
        refused = http.post("/v1/completions", json={"prompt": "hi", "model": "a"})
        assert (refused.status_code, error_of(refused)["code"]) == (400, "no_tokenizer")
    assert other.seen[0].prompt_ids


def test_new_weights_under_the_same_name_take_over_when_the_old_ones_leave(
    make_gateway: MakeGateway, make_target: MakeTarget
) -> None:
    old, new = make_target(fingerprint="old"), make_target(fingerprint="new")
    gateway = make_gateway(target=[old.address, new.address])
    wait_all(gateway, 2)
    with client_of(gateway) as http:
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["toy"]
        assert http.post("/generate", json=body()).status_code == 200
        assert (len(old.seen), len(new.seen)) == (1, 0)
        old.set_serving(False)
        wait_all(gateway, 1)
        assert http.post("/generate", json=body()).status_code == 200
        assert (len(old.seen), len(new.seen)) == (1, 1)


def test_prompts_with_one_prefix_go_to_one_target(make_gateway: MakeGateway, make_target: MakeTarget) -> None:
    targets = [make_target(), make_target()]
    gateway = make_gateway(target=[one.address for one in targets])
    wait_all(gateway, 2)
    prompts = {first: [first] * 64 + [11] for first in (20, 21)}
    with client_of(gateway) as http:
        for first in (20, 21, 20, 20, 21):
            http.post("/v1/completions", json={"prompt": prompts[first], "max_tokens": 2}).raise_for_status()
    assert sorted([seen.prompt_ids[0] for seen in one.seen] for one in targets) == [[20, 20, 20], [21, 21]]


def test_a_file_of_addresses_is_read_again(
    make_gateway: MakeGateway, make_target: MakeTarget, tmp_path: Path
) -> None:
    first, second = make_target(), make_target()
    file = tmp_path / "targets"
    file.write_text(f"# the first\n{first.address}\n")
    gateway = make_gateway(target=[f"file://{file}"], target_refresh_s=0.05)
    with client_of(gateway) as http:
        assert http.post("/generate", json=body()).status_code == 200
        file.write_text(f"{second.address}\n")
        gateway.call(until(gateway, lambda addresses: addresses == [second.address]))
        wait_all(gateway, 1)
        assert http.post("/generate", json=body()).status_code == 200
        # A broken file keeps the addresses.
        file.write_text("")
        assert http.post("/generate", json=body()).status_code == 200
    assert (len(first.seen), len(second.seen)) == (1, 2)


def test_an_address_that_leaves_the_file_finishes_its_requests(
    make_gateway: MakeGateway, make_target: MakeTarget, tmp_path: Path
) -> None:
    gate = threading.Semaphore(0)
    first, second = make_target(), make_target()
    first.script = gated(gate)
    file = tmp_path / "targets"
    file.write_text(first.address)
    gateway = make_gateway(target=[f"file://{file}"], target_refresh_s=0.05)
    with client_of(gateway) as http, http.stream("POST", "/generate", json=body(stream=True)) as stream:
        lines = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
        next(lines)
        file.write_text(second.address)
        gateway.call(until(gateway, lambda addresses: addresses == [second.address]))
        gate.release(NEW_TOKENS)
        assert list(lines)[-1]["output_ids"] == expected()
    assert not second.seen


async def until(gateway: GatewayThread, arrived: Callable[[list[str]], bool]) -> None:
    """Wait until the addresses of the targets are as wanted."""
    pool = gateway.server.core.targets
    while not arrived([one.address for one in pool.members]):
        await pool.changed()
