"""Outputs with a form, drafted by another process, beside outputs whose rounds stay on the devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.drafts.draft_process import DraftProcess
from support.engine.target_harness import assert_same_tokens, generate_plain, load_toy, make_harness
from support.grammars.toy_grammar import ToyGrammar
from support.models.toys import make_toy_pair
from support.suite.compute_device import DEVICE

from outrider.services.target.draft_client.link import TargetIdentity
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.model.packed_batch import Entry
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import DrafterState

torch.set_num_threads(1)
VOCAB, ENDS = 64, (5, 9)
PATIENT_S = 16.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_toy_pair(
        tmp_path_factory.mktemp("pair"), VOCAB, vocab_size=VOCAB, seed=3, planted=3.0, num_layers=3
    )


@pytest.fixture(scope="module")
def decoder(folders: tuple[Path, Path]) -> Decoder:
    return load_toy(folders[0])


@pytest.fixture(params=["ipc://", "unix:"], ids=["ipc", "grpc"])
def drafter(
    request: pytest.FixtureRequest, folders: tuple[Path, Path], decoder: Decoder, tmp_path: Path
) -> Iterator[RemoteDrafter]:
    process = DraftProcess(tmp_path, str(request.param), *folders)
    identity = TargetIdentity.of(decoder)
    made = RemoteDrafter(
        process.address, identity, decoder.weight, DEVICE, fault_deadline_s=PATIENT_S, on_device=True
    )
    due, pause = time.monotonic() + 120, threading.Event()
    while made.state() is not DrafterState.ON or not made.slots._accepted:
        assert time.monotonic() < due, "the draft did not connect"
        made.feature_spec()
        pause.wait(0.005)
    yield made
    made.shutdown()
    assert process.stop() == 0, process.output()


def test_a_request_with_a_form_joins_and_leaves_an_exchange(decoder: Decoder, drafter: RemoteDrafter) -> None:
    plan = LoopPlan(lookahead=1, drafts_on_device=True)
    harness = make_harness(decoder, drafter, plan=plan, max_running=4)
    asked = []
    for index in range(6):
        grammar = ToyGrammar(VOCAB, ENDS, index) if index % 2 else None
        asked.append(([1, 2, 3 + index], SamplingParams(0.5 * (index % 3), seed=index), grammar))
    on_device = 0
    for index, (prompt, sampling, grammar) in enumerate(asked):
        harness.submit(prompt, 40, request_id=str(index), sampling=sampling, shape=(5, 1, 6), grammar=grammar)
        for _ in range(8):
            harness.step()
            on_device += harness.engine.on_device
    while harness.engine.has_work():
        harness.step()
        on_device += harness.engine.on_device
    assert not harness.sink.failed
    assert on_device > 0
    for index, (prompt, sampling, grammar) in enumerate(asked):
        plain = generate_plain(decoder, NoDrafter(), prompt, 40, sampling=sampling, grammar=grammar)
        found = harness.sink.tokens[str(index)]
        if grammar is None:
            assert_same_tokens(decoder, prompt, plain, found, sampling)
        else:
            assert found == plain


@pytest.mark.parametrize("lookahead", [0, 1])
def test_outputs_with_forms_that_do_not_draft_leave_the_drafts_of_others_on_the_devices(
    decoder: Decoder, drafter: RemoteDrafter, lookahead: int
) -> None:
    plan = LoopPlan(lookahead=lookahead, drafts_on_device=True)
    harness = make_harness(decoder, drafter, plan=plan, max_running=6)
    drafting = [([1, 2, 3 + index], SamplingParams(0.6 * (index % 2), seed=index)) for index in range(4)]
    formed = [([9, 9 + index], SamplingParams(0.8 * index, seed=index), index + 1) for index in range(3)]
    runner = harness.engine.step_runner
    launch, mixed = runner.launch, 0

    def noted(entries: Sequence[Entry], draft: object) -> object:
        nonlocal mixed
        forms = [entry.sequence.form is not None for entry in entries]
        mixed += any(forms) and any(entry.shape.drafts for entry in entries)
        return launch(entries, draft)  # type: ignore[arg-type]

    with (
        mock.patch.object(drafter, "propose", wraps=drafter.propose) as through_host,
        mock.patch.object(runner, "launch", noted),
    ):
        for index, (prompt, sampling) in enumerate(drafting):
            harness.submit(prompt, 100, request_id=f"drafts {index}", sampling=sampling, shape=(3, 1, 4))
        for index, (prompt, sampling, seed) in enumerate(formed):
            for _ in range(4):
                harness.step()
            harness.submit(
                prompt,
                40,
                request_id=f"form {index}",
                sampling=sampling,
                mode=SpeculationMode.OFF,
                grammar=ToyGrammar(VOCAB, ENDS, seed),
            )
        harness.run()
    assert through_host.call_count == 0
    assert mixed > 15
    assert not harness.sink.failed
    for index, (prompt, sampling) in enumerate(drafting):
        plain = generate_plain(decoder, NoDrafter(), prompt, 100, sampling=sampling)
        found = harness.sink.tokens[f"drafts {index}"]
        assert_same_tokens(decoder, prompt, plain, found, sampling)
        assert harness.sink.finished[f"drafts {index}"].speculation.accepted_tokens > 0
    for index, (prompt, sampling, seed) in enumerate(formed):
        grammar = ToyGrammar(VOCAB, ENDS, seed)
        plain = generate_plain(decoder, NoDrafter(), prompt, 40, sampling=sampling, grammar=grammar)
        assert harness.sink.tokens[f"form {index}"] == plain
