"""Requests that join and leave while others decode: order of work, entries of the rounds, and output.

Each answer must equal plain decoding, and no request may be lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, product
from typing import Any
from unittest import mock

import pytest
import torch
from support.engine.target_harness import Harness, assert_same_tokens, load_toy, make_harness
from support.models.toys import make_toy_target
from support.outputs.joining_crowd import VOCAB, Crowd
from support.outputs.traces import check_report, check_traces

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.model.model_runner import ChosenTokens
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.model.step_runner import Round
from outrider.services.target.policy.controller import EntryBound
from outrider.services.target.policy.cost_model import DraftPath
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

torch.set_num_threads(1)
AHEAD = LoopPlan(lookahead=1, drafts_on_device=True, max_depth=5, max_nodes=21)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(
        make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=3, num_layers=3)
    )


class Watched:
    """Notes the rounds of a harness, and how many were in flight when each was launched."""

    def __init__(self, harness: Harness) -> None:
        self.loop = harness.engine._loop
        self.rounds: list[Round] = []
        self.in_flight: list[int] = []
        self._launch = self.loop._step_runner.launch
        self.patch = mock.patch.object(self.loop._step_runner, "launch", self._noted)

    def ahead(self) -> int:
        return sum(isinstance(one, Round) for one in self.loop._in_flight)

    def _noted(self, entries: Sequence[Entry], draft: Callable[[], None] | None) -> Round:
        self.in_flight.append(self.ahead())
        self.rounds.append(self._launch(entries, draft))
        return self.rounds[-1]

    def __enter__(self) -> Watched:
        self.patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


@pytest.mark.parametrize("mode", [SpeculationMode.ON, SpeculationMode.OFF])
@pytest.mark.parametrize("features", [False, True])
def test_a_request_that_joins_drains_nothing(decoder: Decoder, mode: SpeculationMode, features: bool) -> None:
    crowd = Crowd(decoder, 6, seed=1)
    harness = make_harness(decoder, crowd.drafter(features), plan=AHEAD, max_running=8, prefill_chunk=8)
    with Watched(harness) as watched:
        for index in range(6):
            crowd.submit(harness, index, mode=mode)
            for _ in range(4):
                harness.step()
        assert len({len(one.entries) for one in watched.rounds}) > 3, "the rounds must have grown"
        assert watched.in_flight == [0] + [1] * (len(watched.rounds) - 1)
        harness.run()
    crowd.check(harness)


def test_without_a_draft_too(decoder: Decoder) -> None:
    crowd = Crowd(decoder, 5, seed=2)
    harness = make_harness(decoder, NoDrafter(), plan=AHEAD, max_running=8, prefill_chunk=8)
    with Watched(harness) as watched:
        for index in range(5):
            crowd.submit(harness, index)
            for _ in range(3):
                harness.step()
        assert watched.in_flight == [0] + [1] * (len(watched.rounds) - 1)
        harness.run()
    crowd.check(harness)


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_one_round_has_trees_chains_and_plain_entries_without_padding(
    decoder: Decoder, features: bool, lookahead: int
) -> None:
    crowd = Crowd(decoder, 7, seed=5, shortest=40)
    drafter = crowd.drafter(features)
    plan = replace(AHEAD, lookahead=lookahead)
    harness = make_harness(decoder, drafter, plan=plan, max_running=8)
    shapes = [(3, 2, 7), (5, 1, 6), None, (5, 4, 21), None, (1, 1, 2), (3, 2, 7)]
    for index, shape in enumerate(shapes):
        options = {"shape": shape} if shape else {"mode": SpeculationMode.OFF}
        crowd.submit(harness, index, trace=index in (0, 2, 3), **options)
    with Watched(harness) as watched:
        harness.run()
    widths = [[entry.rows for entry in one.entries] for one in watched.rounds]
    assert [7, 6, 1, 21, 1, 2, 7] in widths, "all requests must have shared a round"
    assert drafter.nodes_proposed == 0, "no tree may come through the host"
    crowd.check(harness)
    for index, shape in enumerate(shapes):
        report = harness.sink.finished[str(index)].speculation
        assert report.fallback_reason == ("" if shape else "user")
        assert (report.accepted_tokens > 0) == (shape is not None)
        rounds = harness.sink.rounds[str(index)]
        if index in (0, 2, 3):
            answer = [*crowd.prompts[index], *harness.sink.tokens[str(index)]]
            assert check_traces(rounds, answer, len(crowd.prompts[index])) == 1
            check_report(harness.sink.finished[str(index)], rounds)
            nodes = shape[2] if shape else 1
            assert {len(one.nodes) for one in rounds} == {nodes}
        else:
            assert not rounds, "only those who asked get a trace"


@pytest.mark.parametrize("mode", [SpeculationMode.ON, SpeculationMode.OFF])
def test_each_entry_of_a_round_has_its_own_sampling(decoder: Decoder, mode: SpeculationMode) -> None:
    crowd = Crowd(decoder, 8, seed=6, shortest=30)
    crowd.prompts = [[3, 1, 4, 1, 5]] * 8
    crowd.samplings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=1.0, seed=(1 << 64) - 3),
        SamplingParams(temperature=1.0, seed=3, choice_index=1),
        SamplingParams(temperature=1.0, top_k=4, seed=3),
        SamplingParams(temperature=1.0, top_p=0.6, seed=3),
        SamplingParams(temperature=1.0, min_p=0.2, seed=3),
        SamplingParams(temperature=2.0, seed=3),
    ]
    crowd.answer()
    assert len({tuple(answer[:30]) for answer in crowd.plain}) == 8, "all answers must differ"
    # The answers of one prompt differ, so the drafter knows only one of them. Its guesses for the other
    # requests are usually wrong.
    harness = make_harness(decoder, crowd.drafter(), plan=AHEAD, max_running=8)
    for index in range(8):
        crowd.submit(harness, index, mode=mode)
        if index % 3 == 2:
            harness.step()
    harness.run()
    crowd.check(harness)


@pytest.mark.parametrize("features", [False, True])
def test_entries_in_mode_auto_may_draft_or_not_beside_all_others(decoder: Decoder, features: bool) -> None:
    crowd = Crowd(decoder, 6, seed=9, shortest=50)
    drafter = crowd.drafter(features)
    harness = make_harness(decoder, drafter, plan=AHEAD, max_running=8)
    shapes = [NO_DRAFT, DraftShape(5, 1, 6), DraftShape(2, 1, 3)]
    pairs = cycle(product(shapes, shapes))

    def chosen(
        entries: Sequence[EntryBound], others: Sequence[DraftShape], path: DraftPath
    ) -> list[DraftShape]:
        assert path is DraftPath.DEVICE
        return list(next(pairs)[: len(entries)])

    modes = [SpeculationMode.AUTO, SpeculationMode.ON, SpeculationMode.OFF] * 2
    with (
        Watched(harness) as watched,
        mock.patch.object(harness.engine.controller, "choose", side_effect=chosen),
    ):
        for index, mode in enumerate(modes):
            crowd.submit(harness, index, mode=mode, shape=(5, 1, 6))
        harness.run()
    crowd.check(harness)
    assert watched.in_flight == [0] + [1] * (len(watched.rounds) - 1)
    full = [[entry.rows for entry in one.entries] for one in watched.rounds if len(one.entries) == 6]
    assert {(rows[0], rows[3]) for rows in full} == {(a, b) for a in (1, 3, 6) for b in (1, 3, 6)}
    assert {(rows[1], rows[2], rows[4], rows[5]) for rows in full} == {(6, 1, 6, 1)}
    assert drafter.catch_ups >= 6, "sessions must be caught up after plain rounds"
    for index in (0, 3):
        report = harness.sink.finished[str(index)].speculation
        assert report.accepted_tokens > 0
        assert report.fallback_reason == "", "a plain round that was chosen is no fallback"


@pytest.mark.parametrize("features", [False, True])
def test_a_prompt_is_enqueued_before_the_last_round_is_read(decoder: Decoder, features: bool) -> None:
    crowd = Crowd(decoder, 5, seed=4, shortest=40)
    harness = make_harness(decoder, crowd.drafter(features), plan=AHEAD, max_running=8)
    begin, on_their_way = harness.runner.begin_prefill, []
    loop = harness.engine._loop

    def noted(chunks: Sequence[PrefillChunk], *rest: Any) -> ChosenTokens:
        on_their_way.append(len(loop._in_flight))
        return begin(chunks, *rest)

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
        decoder, drafter, plan=AHEAD, max_running=6, prefill_chunk=16, num_pages=30, page_size=4
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


def test_who_is_prefilled_decodes_in_the_same_step(decoder: Decoder) -> None:
    crowd = Crowd(decoder, 6, seed=7, shortest=30)
    crowd.prompts = [[index + 1] * 10 for index in range(6)]
    crowd.answer()
    harness = make_harness(decoder, crowd.drafter(features=True), plan=AHEAD, max_running=8, prefill_chunk=25)
    with Watched(harness) as watched:
        for index in range(4):  # 25 + 15 tokens
            crowd.submit(harness, index)
        harness.step()
        assert [len(one.entries) for one in watched.rounds] == [2], "two prompts are complete"
        harness.step()
        assert len(watched.rounds[-1].entries) == 4
        for index in (4, 5):
            crowd.submit(harness, index)
        harness.step()
        assert len(watched.rounds[-1].entries) == 6
        harness.run()
    crowd.check(harness)


def test_nobody_waits_for_more_than_one_step_of_prompts(decoder: Decoder) -> None:
    crowd = Crowd(decoder, 5, seed=8, shortest=40)
    crowd.prompts = [[index + 1] * 20 for index in range(5)]
    crowd.answer()
    harness = make_harness(decoder, crowd.drafter(), plan=AHEAD, max_running=8, prefill_chunk=20)
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
    crowd.answer()
    return crowd


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("shape", [None, (5, 1, 6), (3, 2, 7)])
def test_those_who_leave_take_their_rows_with_them(
    decoder: Decoder, seed: int, features: bool, shape: tuple[int, int, int] | None
) -> None:
    crowd = shrinking(decoder, seed)
    drafter = crowd.drafter(features)
    harness = make_harness(decoder, drafter, plan=AHEAD, max_running=8, prefill_chunk=512, page_size=4)
    with Watched(harness) as watched:
        for index in range(8):
            crowd.submit(harness, index, **({"shape": shape} if shape else {"mode": SpeculationMode.OFF}))
        harness.run()
    sizes = [len(one.entries) for one in watched.rounds]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == set(range(1, 9)), "rounds become smaller with every end"
    assert watched.in_flight == [0] + [1] * (len(sizes) - 1), "nothing is drained"
    crowd.check(harness)
    # A sequence whose end the host has not read yet takes part in one more round.
    finished = [harness.sink.finished[str(index)].speculation.rounds for index in range(8)]
    assert sum(finished) <= sum(sizes) <= sum(finished) + 8
    assert not drafter.sequences, "the drafter must have closed every sequence"


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 19, 23])
def test_many_who_give_up_at_once(decoder: Decoder, steps: int) -> None:
    crowd = shrinking(decoder, seed=6)
    drafter = crowd.drafter(features=True)
    harness = make_harness(decoder, drafter, plan=AHEAD, max_running=8, prefill_chunk=512, page_size=4)
    shapes = [(3, 2, 7), (5, 1, 6), (5, 4, 21)]
    handles = [
        crowd.submit(
            harness,
            index,
            shape=shapes[index % 3],
            mode=SpeculationMode.OFF if index in (3, 6) else SpeculationMode.ON,
        )
        for index in range(8)
    ]
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
    crowd.answer()
    harness = make_harness(decoder, crowd.drafter(), plan=AHEAD, prefill_chunk=6)
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
