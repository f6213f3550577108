"""Real EAGLE-3 heads, random or planted, behind real gRPC: all output equals plain decoding."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.engine.target_harness import assert_same_tokens, generate_plain, load_toy, make_harness
from support.models.toys import make_toy_eagle3, make_toy_target
from support.suite.compute_device import DEVICE

from outrider.services.draft.app import DraftService
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.draft_client.link import TargetIdentity
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import DrafterState

pytestmark = pytest.mark.xdist_group("equality_draft")

torch.set_num_threads(1)
VOCAB = 64
ATTEMPTS = 5
SHAPES = [(1, 1, 2), (5, 1, 6), (3, 2, 8), (5, 4, 16), (6, 8, 40)]


@dataclass
class Pair:
    """A target, and a drafter that is connected to its head."""

    decoder: Decoder
    drafter: RemoteDrafter
    planted: bool


def wait_until_on(drafter: RemoteDrafter) -> None:
    """Wait until the draft is ready; it may have to compile its kernels first."""
    pause = threading.Event()
    until = time.monotonic() + 120.0
    while drafter.state() is not DrafterState.ON:
        assert time.monotonic() < until, f"the drafter is {drafter.state()}: {drafter.refusal()}"
        pause.wait(0.01)


def all_drafted(decoder: Decoder, drafter: RemoteDrafter) -> bool:
    """Return whether trees of every shape came in time.

    A GPU compiles kernels for shapes beyond those of the warm-up when they are first requested.
    """
    harness = make_harness(decoder, drafter)
    for index, shape in enumerate(SHAPES):
        harness.submit([1], 8, request_id=str(index), shape=shape, trace=True)
    harness.run()
    return all(
        any(len(one.nodes) > 1 for one in harness.sink.rounds[str(index)]) for index in range(len(SHAPES))
    )


@pytest.fixture(scope="module", params=[0.0, 3.0], ids=["random", "planted"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    target: Path = make_toy_target(
        folder / "target", vocab_size=VOCAB, seed=3, planted=request.param, num_layers=3
    )
    head: Path = make_toy_eagle3(
        folder / "head", target, planted=request.param, draft_vocab_size=VOCAB if request.param else 32
    )
    listen = f"unix:{folder}/d.sock"
    weights = target if request.param else None  # without weights, the head gets the embedding over gRPC
    where = {"listen": listen, "device": str(DEVICE), "dtype": "float32", "threads": 1, "kv_tokens": 16384}
    service = DraftService(DraftSettings.load({"draft": head, "target_weights": weights, **where}))
    service.start()
    decoder = load_toy(target)
    drafter = RemoteDrafter(listen, TargetIdentity.of(decoder), decoder.weight, DEVICE, fault_deadline_s=10.0)
    for _ in range(ATTEMPTS):
        wait_until_on(drafter)
        if all_drafted(decoder, drafter):
            break
    yield Pair(decoder, drafter, request.param > 0)
    drafter.shutdown()
    service.stop()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 2, 17, 200, 500])
def test_output_is_that_of_plain_decoding(pair: Pair, temperature: float, length: int) -> None:
    rng = random.Random(length)
    prompt = [rng.randrange(VOCAB) for _ in range(length)]
    sampling = SamplingParams(temperature=temperature, seed=length)
    plain = generate_plain(pair.decoder, NoDrafter(), prompt, 30, sampling=sampling)
    harness = make_harness(pair.decoder, pair.drafter, prefill_chunk=128)
    for index, shape in enumerate(SHAPES):
        harness.submit(prompt, 30, request_id=str(index), sampling=sampling, shape=shape, trace=True)
    harness.run()
    for index, (_depth, topk, max_nodes) in enumerate(SHAPES):
        assert_same_tokens(pair.decoder, prompt, plain, harness.sink.tokens[str(index)], sampling)
        rounds = harness.sink.rounds[str(index)]
        assert any(len(one.nodes) == max_nodes for one in rounds), "full-size trees must be verified"
        if topk == 1:
            assert all(
                [node.parent for node in one.nodes] == list(range(-1, len(one.nodes) - 1)) for one in rounds
            )


def test_a_head_that_knows_its_target_is_accepted_often(pair: Pair) -> None:
    harness = make_harness(pair.decoder, pair.drafter)
    harness.submit([1, 2, 3, 4], 60, request_id="a", shape=(5, 4, 16))
    harness.run()
    accept_length = harness.sink.finished["a"].speculation.accept_length
    print(f"accept length {accept_length:.2f}")
    assert accept_length > 4.0 if pair.planted else accept_length < 2.0


@pytest.mark.parametrize("seed", range(2))
def test_batches_that_change_do_not_change_anybodys_output(pair: Pair, seed: int) -> None:
    rng = random.Random(seed)
    count = 8
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 17, 60, 150]))] for _ in range(count)]
    samplings = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]), top_p=rng.choice([1.0, 0.9]), seed=rng.randrange(1 << 64)
        )
        for _ in prompts
    ]
    lengths = [rng.randrange(1, 50) for _ in prompts]
    plain = [
        generate_plain(pair.decoder, NoDrafter(), prompt, length, sampling=sampling)
        for prompt, length, sampling in zip(prompts, lengths, samplings, strict=True)
    ]
    harness = make_harness(
        pair.decoder, pair.drafter, max_running=rng.choice([3, 8]), prefill_chunk=64, num_pages=60
    )
    waiting = list(range(count))
    while waiting or harness.engine.has_work():
        if waiting and rng.random() < 0.4:
            index = waiting.pop(0)
            mode = rng.choice([SpeculationMode.ON, SpeculationMode.AUTO, SpeculationMode.OFF])
            harness.submit(
                prompts[index],
                lengths[index],
                request_id=str(index),
                sampling=samplings[index],
                mode=mode,
                shape=rng.choice(SHAPES),
            )
        if harness.engine.has_work():
            harness.step()
    harness.check_idle()
    assert not harness.sink.failed
    for index, prompt in enumerate(prompts):
        assert_same_tokens(
            pair.decoder, prompt, plain[index], harness.sink.tokens[str(index)], samplings[index]
        )
