"""Fixtures: a toy target, its plain-decoding answer, and a remote drafter over gRPC or ipc."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from remote_rig import FAULT_S, PROMPT, VOCAB
from support.engine.target_harness import generate_plain, load_toy
from support.models.toys import make_toy_target

from outrider.services.target.draft_client.link import TargetIdentity
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.nn.decoder import Decoder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=3))


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> list[int]:
    return generate_plain(decoder, NoDrafter(), PROMPT, 200)


@pytest.fixture(params=["unix:", "ipc://"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}{tmp_path}/draft.sock"


@pytest.fixture
def drafter(decoder: Decoder, address: str) -> Iterator[RemoteDrafter]:
    drafter = RemoteDrafter(
        address, TargetIdentity.of(decoder), decoder.weight, torch.device("cpu"), fault_deadline_s=FAULT_S
    )
    yield drafter
    drafter.shutdown()
