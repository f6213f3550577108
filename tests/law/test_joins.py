"""Requests that join and leave while others decode on the device: order of work, batch sizes, and output.

Each answer must equal plain decoding, and no request may be lost.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from support.device_toys import AnswerDrafter
from support.target_harness import Harness, assert_same_tokens, generate_plain, load_toy, make_harness
from support.toys import make_toy_target

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.device_loop import OverlapPlan
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import FeatureSpec

VOCAB = 64
OVERLAP = OverlapPlan(batch_sizes=(1, 2, 4, 8), columns=6)
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4),
]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=3))


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
        self.plain = [
            generate_plain(decoder, NoDrafter(), prompt, length, sampling=sampling)
            for prompt, length, sampling in zip(self.prompts, self.lengths, self.samplings, strict=True)
        ]

    def drafter(self, features: bool = False) -> AnswerDrafter:
        size = 3 * self.decoder.config.hidden_size
        spec = (
            FeatureSpec(aux_layer_ids=(1, 3, 4), feature_size=size, fingerprint="raw") if features else None
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


@pytest.mark.parametrize("mode", [SpeculationMode.ON, SpeculationMode.OFF])
@pytest.mark.parametrize("features", [False, True])
def test_a_request_that_joins_takes_nobody_the_hosts_way(
    decoder: Decoder, mode: SpeculationMode, features: bool
) -> None:
    crowd = Crowd(decoder, 6, seed=1)
    harness = make_harness(decoder, crowd.drafter(features), overlap=OVERLAP, max_running=8, prefill_chunk=8)
    with mock.patch.object(
        harness.runner, "verify", side_effect=AssertionError("a round ran through the host")
    ):
        for index in range(6):
            crowd.submit(harness, index, mode=mode)
            for _ in range(4):
                harness.step()
        harness.run()
    crowd.check(harness)


def test_without_a_draft_too(decoder: Decoder) -> None:
    crowd = Crowd(decoder, 5, seed=2)
    harness = make_harness(decoder, NoDrafter(), overlap=OVERLAP, max_running=8, prefill_chunk=8)
    with mock.patch.object(
        harness.runner, "verify", side_effect=AssertionError("a round ran through the host")
    ):
        for index in range(5):
            crowd.submit(harness, index)
            for _ in range(3):
                harness.step()
        harness.run()
    crowd.check(harness)


@pytest.mark.parametrize("features", [False, True])
def test_a_prompt_is_enqueued_before_the_last_round_is_read(decoder: Decoder, features: bool) -> None:
    crowd = Crowd(decoder, 5, seed=4, shortest=40)
    harness = make_harness(decoder, crowd.drafter(features), overlap=OVERLAP, max_running=8)
    begin, on_their_way = harness.runner.begin_prefill, []
    loop = harness.engine._loop
    assert loop is not None

    def noted(chunks: Sequence[PrefillChunk]) -> torch.Tensor:
        on_their_way.append(loop._rounds.in_flight)
        return begin(chunks)

    with mock.patch.object(harness.runner, "begin_prefill", side_effect=noted):
        for index in range(5):
            crowd.submit(harness, index)
            for _ in range(4):
                harness.step()
        harness.run()
    assert on_their_way == [0, 1, 1, 1, 1]
    crowd.check(harness)


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_come_and_go_in_a_small_pool(decoder: Decoder, seed: int) -> None:
    crowd = Crowd(decoder, 14, seed=10 + seed)
    rng = random.Random(seed)
    drafter = crowd.drafter(features=seed % 2 == 0)
    drafter.refuse_every = 7
    harness = make_harness(
        decoder, drafter, overlap=OVERLAP, max_running=6, prefill_chunk=16, num_pages=30, page_size=4
    )
    waiting, handles, cancelled, paused = list(range(14)), {}, set(), set()
    while waiting or paused or harness.engine.has_work():
        if waiting and rng.random() < 0.3:
            index = waiting.pop(0)
            mode = rng.choice([SpeculationMode.ON, SpeculationMode.AUTO, SpeculationMode.OFF])
            handles[index] = crowd.submit(harness, index, mode=mode)
        live = [
            index for index in handles if index not in cancelled and str(index) not in harness.sink.finished
        ]
        if live and rng.random() < 0.05:
            index = rng.choice(live)
            if index in paused:
                paused.discard(index)
                harness.engine.resume(handles[index])
            else:
                paused.add(index)
                harness.engine.pause(handles[index])
        if live and rng.random() < 0.01:
            cancelled.add(live[0])
            harness.engine.cancel(handles[live[0]])
        if not harness.engine.has_work():
            for index in paused:
                harness.engine.resume(handles[index])
            paused.clear()
        harness.step()
    harness.check_idle()
    assert not harness.sink.failed
    for index in set(range(14)) - cancelled:
        assert_same_tokens(
            decoder,
            crowd.prompts[index],
            crowd.plain[index],
            harness.sink.tokens[str(index)],
            crowd.samplings[index],
        )
    assert not drafter.sequences, "the drafter must have closed every sequence"


def test_who_is_prefilled_first_waits_for_the_rest_of_a_burst(decoder: Decoder) -> None:
    crowd = Crowd(decoder, 6, seed=7, shortest=30)
    crowd.prompts = [[index + 1] * 10 for index in range(6)]
    crowd.plain = [
        generate_plain(decoder, NoDrafter(), prompt, length, sampling=sampling)
        for prompt, length, sampling in zip(crowd.prompts, crowd.lengths, crowd.samplings, strict=True)
    ]
    harness = make_harness(
        decoder, crowd.drafter(features=True), overlap=OVERLAP, max_running=8, prefill_chunk=25
    )
    loop = harness.engine._loop
    assert loop is not None
    sizes = []
    for index in range(4):  # 25 + 15 tokens
        crowd.submit(harness, index)
    with mock.patch.object(
        loop,
        "enter",
        side_effect=lambda decodes, enter=loop.enter: sizes.append(len(decodes)) or enter(decodes),
    ):
        harness.step()
        assert sizes == [], "two requests have their first token and wait"
        assert set(harness.sink.tokens) == {"0", "1"}
        harness.step()
        assert sizes == [4]
        for index in (4, 5):
            crowd.submit(harness, index)
        harness.run()
    assert sizes[1] == 6
    crowd.check(harness)


def test_nobody_waits_for_more_than_one_step_of_prompts(decoder: Decoder) -> None:
    crowd = Crowd(decoder, 5, seed=8, shortest=40)
    crowd.prompts = [[index + 1] * 20 for index in range(5)]
    crowd.plain = [
        generate_plain(decoder, NoDrafter(), prompt, length, sampling=sampling)
        for prompt, length, sampling in zip(crowd.prompts, crowd.lengths, crowd.samplings, strict=True)
    ]
    harness = make_harness(decoder, crowd.drafter(), overlap=OVERLAP, max_running=8, prefill_chunk=20)
    crowd.submit(harness, 0)
    told = []
    for index in range(1, 5):  # one more request arrives in every step
        crowd.submit(harness, index)
        harness.step()
        told.append(len(harness.sink.tokens["0"]))
    assert told[0] == 1
    assert told[2] > 1, "the first request decodes although prompts keep arriving"
    harness.run()
    crowd.check(harness)


def shrinking(decoder: Decoder, seed: int) -> Crowd:
    """Eight requests that end one after another."""
    crowd = Crowd(decoder, 8, seed, shortest=59)
    order = list(range(8))
    random.Random(seed).shuffle(order)
    crowd.lengths = [5 + 7 * place for place in order]
    crowd.plain = [answer[:length] for answer, length in zip(crowd.plain, crowd.lengths, strict=True)]
    return crowd


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("shape", [None, (5, 1, 6), (3, 2, 7)])
def test_those_who_go_on_move_to_a_smaller_batch_at_once(
    decoder: Decoder, seed: int, features: bool, shape: tuple[int, int, int] | None
) -> None:
    crowd = shrinking(decoder, seed)
    drafter = crowd.drafter(features)
    harness = make_harness(decoder, drafter, overlap=OVERLAP, max_running=8, prefill_chunk=512, page_size=4)
    loop = harness.engine._loop
    assert loop is not None
    rounds, moved = loop._rounds, []
    move = rounds.move

    def noted(rows: Sequence[int], bs: int) -> bool:
        moved.append((bs, rounds.in_flight))
        return move(rows, bs)

    with (
        mock.patch.object(
            harness.runner, "verify", side_effect=AssertionError("a round ran through the host")
        ),
        mock.patch.object(rounds, "enter", wraps=rounds.enter) as entered,
        mock.patch.object(rounds, "move", side_effect=noted),
    ):
        for index in range(8):
            crowd.submit(harness, index, **({"shape": shape} if shape else {"mode": SpeculationMode.OFF}))
        harness.run()
    assert entered.call_count == 1, "no sequence left the device"
    assert moved == [(4, 1), (2, 1), (1, 1)], "each bucket in turn, behind the round in flight"
    crowd.check(harness)
    assert not drafter.sequences, "the drafter must have closed every sequence"


@pytest.mark.parametrize("at", [1, 2])
def test_rounds_that_cannot_move_are_left_and_entered_anew(decoder: Decoder, at: int) -> None:
    crowd = shrinking(decoder, seed=5)
    drafter = crowd.drafter(features=True)
    drafter.fail_move_at = at
    harness = make_harness(decoder, drafter, overlap=OVERLAP, max_running=8, prefill_chunk=512)
    for index in range(8):
        crowd.submit(harness, index)
    harness.run()
    assert drafter.entered == 2
    crowd.check(harness)


@pytest.mark.parametrize("steps", range(1, 24))
def test_many_who_give_up_at_once(decoder: Decoder, steps: int) -> None:
    crowd = shrinking(decoder, seed=6)
    drafter = crowd.drafter(features=True)
    harness = make_harness(decoder, drafter, overlap=OVERLAP, max_running=8, prefill_chunk=512, page_size=4)
    handles = [crowd.submit(harness, index) for index in range(8)]
    for _ in range(steps):
        harness.step()
    for index in (0, 2, 3, 5, 7):
        harness.engine.cancel(handles[index])
    harness.run()
    for index in (1, 4, 6):
        assert_same_tokens(
            decoder,
            crowd.prompts[index],
            crowd.plain[index],
            harness.sink.tokens[str(index)],
            crowd.samplings[index],
        )
    assert not drafter.sequences, "the drafter must have closed every sequence"


def test_those_who_decode_go_on_between_the_chunks_of_a_long_prompt(decoder: Decoder) -> None:
    crowd = Crowd(decoder, 2, seed=3, shortest=59)
    crowd.prompts[1] = [7] * 60
    crowd.plain[1] = generate_plain(
        decoder, NoDrafter(), crowd.prompts[1], crowd.lengths[1], sampling=crowd.samplings[1]
    )
    harness = make_harness(decoder, crowd.drafter(), overlap=OVERLAP, prefill_chunk=6)
    crowd.submit(harness, 0)
    while len(harness.sink.tokens.get("0", ())) < 4:
        harness.step()
    crowd.submit(harness, 1)
    told = []
    while "1" not in harness.sink.tokens:
        harness.step()
        told.append(len(harness.sink.tokens["0"]))
    assert told[-1] - told[0] >= 60 // 6 - 2, "there must be a round for every chunk"
    harness.run()
    crowd.check(harness)
