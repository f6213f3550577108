"""MTP layers in another process: rounds on their device propose the same as rounds through the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.drafts.draft_process import DraftProcess
from support.engine.target_harness import assert_same_tokens, generate_plain, load_toy, make_harness
from support.models import toy_mtp
from support.suite.compute_device import DEVICE

from outrider.services.target.draft_client.link import TargetIdentity
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import DrafterState

torch.set_num_threads(1)
PLANS = [None, LoopPlan(lookahead=1, drafts_on_device=True)]
PROMPTS, LENGTHS = [[1, 2, 3, 4], [9, 8, 7], [5], [6, 1, 6, 1, 6]], [60, 12, 25, 43]
PATIENT_S = 16.0
"""Fault deadline of the draft. It is long, so that no sequence is given up because the machine is busy."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = toy_mtp.train(layers=1, mtp_layers=2, steps=60)
    return toy_mtp.save(model, tmp_path_factory.mktemp("mimo"))


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load_toy(folder)


@pytest.fixture(scope="module")
def draft(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DraftProcess]:
    process = DraftProcess(tmp_path_factory.mktemp("draft"), "ipc://", folder, folder)
    yield process
    assert process.stop() == 0, process.output()


@pytest.fixture
def drafter(draft: DraftProcess, decoder: Decoder) -> Iterator[RemoteDrafter]:
    made = RemoteDrafter(
        draft.address,
        TargetIdentity.of(decoder),
        decoder.weight,
        DEVICE,
        fault_deadline_s=PATIENT_S,
        on_device=True,
    )
    deadline, pause = time.monotonic() + 120, threading.Event()
    while made.state() is not DrafterState.ON:
        assert time.monotonic() < deadline, draft.output()
        pause.wait(0.005)
    yield made
    made.shutdown()


@pytest.mark.parametrize("shape", [(3, 1, 4), (5, 4, 16)])
def test_rounds_on_the_device_draft_the_same_in_a_batch_that_shrinks(
    decoder: Decoder, drafter: RemoteDrafter, shape: tuple[int, int, int]
) -> None:
    reports = []
    for plan in PLANS:
        harness = make_harness(decoder, drafter, plan=plan)
        for index, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
            harness.submit(prompt, length, request_id=str(index), shape=shape)
        on_device = 0
        while harness.engine.has_work():
            harness.step()
            on_device += harness.engine.on_device
        harness.check_idle()
        assert (on_device > 2) == (plan is not None)
        for index, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
            plain = generate_plain(decoder, NoDrafter(), prompt, length)
            assert_same_tokens(decoder, prompt, plain, harness.sink.tokens[str(index)])
        found = [harness.sink.finished[str(index)].speculation for index in range(len(PROMPTS))]
        assert [report.fallback_reason for report in found] == [""] * len(PROMPTS), "no round lacked its tree"
        reports.append([(report.rounds, report.accepted_tokens) for report in found])
    assert reports[0] == reports[1]
    assert sum(accepted for _, accepted in reports[0]) > 0
