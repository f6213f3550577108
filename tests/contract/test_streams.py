"""Streams: stop strings, split characters, disconnected and slow clients, failing targets, deadlines."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest
from fake_target import EOS_ID, FakeTarget, Script
from gateway_thread import GatewayThread
from http_calls import MakeGateway
from tokenizers import Tokenizer

from outrider.common.v1 import common_pb2
from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from outrider.shared.base.errors import ErrorCode, InvalidRequestError, OutriderError

TIMEOUT_S = 30
Post = Callable[..., httpx.Response]


@pytest.fixture
def post(gateway: GatewayThread) -> Iterator[Post]:
    with httpx.Client(base_url=gateway.stack.base_url, timeout=TIMEOUT_S) as client:
        yield lambda path, **body: client.post(path, json=body)


def spell(
    fake: FakeTarget, tokenizer: Tokenizer, text: str, step: int = 1, eos: bool = False, **script: Any
) -> list[int]:
    """Make the target generate `text`, with `step` tokens at a time."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids + ([EOS_ID] if eos else [])
    fake.script = lambda request: Script([ids[at : at + step] for at in range(0, len(ids), step)], **script)
    return ids


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [
        line.removeprefix("data: ")
        for line in response.text.split("\n\n")
        if line and not line.startswith(":")
    ]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_character_of_many_tokens_arrives_whole(fake: FakeTarget, post: Post, tokenizer: Tokenizer) -> None:
    text = "a 🦊 über 東京!"
    spell(fake, tokenizer, text)
    pieces = [
        event["choices"][0]["text"]
        for event in events_of(post("/v1/completions", prompt="x", max_tokens=100, stream=True))
    ]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_text_and_is_never_shown_in_part(
    fake: FakeTarget, post: Post, tokenizer: Tokenizer, step: int, stream: bool
) -> None:
    spell(fake, tokenizer, "one two END three", step, finish=False)
    body = {"prompt": "x", "max_tokens": 100, "stop": ["END", "never"], "return_token_ids": True}
    response = post("/v1/completions", **body, stream=stream)
    if stream:
        events = events_of(response)
        pieces = [event["choices"][0]["text"] for event in events]
        choice = events[-1]["choices"][0]
        assert not any("E" in piece for piece in pieces)
        text, ids = (
            "".join(pieces),
            [token for event in events for token in event["choices"][0].get("token_ids", [])],
        )
    else:
        choice = response.json()["choices"][0]
        text, ids = choice["text"], choice["token_ids"]
        assert response.json()["usage"]["completion_tokens"] == len(ids)
    assert text == "one two "
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", "END")
    # Only tokens up to the one that completed the stop string are shown. The target bills the same number.
    assert tokenizer.decode(ids).startswith("one two END")
    assert not tokenizer.decode(ids[:-1]).startswith("one two END")
    cancel = fake.cancels.get(timeout=TIMEOUT_S)
    assert cancel.keep_tokens == len(ids)


def test_the_stop_string_is_kept_on_request(fake: FakeTarget, post: Post, tokenizer: Tokenizer) -> None:
    spell(fake, tokenizer, "one two END three")
    reply = post(
        "/v1/completions", prompt="x", max_tokens=100, stop="END", include_stop_str_in_output=True
    ).json()
    assert reply["choices"][0]["text"] == "one two END"


def test_held_back_text_comes_when_it_was_no_stop_string(
    fake: FakeTarget, post: Post, tokenizer: Tokenizer
) -> None:
    spell(fake, tokenizer, "one EN two E")
    reply = post("/v1/completions", prompt="x", max_tokens=100, stop=["END"]).json()
    assert reply["choices"][0]["text"] == "one EN two E"


def test_end_of_sequence_has_no_text_and_is_reported(
    fake: FakeTarget, post: Post, tokenizer: Tokenizer
) -> None:
    ids = spell(fake, tokenizer, "one two", step=100, eos=True)
    choice = post(
        "/v1/completions", prompt="x", max_tokens=100, return_token_ids=True, skip_special_tokens=False
    ).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("one two", "stop", EOS_ID)
    assert choice["token_ids"] == ids


