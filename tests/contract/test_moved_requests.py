"""Requests whose target is lost, drains or hangs go on at another target."""

from __future__ import annotations

import json
import signal
import threading

import pytest
from fake_target import FakeTarget, Script, chain_tokens, target_process
from http_calls import TIMEOUT_S, MakeGateway, client_of, error_of
from target_calls import NEW_TOKENS, PROMPT, MakeTarget, body, expected, gated, wait_all
from tokenizers import Tokenizer

from outrider.shared.base.errors import OverloadedError, UnavailableError
from outrider.target.v1 import target_pb2


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
        assert (
            'outrider_gateway_moved_sequences_total{model="toy",reason="target_lost"} 1.0'
            in http.get("/metrics").text
        )
        assert http.get("/ready").status_code == 200


def test_a_stream_leaves_a_target_that_hangs(
    make_gateway: MakeGateway, make_target: MakeTarget, tokenizer: Tokenizer
) -> None:
    """The connection of a suspended process stays open, so only overdue health checks tell."""
    begins = "lambda request: Script([chain_tokens(request, 3)], finish=False)"
    with target_process(tokenizer.get_vocab_size(), begins) as child:
        assert child.stdout
        other = make_target()
        other.set_serving(False)
        addresses = [child.stdout.readline().strip(), other.address]
        gateway = make_gateway(target=addresses, target_probe_timeout_s=0.3)
        other.script = lambda request: Script([chain_tokens(request, NEW_TOKENS)])
        with client_of(gateway) as http, http.stream("POST", "/generate", json=body(stream=True)) as stream:
            lines = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
            assert next(lines)["output_ids"] == expected()[:3]
            other.set_serving(True)
            wait_all(gateway, 2)
            child.send_signal(signal.SIGSTOP)
            assert list(lines)[-1]["output_ids"] == expected()
        assert list(other.seen[0].resume_ids) == expected()[:3]
        # It may serve again later.
        child.send_signal(signal.SIGCONT)
        wait_all(gateway, 2)


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
