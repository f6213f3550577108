"""Device-resident rounds with a draft in another process: the output equals plain decoding.

The output stays equal even if the draft sends wrong bytes, dies, or stops.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.drafts.draft_process import DraftProcess
from support.engine.target_harness import Harness, assert_same_tokens, generate_plain, load_toy, make_harness
from support.models.toys import make_toy_pair, make_toy_target
from support.suite.compute_device import DEVICE, GRAPHS, ON_GPU

from outrider.services.target.draft_client.link import TargetIdentity
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import DrafterState

torch.set_num_threads(1)
VOCAB = 64
AHEAD = LoopPlan(lookahead=1, drafts_on_device=True)
FAULT_S = 3.0 if ON_GPU else 1.0
"""Fault deadline of the draft. On a GPU it includes the time to compile a kernel for a new size."""
PATIENT_S = 16.0
"""Fault deadline where nothing is wrong. No sequence is then given up because the machine is busy."""
PROMPT = [1, 2, 3, 4]
BOUND_S = 20.0
"""Time limit of a run. A run delayed by more than a few fault deadlines is considered hung."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_toy_pair(
        tmp_path_factory.mktemp("pair"), VOCAB, vocab_size=VOCAB, seed=3, planted=3.0, num_layers=3
    )


@pytest.fixture(scope="module")
def decoder(folders: tuple[Path, Path]) -> Decoder:
    return load_toy(folders[0])


@pytest.fixture(scope="module", params=["ipc://", "unix:"], ids=["ipc", "grpc"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def draft(
    folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, scheme: str
) -> Iterator[DraftProcess]:
    process = DraftProcess(tmp_path_factory.mktemp("draft"), scheme, *folders)
    yield process
    assert process.stop() == 0, process.output()


def follow(draft: DraftProcess, decoder: Decoder, fault_s: float = FAULT_S) -> RemoteDrafter:
    """Return a connected drafter."""
    drafter = RemoteDrafter(
        draft.address,
        TargetIdentity.of(decoder),
        decoder.weight,
        DEVICE,
        fault_deadline_s=fault_s,
        on_device=True,
    )
    deadline, pause = time.monotonic() + 120.0, threading.Event()
    while drafter.state() is not DrafterState.ON:
        assert time.monotonic() < deadline, draft.output()
        pause.wait(0.005)
    return drafter


@pytest.fixture
def drafter(draft: DraftProcess, decoder: Decoder) -> Iterator[RemoteDrafter]:
    made = follow(draft, decoder, PATIENT_S)
    yield made
    made.shutdown()


def run(harness: Harness, at: dict[int, Callable[[], object]] | None = None) -> int:
    """Run to the end.

    Args:
        harness: The engine to run.
        at: Number of steps with rounds on the device → action to do then.

    Returns:
        The number of steps that found their rounds on the device.
    """
    steps = 0
    while harness.engine.has_work():
        harness.step()
        if harness.engine.on_device:
            steps += 1
            (at or {}).get(steps, lambda: None)()
    harness.check_idle()
    return steps


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 1, 6), (3, 2, 8), (5, 4, 16)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_on_the_device_are_those_of_the_hosts_way(
    decoder: Decoder, drafter: RemoteDrafter, shape: tuple[int, int, int], temperature: float, graphs: bool
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=9)
    plain = generate_plain(decoder, NoDrafter(), PROMPT, 60, sampling=sampling)
    rounds = []
    for plan in (None, AHEAD):
        harness = make_harness(decoder, drafter, plan=plan, graphs=GraphCache(DEVICE, graphs))
        harness.submit(PROMPT, 60, request_id="a", sampling=sampling, shape=shape)
        steps = run(harness)
        assert (steps > 5) == (plan is not None)
        assert_same_tokens(decoder, PROMPT, plain, harness.sink.tokens["a"], sampling)
        report = harness.sink.finished["a"].speculation
        assert report.fallback_reason == ""
        rounds.append((report.rounds, report.accepted_tokens))
    assert rounds[0] == rounds[1]
    assert rounds[0][1] > 0


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("seed", range(3))
def test_batches_that_change(decoder: Decoder, drafter: RemoteDrafter, seed: int, graphs: bool) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 17, 60]))] for _ in range(8)]
    samplings = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]), top_p=rng.choice([1.0, 0.9]), seed=rng.randrange(1 << 64)
        )
        for _ in prompts
    ]
    lengths = [rng.randrange(1, 50) for _ in prompts]
    limits = {"max_running": rng.choice([2, 4]), "prefill_chunk": 64, "num_pages": rng.choice([30, 60])}
    harness = make_harness(decoder, drafter, plan=AHEAD, graphs=GraphCache(DEVICE, graphs), **limits)
    waiting, steps = list(range(len(prompts))), 0
    while waiting or harness.engine.has_work():
        if waiting and rng.random() < 0.2:
            index = waiting.pop(0)
            mode = rng.choice(
                [SpeculationMode.ON, SpeculationMode.ON, SpeculationMode.AUTO, SpeculationMode.OFF]
            )
            shape = (5, 4, 16) if rng.random() < 0.7 else (3, 1, 4)
            harness.submit(
                prompts[index],
                lengths[index],
                request_id=str(index),
                sampling=samplings[index],
                mode=mode,
                shape=shape,
            )
        if harness.engine.has_work():
            harness.step()
            steps += harness.engine.on_device
    harness.check_idle()
    assert not harness.sink.failed
    assert steps > 0
    for index, prompt in enumerate(prompts):
        plain = generate_plain(decoder, NoDrafter(), prompt, lengths[index], sampling=samplings[index])
        assert_same_tokens(decoder, prompt, plain, harness.sink.tokens[str(index)], samplings[index])