def test_stop_tokens_reach_the_target_and_have_no_text(
    fake: FakeTarget, post: Post, tokenizer: Tokenizer
) -> None:
    ids = spell(fake, tokenizer, "one two three", step=100)
    choice = post("/v1/completions", prompt="x", max_tokens=100, stop_token_ids=[ids[2]]).json()["choices"][0]
    assert choice["text"] == tokenizer.decode(ids[:2])
    assert choice["matched_stop"] == ids[2]
    assert list(fake.seen[-1].stop_token_ids) == [ids[2]]


def test_parameters_arrive_at_the_target_as_they_were_said(fake: FakeTarget, post: Post) -> None:
    speculation = {"mode": "on", "depth": 2, "topk": 3, "max_nodes": 7, "trace": True}
    sampling = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "seed": -1, "max_tokens": 3}
    assert (
        post(
            "/v1/completions", prompt=[9, 9], ignore_eos=True, speculation=speculation, **sampling
        ).status_code
        == 200
    )
    seen = fake.seen[-1]
    assert (list(seen.prompt_ids), seen.max_new_tokens, seen.ignore_eos) == ([9, 9], 3, True)
    got = seen.sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.seed) == (0.5, 0.75, 7, 0.25, (1 << 64) - 1)
    shape = seen.speculation
    assert (shape.mode, shape.depth, shape.topk, shape.max_nodes, shape.trace) == (
        common_pb2.SPECULATION_MODE_ON,
        2,
        3,
        7,
        True,
    )


def test_absent_speculation_is_auto_with_the_targets_own_shape(fake: FakeTarget, post: Post) -> None:
    post("/v1/completions", prompt=[9], max_tokens=1)
    shape = fake.seen[-1].speculation
    assert shape.mode == common_pb2.SPECULATION_MODE_AUTO
    assert not any(shape.HasField(name) for name in ("depth", "topk", "max_nodes"))


def open_stream(
    gateway: GatewayThread, body: dict[str, Any], receive_buffer: int | None = None
) -> socket.socket:
    """Send a streaming request over a bare socket."""
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(TIMEOUT_S)
    connection.connect(("127.0.0.1", gateway.server.port))
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


def read_until(connection: socket.socket, marker: bytes) -> bytes:
    received = b""
    while marker not in received:
        part = connection.recv(65536)
        assert part, received
        received += part
    return received


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_at_the_target(
    gateway: GatewayThread, fake: FakeTarget, stream: bool
) -> None:
    started = threading.Event()

    def script(request):
        started.set()
        return Script([[9]], finish=False)

    fake.script = script
    connection = open_stream(gateway, {"prompt": [9], "max_tokens": 100, "stream": stream})
    assert started.wait(TIMEOUT_S)
    if stream:
        read_until(connection, b"data: ")
    connection.close()
    cancel = fake.cancels.get(timeout=TIMEOUT_S)
    assert cancel.request_id == fake.seen[-1].request_id
    assert not cancel.HasField("keep_tokens")
    gateway.call(gateway.server.core.lifecycle.idle.wait())
    assert gateway.server.core.admission.active == gateway.server.core.admission.waiting == 0


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_only_sends_nothing_more_gets_its_answer(
    gateway: GatewayThread, fake: FakeTarget, stream: bool, begun: bool
) -> None:
    """The client closes its direction of the connection, before or after the first token."""
    started, gate = threading.Event(), threading.Semaphore(0)

    def script(request):
        started.set()
        if not begun:
            assert gate.acquire(timeout=TIMEOUT_S)
        return Script([[9], [10], [11]], gate=gate)

    fake.script = script
    with open_stream(gateway, {"prompt": [9], "max_tokens": 3, "stream": stream}) as connection:
        assert started.wait(TIMEOUT_S)
        if stream and begun:
            read_until(connection, b"data: ")
        connection.shutdown(socket.SHUT_WR)
        # The probe shows that the gateway knows about it.
        received = read_until(connection, b"keep-alive" if stream and begun else b"100 Continue")
        gate.release(3)
        while part := connection.recv(65536):
            received += part
    assert b"[DONE]" in received if stream else b'"completion_tokens":3' in received
    assert fake.cancels.empty()


