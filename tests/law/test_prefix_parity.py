"""Stored prefixes change nothing, whatever the model keeps per token and whatever reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.target_harness import Harness, make_harness
from support.models.family_models import save
from support.models.toys import make_toy_target
from support.outputs.prefix_parity import ParityCase

from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.numerics import prepare_attention, prepare_decoder
from outrider.shared.nn.open import load_decoder
from outrider.shared.spec.drafter import Drafter

torch.set_num_threads(1)
FP8, DETERMINISTIC = {"kv_cache_dtype": "fp8_e4m3"}, {"deterministic": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("mistral", {}),
    "window narrower than a page": ("gpt-oss-narrow", {}),
    "window, deterministic": ("mistral", DETERMINISTIC),
    "latent": ("deepseek-v3", {}),
    "latent, deterministic": ("deepseek-v3", DETERMINISTIC),
    "fp8 cache": ("planted", FP8),
    "fp8 cache, deterministic": ("planted", {**FP8, **DETERMINISTIC}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, folder: Path) -> ParityCase:
    family, values = CASES[request.param]
    planted = folder / "planted"
    if family == "planted" and not planted.is_dir():
        make_toy_target(planted, vocab_size=64, seed=3, planted=2.5)
    path = planted if family == "planted" else save(family, folder)
    settings = TargetSettings.load({"model": path, "device": "cpu", "dtype": "float32", **values})
    settings.check()
    decoder = prepare_decoder(settings, load_decoder(path, "cpu", torch.float32))

    def make(drafter: Drafter, **options: int) -> Harness:
        return make_harness(decoder, drafter, attention=prepare_attention(settings, decoder), **options)

    return ParityCase(make, decoder, settings.deterministic)


def test_hits_have_the_tokens_and_the_feature_rows_of_misses(case: ParityCase) -> None:
    case.check_hits()


def test_a_preempted_request_goes_on_from_its_stored_pages(case: ParityCase) -> None:
    case.check_preemption()
