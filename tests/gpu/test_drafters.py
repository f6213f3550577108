"""Tests of drafters without heads on a GPU: the output equals plain decoding, and drafts are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.target_harness import assert_same_tokens, generate_plain, make_harness
from support.models.toy_mtp import sample_text, save, train

from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.base.generation import SamplingParams
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.open import load_decoder

pytestmark = pytest.mark.gpu

COUNT = 24
PROMPTS = [
    row[:length]
    for row, length in zip(
        sample_text(3, 40, torch.Generator().manual_seed(5)).tolist(), (3, 16, 40), strict=True
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(train(layers=2, mtp_layers=2, steps=160), tmp_path_factory.mktemp("mimo"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Decoder:
    return load_decoder(folder, "cuda", torch.float32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("algorithm", ["MTP", "STANDALONE", "NGRAM"])
def test_output_is_that_of_plain_decoding(
    target: Decoder, folder: Path, tmp_path: Path, algorithm: str, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    draft = {"draft": folder} if algorithm == "STANDALONE" else {}
    settings = DraftSettings.load(
        {"speculative_algorithm": algorithm, "target_weights": folder, "kv_tokens": 8192, **draft}
    )
    harness = make_harness(target, drafter_beside(target, settings))
    for index, prompt in enumerate(PROMPTS):
        harness.submit(prompt, COUNT, request_id=str(index), sampling=sampling, shape=(4, 3, 16))
    harness.run()
    for index, prompt in enumerate(PROMPTS):
        plain = generate_plain(target, NoDrafter(), prompt, COUNT, sampling=sampling)
        assert_same_tokens(target, prompt, plain, harness.sink.tokens[str(index)], sampling)
    if algorithm != "NGRAM":
        reports = [finished.speculation.accept_length for finished in harness.sink.finished.values()]
        assert sum(reports) / len(reports) > 2.0


def test_a_token_map_works_on_the_gpu(target: Decoder, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(str(list(range(0, 32, 2))))
    for draft in ({"draft": folder, "speculative_algorithm": "STANDALONE"}, {"target_weights": folder}):
        settings = DraftSettings.load(
            {**draft, "kv_tokens": 8192, "speculative_token_map": tmp_path / "map.json"}
        )
        harness = make_harness(target, drafter_beside(target, settings))
        harness.submit(PROMPTS[0], COUNT, request_id="a", shape=(4, 3, 16), trace=True)
        harness.run()
        assert_same_tokens(
            target,
            PROMPTS[0],
            generate_plain(target, NoDrafter(), PROMPTS[0], COUNT),
            harness.sink.tokens["a"],
        )
        drafted = {node.token for one in harness.sink.rounds["a"] for node in one.nodes[1:]}
        assert drafted
        assert all(token % 2 == 0 for token in drafted)