def test_whatever_bytes_a_draft_hands_over_no_token_changes(
    decoder: Decoder, folders: tuple[Path, Path], tmp_path: Path, scheme: str
) -> None:
    draft = DraftProcess(tmp_path, scheme, *folders, spoils=True)
    drafter = follow(draft, decoder)
    try:
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(temperature=temperature, seed=4)
            harness = make_harness(decoder, drafter, plan=AHEAD)
            harness.submit(PROMPT, 150, request_id="a", sampling=sampling, shape=(5, 4, 16))
            assert run(harness) > 20
            plain = generate_plain(decoder, NoDrafter(), PROMPT, 150, sampling=sampling)
            assert_same_tokens(decoder, PROMPT, plain, harness.sink.tokens["a"], sampling)
    finally:
        drafter.shutdown()
        draft.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_draft_that_dies_or_stops_in_rounds_costs_no_token_and_is_used_again(
    decoder: Decoder, folders: tuple[Path, Path], tmp_path: Path, scheme: str, number: signal.Signals
) -> None:
    draft = DraftProcess(tmp_path, scheme, *folders)
    drafter = follow(draft, decoder)
    revived: list[DraftProcess] = []
    try:
        plain = generate_plain(decoder, NoDrafter(), PROMPT, 300)
        harness = make_harness(decoder, drafter, plan=AHEAD)
        harness.submit(PROMPT, 300, request_id="a", shape=(5, 4, 16))
        started = time.monotonic()
        assert run(harness, {4: lambda: draft.send_signal(number)}) >= 4
        assert time.monotonic() - started < BOUND_S
        assert_same_tokens(decoder, PROMPT, plain, harness.sink.tokens["a"], SamplingParams(temperature=0.0))
        if number is signal.SIGSTOP:
            draft.send_signal(signal.SIGCONT)
        else:
            draft.wait()
            revived.append(DraftProcess(tmp_path, scheme, *folders))
        again = 0
        deadline = time.monotonic() + 60.0
        while not again and time.monotonic() < deadline:
            drafter.feature_spec()
            harness = make_harness(decoder, drafter, plan=AHEAD)
            harness.submit(PROMPT, 100, request_id="b", shape=(5, 4, 16))
            again = run(harness)
            if not harness.sink.finished["b"].speculation.accepted_tokens:
                again = 0
            assert harness.sink.tokens["b"] == plain[:100]
        assert again > 0, "rounds must return to the device"
    finally:
        drafter.shutdown()
        for process in [draft, *revived]:
            process.stop()


@pytest.mark.parametrize("plan", [None, AHEAD], ids=["host", "device"])
def test_a_stopped_draft_holds_up_only_the_row_that_waits_for_it(
    decoder: Decoder, folders: tuple[Path, Path], tmp_path: Path, scheme: str, plan: LoopPlan | None
) -> None:
    draft = DraftProcess(tmp_path, scheme, *folders)
    drafter = follow(draft, decoder, fault_s=1000.0)  # the sequence waits for at least two minutes
    try:
        plain = generate_plain(decoder, NoDrafter(), PROMPT, 300)
        harness = make_harness(decoder, drafter, plan=plan)
        # 1. Run alone, until the waits follow measured times.
        harness.submit(PROMPT, 100, request_id="first", shape=(2, 1, 3))
        harness.run()
        # 2. Stop the draft while sequences of both kinds decode.
        harness.submit(PROMPT, 300, request_id="on", shape=(2, 1, 3))
        harness.submit(PROMPT, 300, request_id="off", mode=SpeculationMode.OFF)
        while len(harness.sink.tokens.get("on", [])) < 20:
            harness.step()
        draft.send_signal(signal.SIGSTOP)
        while "off" not in harness.sink.finished:
            harness.step()
        assert "on" not in harness.sink.finished
        stands_at = len(harness.sink.tokens["on"])
        harness.step()
        assert len(harness.sink.tokens["on"]) == stands_at
        # 3. Let the draft go on.
        draft.send_signal(signal.SIGCONT)
        harness.run()
        for name in ("on", "off"):
            assert_same_tokens(
                decoder, PROMPT, plain, harness.sink.tokens[name], SamplingParams(temperature=0.0)
            )
    finally:
        drafter.shutdown()
        draft.stop()