def test_a_cancelled_grpc_call_cancels_at_the_target(gateway: GatewayThread, fake: FakeTarget) -> None:
    fake.script = lambda request: Script([[9]], finish=False)
    with grpc.insecure_channel(gateway.stack.grpc_address) as channel:
        request = gateway_pb2.CompleteRequest(text="x", options=gateway_pb2.GenerationOptions(max_tokens=100))
        call = gateway_pb2_grpc.InferenceStub(channel).Complete(request, timeout=TIMEOUT_S)
        next(call)
        call.cancel()
        assert fake.cancels.get(timeout=TIMEOUT_S).request_id == fake.seen[-1].request_id


@pytest.mark.parametrize("leaves", [True, False])
def test_tokens_of_a_broken_stream_are_in_the_metric(
    make_gateway: MakeGateway, fake: FakeTarget, leaves: bool
) -> None:
    """The client leaves after three tokens, or the target fails after three tokens."""
    error = None if leaves else OutriderError("lost", reason="target_lost")
    fake.script = lambda request: Script([[9, 10, 11]], error=error, finish=False)
    gateway = make_gateway()
    connection = open_stream(gateway, {"prompt": [9], "max_tokens": 100, "stream": True, "ignore_eos": True})
    with connection:
        read_until(connection, b"data: " if leaves else b"[DONE]")
    gateway.call(gateway.server.core.lifecycle.idle.wait())
    text = httpx.get(f"{gateway.stack.base_url}/metrics", timeout=TIMEOUT_S).text
    assert 'outrider_generation_tokens_total{model="toy"} 3.0' in text.splitlines()


def test_one_failed_choice_cancels_the_others(fake: FakeTarget, post: Post) -> None:
    def script(request):
        if request.sampling.choice_index == 1:
            return Script([[9]], error=InvalidRequestError("poisoned", reason="nan_logits"))
        return Script([[9]], finish=False)

    fake.script = script
    response = post("/v1/completions", prompt=[9], max_tokens=100, n=3)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "nan_logits")
    assert {fake.cancels.get(timeout=TIMEOUT_S).request_id[-1] for _ in range(2)} == {"0", "2"}


def test_an_error_before_the_first_token_is_a_status(fake: FakeTarget, post: Post) -> None:
    error = OutriderError("full", code=ErrorCode.RESOURCE_EXHAUSTED, reason="overloaded", retry_after_s=2.2)
    fake.script = lambda request: Script([], error=error)
    for stream in (False, True):
        response = post("/v1/completions", prompt=[9], max_tokens=5, stream=stream)
        assert (response.status_code, response.headers["Retry-After"]) == (429, "3")
        assert response.json()["error"]["message"] == "full"


def test_an_error_in_mid_stream_is_an_event_before_done(fake: FakeTarget, post: Post) -> None:
    fake.script = lambda request: Script([[40], [41]], error=OutriderError("broken", reason="nan_logits"))
    events = events_of(post("/v1/completions", prompt=[9], max_tokens=5, stream=True))
    assert events[-1]["error"] == {
        "message": "broken",
        "type": "server_error",
        "param": None,
        "code": "nan_logits",
        "status": 500,
    }
    assert all("choices" in event for event in events[:-1])


