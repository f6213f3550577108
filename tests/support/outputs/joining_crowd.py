"""Requests with random prompts whose plain-decoding answers are known, for tests of joins and leaves."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.base.generation import SamplingParams
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import FeatureSpec
from support.engine.device_toys import AnswerDrafter
from support.engine.target_harness import Harness, assert_same_tokens, generate_plain

VOCAB = 64
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4),
]


@cache
def answer_of(decoder: Decoder, prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    """Return 60 tokens of plain decoding."""
    return generate_plain(decoder, NoDrafter(), prompt, 60, sampling=sampling)


class Crowd:
    """Requests with random prompts, and their plain-decoding answers."""

    def __init__(self, decoder: Decoder, count: int, seed: int, shortest: int = 10) -> None:
        rng = random.Random(seed)
        self.decoder = decoder
        self.prompts = [
            [rng.randrange(VOCAB) for _ in range(rng.choice([2, 5, 17, 40]))] for _ in range(count)
        ]
        self.samplings = [rng.choice(SAMPLINGS) for _ in range(count)]
        self.lengths = [rng.randrange(shortest, 60) for _ in range(count)]
        self.answer()

    def answer(self) -> None:
        """Compute the answers of plain decoding, again after prompts, lengths or samplings have changed."""
        self.plain = [
            answer_of(self.decoder, tuple(prompt), sampling)[:length]
            for prompt, length, sampling in zip(self.prompts, self.lengths, self.samplings, strict=True)
        ]

    def drafter(self, features: bool = False) -> AnswerDrafter:
        size = 3 * self.decoder.config.hidden_size
        spec = (
            FeatureSpec(aux_layer_ids=(0, 1, 2), feature_size=size, fingerprint="raw") if features else None
        )
        return AnswerDrafter(
            [prompt + answer for prompt, answer in zip(self.prompts, self.plain, strict=True)],
            VOCAB,
            0.7,
            spec,
        )

    def submit(self, harness: Harness, index: int, **options: Any) -> int:
        options = {"shape": (3, 2, 7), **options}
        return harness.submit(
            self.prompts[index],
            self.lengths[index],
            request_id=str(index),
            sampling=self.samplings[index],
            **options,
        )

    def check(self, harness: Harness) -> None:
        assert not harness.sink.failed
        for index, (prompt, plain, sampling) in enumerate(
            zip(self.prompts, self.plain, self.samplings, strict=True)
        ):
            assert_same_tokens(self.decoder, prompt, plain, harness.sink.tokens[str(index)], sampling)
