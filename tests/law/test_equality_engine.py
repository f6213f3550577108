"""Output with speculation equals output without, token for token: every drafter, every shape, batches that change."""

from __future__ import annotations

import pytest
import torch
from target_harness import FakeDrafter, generate_plain, load_toy, make_harness, oracle_plan
from toys import make_toy_target

from outrider.services.target.drafter import NoDrafter
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
VOCAB = 64
SHAPES = [(1, 1, 2), (5, 1, 6), (3, 2, 8), (5, 4, 16), (8, 3, 40)]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=3))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("accuracy", [1.0, 0.6])
def test_greedy_output_is_that_of_plain_decoding(decoder: Decoder, shape: tuple[int, int, int], accuracy: float) -> None:
    prompt = [5, 9, 2, 33, 7]
    plain = generate_plain(decoder, NoDrafter(), prompt, 40)
    harness = make_harness(decoder, FakeDrafter(oracle_plan([prompt + plain], VOCAB, accuracy)))
    harness.submit(prompt, 40, request_id="a", shape=shape)
    harness.run()
    assert harness.sink.tokens["a"] == plain
    if accuracy == 1.0:
        assert harness.sink.finished["a"].speculation.accepted_tokens > 0