def test_a_silent_stream_is_kept_alive_by_comments(
    make_gateway: Callable[..., GatewayThread], fake: FakeTarget
) -> None:
    gate = threading.Semaphore(0)
    fake.script = lambda request: Script([[40], [41]], gate=gate)
    gateway = make_gateway(keep_alive_s=0.05)
    connection = open_stream(gateway, {"prompt": [9], "max_tokens": 2, "stream": True})
    assert b"text/event-stream" in read_until(connection, b": keep-alive\n\n")
    gate.release()
    read_until(connection, b"[DONE]")
    connection.close()


def test_the_deadline_of_the_client_ends_the_request(gateway: GatewayThread, fake: FakeTarget) -> None:
    fake.script = lambda request: Script([[9]], finish=False)
    body = {"prompt": [9], "max_tokens": 5}
    response = httpx.post(
        f"{gateway.stack.base_url}/v1/completions", json=body, headers={"X-Request-Deadline-Ms": "200"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert fake.cancels.get(timeout=TIMEOUT_S)
    # The target receives the time left until the deadline.
    assert 1 <= fake.seen[-1].timeout_ms <= 200


def test_the_deadline_of_a_grpc_call_travels_too(gateway: GatewayThread, fake: FakeTarget) -> None:
    fake.script = lambda request: Script([[9]], finish=False)
    with grpc.insecure_channel(gateway.stack.grpc_address) as channel:
        call = gateway_pb2_grpc.InferenceStub(channel).Complete(
            gateway_pb2.CompleteRequest(text="x"), timeout=0.5
        )
        next(call)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 1 <= fake.seen[-1].timeout_ms <= 500
    assert fake.cancels.get(timeout=TIMEOUT_S)


@pytest.fixture
def flooding(tokenizer: Tokenizer) -> Iterator[FakeTarget]:
    """A target whose streams exceed all buffers between it and a client that does not read."""
    target = FakeTarget(tokenizer.get_vocab_size(), max_model_len=1_000_000, trace_nodes=100)
    target.address = target.start()
    yield target
    target.stop()


FLOOD = {"prompt": [9], "max_tokens": 900_000, "stream": True, "speculation": {"trace": True}}


def flood(request) -> Script:
    return Script([[40]] * 100_000) if request.max_new_tokens == FLOOD["max_tokens"] else Script([[41], [42]])


def test_a_slow_reader_is_paused_and_resumed_while_others_go_on(
    make_gateway: Callable[..., GatewayThread], flooding: FakeTarget
) -> None:
    flooding.script = flood
    gateway = make_gateway(target=flooding.address, slow_reader_bytes=16 * 1024)
    connection = open_stream(gateway, FLOOD, receive_buffer=1 << 18)
    try:
        paused = flooding.pauses.get(timeout=TIMEOUT_S)
        response = httpx.post(
            f"{gateway.stack.base_url}/v1/completions",
            json={"prompt": [9], "max_tokens": 2},
            timeout=TIMEOUT_S,
        )
        assert response.json()["choices"][0]["finish_reason"] == "length"
        while flooding.resumes.empty():
            assert connection.recv(1 << 20)
        assert flooding.resumes.get(timeout=TIMEOUT_S) == paused
    finally:
        connection.close()
    # Closing the connection also cancels the sequence on the target.
    assert flooding.cancels.get(timeout=TIMEOUT_S).request_id == paused


def test_a_reader_that_never_reads_is_aborted(
    make_gateway: Callable[..., GatewayThread], flooding: FakeTarget
) -> None:
    flooding.script = flood
    gateway = make_gateway(target=flooding.address, slow_reader_bytes=16 * 1024, slow_reader_timeout_s=0.3)
    connection = open_stream(gateway, FLOOD, receive_buffer=4096)
    try:
        paused = flooding.pauses.get(timeout=TIMEOUT_S)
        assert flooding.cancels.get(timeout=TIMEOUT_S).request_id == paused
        # Data sent before still arrives, followed by the error and the end.
        assert b'"code":"slow_reader"' in read_until(connection, b"[DONE]")[-2000:]
    finally:
        connection.close()