@pytest.mark.parametrize("plan", [None, AHEAD], ids=["host", "device"])
def test_a_draft_that_stops_again_and_again_costs_no_token(
    decoder: Decoder, folders: tuple[Path, Path], tmp_path: Path, scheme: str, plan: LoopPlan | None
) -> None:
    draft = DraftProcess(tmp_path, scheme, *folders)
    drafter = follow(draft, decoder)
    modes = [SpeculationMode.ON, SpeculationMode.AUTO, SpeculationMode.OFF, SpeculationMode.ON]
    samplings = [SamplingParams(temperature=float(index % 2), seed=index) for index in range(len(modes))]
    try:
        harness = make_harness(decoder, drafter, plan=plan)
        for index, (mode, sampling) in enumerate(zip(modes, samplings, strict=True)):
            shape = (3, 2, 8) if index else (2, 1, 3)
            harness.submit(PROMPT, 150, request_id=str(index), mode=mode, sampling=sampling, shape=shape)
        steps = 0
        while harness.engine.has_work():
            harness.step()
            steps += 1
            if steps % 20 == 10:
                draft.send_signal(signal.SIGSTOP)
            elif steps % 20 == 0:
                draft.send_signal(signal.SIGCONT)
        harness.check_idle()
        for index, sampling in enumerate(samplings):
            plain = generate_plain(decoder, NoDrafter(), PROMPT, 150, sampling=sampling)
            assert_same_tokens(decoder, PROMPT, plain, harness.sink.tokens[str(index)], sampling)
    finally:
        draft.send_signal(signal.SIGCONT)
        drafter.shutdown()
        draft.stop()


def test_a_draft_model_without_features(
    decoder: Decoder, folders: tuple[Path, Path], tmp_path: Path, scheme: str
) -> None:
    small = make_toy_target(
        tmp_path / "small", vocab_size=VOCAB, hidden_size=24, num_layers=2, head_dim=8, seed=4
    )
    draft = DraftProcess(tmp_path, scheme, folders[0], small)
    drafter = follow(draft, decoder, PATIENT_S)
    try:
        sampling = SamplingParams(temperature=1.0, seed=3)
        plain = generate_plain(decoder, NoDrafter(), PROMPT, 60, sampling=sampling)
        rounds = []
        for plan in (None, AHEAD):
            harness = make_harness(decoder, drafter, plan=plan)
            harness.submit(PROMPT, 60, request_id="a", sampling=sampling, shape=(3, 2, 8))
            assert (run(harness) > 5) == (plan is not None)
            assert harness.sink.tokens["a"] == plain
            report = harness.sink.finished["a"].speculation
            assert report.fallback_reason == "", draft.output()
            rounds.append((report.rounds, report.accepted_tokens))
        assert rounds[0] == rounds[1]
    finally:
        drafter.shutdown()
        draft.stop()


def test_a_target_that_leaves_in_rounds_leaves_nothing_behind(decoder: Decoder, draft: DraftProcess) -> None:
    first = follow(draft, decoder)
    harness = make_harness(decoder, first, plan=AHEAD)
    harness.submit(PROMPT, 300, request_id="a", shape=(5, 4, 16))
    while not harness.engine.on_device:
        harness.step()
    harness.step()
    first.shutdown()  # while its rounds are running
    second = follow(draft, decoder)
    try:
        harness = make_harness(decoder, second, plan=AHEAD)
        harness.submit(PROMPT, 60, request_id="b", shape=(5, 4, 16))
        assert run(harness) > 5
        assert harness.sink.tokens["b"] == generate_plain(decoder, NoDrafter(), PROMPT, 60)
    finally:
        second.shutdown()


def test_two_targets_share_a_draft_by_way_of_the_host(decoder: Decoder, draft: DraftProcess) -> None:
    """Rounds on the device would make the draft's stream wait for one target, and thereby delay the other."""
    drafters = [follow(draft, decoder) for _ in range(2)]
    try:
        harnesses = [make_harness(decoder, drafter, plan=AHEAD) for drafter in drafters]
        harnesses[0].submit(PROMPT, 200, request_id="a", shape=(5, 4, 16))
        while not harnesses[0].engine.on_device:
            harnesses[0].step()
        harnesses[1].submit(PROMPT, 100, request_id="a", shape=(5, 4, 16))
        while any(harness.engine.has_work() for harness in harnesses):
            for harness in harnesses:
                if harness.engine.has_work():
                    harness.step()
        plain = generate_plain(decoder, NoDrafter(), PROMPT, 200)
        assert harnesses[0].sink.tokens["a"] == plain
        assert harnesses[1].sink.tokens["a"] == plain[:100]
    finally:
        for drafter in drafters:
            drafter.shutdown()
