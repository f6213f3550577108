"""Drafting strategies other than heads, each as a service behind the target's remote drafter over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.engine.target_harness import assert_same_tokens, generate_plain, load_toy, make_harness
from support.models.toy_mtp import Model, save
from support.models.toys import make_toy_target

from outrider.services.draft.app import DraftService
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.draft_client.link import TargetIdentity
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.base.generation import SamplingParams
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import DrafterState

torch.set_num_threads(1)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], list(range(30))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    return save(Model(2, 2), tmp_path_factory.mktemp("mimo"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Decoder:
    return load_toy(folder)


@contextmanager
def serving(tmp_path: Path, **settings: object) -> Iterator[DraftService]:
    """Run a draft service, and check after it has stopped that nothing leaked."""
    values = {"listen": f"unix:{tmp_path}/draft.sock", "device": "cpu", "kv_tokens": 4096, **settings}
    service = DraftService(DraftSettings.load(values))
    service.start()
    try:
        yield service
    finally:
        service.stop()
        service.engine.check()
        assert service.engine.strategy.pages().held == 0


def connect(service: DraftService, target: Decoder) -> RemoteDrafter:
    drafter = RemoteDrafter(
        service.address, TargetIdentity.of(target), target.weight, torch.device("cpu"), fault_deadline_s=10.0
    )
    pause = threading.Event()
    for _ in range(2000):
        if drafter.state() is DrafterState.ON or drafter.refusal() is not None:
            return drafter
        pause.wait(0.005)
    raise AssertionError("no connection")


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE", "MTP"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_is_that_of_plain_decoding(
    target: Decoder, folder: Path, tmp_path: Path, algorithm: str, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    draft = {"draft": folder} if algorithm == "STANDALONE" else {}
    with serving(tmp_path, speculative_algorithm=algorithm, target_weights=folder, **draft) as service:
        drafter = connect(service, target)
        harness = make_harness(target, drafter, prefill_chunk=8)
        for index, prompt in enumerate(PROMPTS):
            harness.submit(prompt, 24, request_id=str(index), sampling=sampling, shape=(3, 2, 11))
        harness.run()
        assert drafter.describe()[0] == algorithm
        drafter.shutdown()
    for index, prompt in enumerate(PROMPTS):
        plain = generate_plain(target, NoDrafter(), prompt, 24, sampling=sampling)
        assert_same_tokens(target, prompt, plain, harness.sink.tokens[str(index)], sampling)
    reports = [finished.speculation for finished in harness.sink.finished.values()]
    assert sum(report.draft_tokens for report in reports) > 0
    if algorithm == "STANDALONE":
        assert all(report.accept_length > 3 for report in reports), "the draft model is the target itself"


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        ("STANDALONE", "vocab_size is 32, but the target's is 40"),
        ("MTP", "hidden_size 48, but this target's is 64"),
    ],
)
def test_a_draft_for_another_target_is_refused_at_the_handshake(
    folder: Path, tmp_path: Path, algorithm: str, problem: str
) -> None:
    other = load_toy(make_toy_target(tmp_path / "other", vocab_size=40, num_layers=1))
    with serving(tmp_path, draft=folder, speculative_algorithm=algorithm) as service:
        drafter = connect(service, other)
        refusal = drafter.refusal()
        drafter.shutdown()
    assert refusal is not None
    assert problem in str(refusal)


def test_a_full_model_is_a_standalone_draft_unless_it_has_mtp_layers(folder: Path, tmp_path: Path) -> None:
    plain = make_toy_target(tmp_path / "plain", vocab_size=40, num_layers=1)
    for draft, algorithm in ((plain, "STANDALONE"), (folder, "MTP")):
        with serving(tmp_path, draft=draft) as service:
            assert service.engine.strategy.info.algorithm == algorithm
