"""Fixtures for tests of the target."""

from __future__ import annotations

import pytest
from support.engine.target_harness import load_toy
from support.models.toys import make_toy_target

from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.nn.decoder import Decoder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A toy target with a vocabulary of 64 tokens."""
    return load_toy(make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=64, seed=3, num_layers=3))


@pytest.fixture(params=[0, 1], ids=["read first", "one ahead"])
def plan(request: pytest.FixtureRequest) -> LoopPlan:
    """Plans without and with a round in flight while the next one is launched."""
    return LoopPlan(lookahead=request.param)
