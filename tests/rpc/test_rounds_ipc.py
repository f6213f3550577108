"""Rounds that stay on the device with a draft behind ``ipc:``: the same trees and tokens as by way of the host, whatever the draft does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from target_harness import Harness, assert_same_tokens, generate_plain, load_toy, make_harness
from toys import make_toy_eagle3, make_toy_target

from outrider.services.draft.app import DraftService
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.device_loop import OverlapPlan
from outrider.services.target.draft_client.link import TargetIdentity
from outrider.services.target.draft_client.remote import RemoteDrafter
from outrider.services.target.drafter import NoDrafter
from outrider.services.target.request import SamplingParams
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import DrafterState

torch.set_num_threads(1)
VOCAB = 64
OVERLAP = OverlapPlan((1, 2, 4), 6)
FAULT_S = 2.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = make_toy_target(folder / "target", vocab_size=VOCAB, seed=3, planted=3.0)
    return target, make_toy_eagle3(folder / "head", target, planted=3.0, draft_vocab_size=VOCAB)


@pytest.fixture(scope="module")
def decoder(folders: tuple[Path, Path]) -> Decoder:
    return load_toy(folders[0])


@pytest.fixture
def service(folders: tuple[Path, Path], tmp_path: Path) -> Iterator[DraftService]:
    target, head = folders
    listen = f"ipc://{tmp_path}/draft.sock"
    values = {"draft": head, "target_weights": target, "device": "cpu", "threads": 1, "kv_tokens": 8192, "listen": listen}
    running = DraftService(DraftSettings.load(values))
    running.start()
    yield running
    running.stop()
    running.engine.check()
    assert running.engine.strategy.pages().held == 0


@pytest.fixture
def drafter(service: DraftService, decoder: Decoder) -> Iterator[RemoteDrafter]:
    made = RemoteDrafter(
        service.address, TargetIdentity.of(decoder), decoder.weight, torch.device("cpu"), fault_deadline_s=FAULT_S, rounds=True
    )
    wait_for(lambda: made.state() is DrafterState.ON)
    yield made
    made.shutdown()


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the state was not reached in time"
        pause.wait(0.005)


def on_device(harness: Harness) -> int:
    """Run to the end; returns how many steps found their rounds on the device."""
    steps = 0
    while harness.engine.has_work():
        harness.step()
        steps += harness.engine.on_device
    return steps


@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 1, 6), (3, 2, 8), (5, 4, 16)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_on_the_device_are_those_of_the_hosts_way(
    decoder: Decoder, drafter: RemoteDrafter, shape: tuple[int, int, int], temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=9)
    prompt = [1, 2, 3, 4]
    plain = generate_plain(decoder, NoDrafter(), prompt, 60, sampling=sampling)
    rounds = []
    for overlap in (None, OVERLAP):
        harness = make_harness(decoder, drafter, overlap=overlap)
        harness.submit(prompt, 60, request_id="a", sampling=sampling, shape=shape)
        steps = on_device(harness)
        assert (steps > 5) == (overlap is not None)
        assert_same_tokens(decoder, prompt, plain, harness.sink.tokens["a"], sampling)
        report = harness.sink.finished["a"].speculation
        assert report.fallback_reason == ""
        rounds.append((report.rounds, report.accepted_tokens))
    assert rounds[0] == rounds[1]
    assert rounds[0][1] > 0
