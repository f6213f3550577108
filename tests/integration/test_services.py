"""The services as real processes: clients that disconnect, SIGTERM, and models that cannot be loaded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import grpc
import pytest
from safetensors.torch import load_file, save_file
from support.services.stack import (
    DEMO_HEAD,
    DEMO_TARGET,
    OUTRIDER,
    PROMPTS,
    Stack,
    child_pid,
    separate,
    supervised,
)

from outrider.common.v1 import common_pb2
from outrider.draft.v1 import draft_pb2, draft_pb2_grpc
from outrider.gateway.v1 import gateway_pb2

WAIT_S = 60
ON, OFF = common_pb2.SPECULATION_MODE_ON, common_pb2.SPECULATION_MODE_OFF


def chat_request(prompt: str, max_tokens: int) -> gateway_pb2.ChatRequest:
    return gateway_pb2.ChatRequest(
        messages=[gateway_pb2.Message(role="user", content=prompt)],
        options=gateway_pb2.GenerationOptions(
            max_tokens=max_tokens, ignore_eos=True, speculation=common_pb2.SpeculationOptions(mode=ON)
        ),
    )


def test_a_disconnected_client_frees_pages_on_both_sides(stack: Stack) -> None:
    calls = [stack.client.stub.Chat(chat_request(prompt, 1500)) for prompt in PROMPTS]
    for call in calls:
        next(call)
    assert stack.stats().pages_held > 0
    for call in calls:
        call.cancel()
    stack.assert_no_page_held(2)
    with grpc.insecure_channel(stack.draft_address) as channel:
        draft = draft_pb2_grpc.DraftStub(channel)
        for _ in range(1000):
            info = draft.GetInfo(draft_pb2.GetInfoRequest(), timeout=5)
            if info.sessions == 0:
                break
    assert info.sessions == 0
    assert info.pages_held == 0
    assert info.pages_free == info.pages_total


def test_an_overlong_prompt_does_not_disturb_other_streams(stack: Stack) -> None:
    running = stack.client.stub.Chat(chat_request(PROMPTS[0], 200))
    next(running)
    with pytest.raises(grpc.RpcError) as error:
        list(stack.client.stub.Chat(chat_request("word " * 5000, 10)))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sum(len(reply.chunk.token_ids) for reply in running) > 100


def test_sigterm_lets_streams_finish_and_leaves_nothing_behind() -> None:
    with supervised() as stack:
        up = stack.processes[0]
        expected = stack.client.chat(PROMPTS[0], mode=OFF, max_tokens=300).token_ids
        first, tokens = threading.Event(), []

        def read() -> None:
            result = stack.client.chat(
                PROMPTS[0], mode=ON, max_tokens=300, on_tokens=lambda count: first.set()
            )
            tokens.extend(result.token_ids)

        reader = threading.Thread(target=read)
        reader.start()
        assert first.wait(30)
        up.popen.send_signal(signal.SIGTERM)
        reader.join(60)
        assert tokens == expected
        assert up.popen.wait(60) == 0
        with pytest.raises(ProcessLookupError):
            os.killpg(up.popen.pid, 0)


@pytest.mark.timeout(240)  # four services start one after the other
def test_services_are_reachable_again_after_their_sockets_were_removed() -> None:
    with supervised() as stack:
        up = stack.processes[0]
        expected = stack.client.chat(PROMPTS[0], mode=OFF, max_tokens=40).token_ids
        shutil.rmtree(Path(stack.target_address.removeprefix("unix:")).parent)
        # 1. Connections from before go on.
        assert stack.client.chat(PROMPTS[0], mode=OFF, max_tokens=40).token_ids == expected
        # 2. A new gateway needs a socket of the target, and the new target one of the draft.
        os.kill(child_pid(up.popen.pid, "gateway"), signal.SIGKILL)
        up.wait_serving(stack.grpc_address)
        stack.wait_drafting(WAIT_S)
        assert stack.client.chat(PROMPTS[0], mode=ON, max_tokens=40).token_ids == expected


def test_a_draft_table_shorter_than_the_prompt_changes_nothing(tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(DEMO_HEAD, head)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    prompt = " ".join(PROMPTS)
    with separate(head=head) as stack:
        stack.wait_drafting(30)
        plain = stack.client.chat(prompt, mode=OFF, max_tokens=64)
        drafted = stack.client.chat(prompt, mode=ON, max_tokens=64, trace=True)
    assert drafted.token_ids == plain.token_ids
    assert drafted.finished
    assert drafted.finished.usage.prompt_tokens > 32
    assert any(len(one.nodes) > 1 for one in drafted.rounds)


@pytest.fixture
def target_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_TARGET, tmp_path / "target"))


@pytest.fixture
def head_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_HEAD, tmp_path / "head"))


def refused(*arguments: str) -> str:
    """Run a command that must fail quickly, and return its output."""
    done = subprocess.run([*OUTRIDER, *arguments], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode != 0
    return done.stdout + done.stderr


def test_a_missing_tensor_is_named(head_copy: Path) -> None:
    weights = load_file(head_copy / "model.safetensors")
    del weights["midlayer.self_attn.k_proj.weight"]
    save_file(weights, head_copy / "model.safetensors")
    output = refused(
        "serve", "draft", "--draft", str(head_copy), "--target-weights", str(DEMO_TARGET), "--device", "cpu"
    )
    assert "k_proj" in output


def test_a_missing_shard_is_named(target_copy: Path) -> None:
    shard = sorted(target_copy.glob("*.safetensors"))[-1]
    shard.unlink()
    output = refused("serve", "target", "--model", str(target_copy), "--device", "cpu")
    assert shard.name in output


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    output = refused("up", "--target", str(tmp_path / "nowhere"))
    assert "nowhere" in output
    assert "--target" in output


def test_a_head_that_does_not_fit_names_the_key(head_copy: Path) -> None:
    config = json.loads((head_copy / "config.json").read_text())
    (head_copy / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    output = refused(
        "serve", "draft", "--draft", str(head_copy), "--target-weights", str(DEMO_TARGET), "--device", "cpu"
    )
    assert "fc.weight" in output or "hidden_size" in output
