"""A draft tree depends on the sequence alone, not on the way to it.

Sessions skip rounds, are refused, are lost and opened again, or are retracted. Each of their trees must be
the tree that a new request for the same tokens gets in its first round. The output cannot show such mistakes,
because verification corrects wrong drafts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
from support.drafts.draft_pairs import KINDS, Pair, make_pair
from support.engine.target_harness import Harness, assert_same_tokens, generate_plain, make_harness

from outrider.services.draft.inproc import HOST_PEER, InprocDrafter, drafter_beside
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.policy.controller import EntryBound
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

torch.set_num_threads(1)
SHAPE = (4, 3, 12)
COUNT = 40
PLANS = [LoopPlan(lookahead, True, max_depth=5, max_nodes=16) for lookahead in (0, 1)]
PLANS_AND_SEEDS = [(PLANS[0], 0), (PLANS[0], 1), (PLANS[1], 1), (PLANS[1], 2)]
PROMPTS = [[1, 2, 3, 4], [9, 8, 7] * 6, [5]]
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=9),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4),
]

Tree = list[tuple[int, int]]
"""Token and parent of each node."""


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[list[int]]:
    return [
        generate_plain(pair.decoder, NoDrafter(), prompt, COUNT, sampling=sampling)
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]


@pytest.fixture(scope="module")
def trees(pair: Pair, plain: list[list[int]]) -> list[dict[int, Tree]]:
    """For each prompt and each length, the tree of the first round of a new request, through the host."""
    found: list[dict[int, Tree]] = []
    drafter = drafter_beside(pair.decoder, pair.settings)
    harness = make_harness(pair.decoder, drafter, max_running=64)
    for prompt, answer, sampling in zip(PROMPTS, plain, SAMPLINGS, strict=True):
        for length in range(COUNT - 1):
            harness.submit(
                [*prompt, *answer[:length]],
                3,
                request_id=f"{len(found)}-{length}",
                sampling=sampling,
                shape=SHAPE,
                trace=True,
            )
        harness.run()
        rounds = [harness.sink.rounds[f"{len(found)}-{length}"][0] for length in range(COUNT - 1)]
        found.append({one.base_len: [(node.token, node.parent) for node in one.nodes] for one in rounds})
    drafter.shutdown()
    return found


@pytest.fixture
def drafter(pair: Pair) -> Iterator[InprocDrafter]:
    made = drafter_beside(pair.decoder, pair.settings)
    yield made
    made.shutdown()


class Gaps:
    """Chooses for `auto` entries, at random, to draft or not, in phases of several rounds."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._left: dict[int, int] = {}
        self._drafts: dict[int, bool] = {}

    def choose(self, entries: Sequence[EntryBound], *_: object) -> list[DraftShape]:
        return [DraftShape(*SHAPE) if self._turn(id(entry.state)) else NO_DRAFT for entry in entries]

    def _turn(self, sequence: int) -> bool:
        if not self._left.get(sequence):
            self._left[sequence] = self._rng.randint(1, 4)
            self._drafts[sequence] = not self._drafts.get(sequence, self._rng.random() < 0.5)
        self._left[sequence] -= 1
        return self._drafts[sequence]


def check(
    pair: Pair, harness: Harness, plain: list[list[int]], trees: list[dict[int, Tree]], *, most: int = COUNT
) -> int:
    """Compare outputs and trees. Return the number of trees that were compared."""
    compared = 0
    for index, (prompt, answer) in enumerate(zip(PROMPTS, plain, strict=True)):
        found = harness.sink.tokens[str(index)]
        assert_same_tokens(pair.decoder, prompt, answer[:most], found, SAMPLINGS[index])
        assert found == answer[:most], "a near-tie would make the trees incomparable"
        for one in harness.sink.rounds[str(index)]:
            if len(one.nodes) > 1 and one.base_len in trees[index]:
                tree = [(node.token, node.parent) for node in one.nodes]
                assert tree == trees[index][one.base_len], f"request {index}, length {one.base_len}"
                compared += 1
    return compared


def submit(harness: Harness, modes: Sequence[SpeculationMode]) -> list[int]:
    return [
        harness.submit(
            prompt, COUNT, request_id=str(index), sampling=sampling, shape=SHAPE, mode=mode, trace=True
        )
        for index, (prompt, sampling, mode) in enumerate(zip(PROMPTS, SAMPLINGS, modes, strict=True))
    ]


@pytest.mark.parametrize(("plan", "seed"), PLANS_AND_SEEDS)
def test_sessions_that_skip_rounds(
    pair: Pair,
    drafter: InprocDrafter,
    plain: list[list[int]],
    trees: list[dict[int, Tree]],
    plan: LoopPlan,
    seed: int,
) -> None:
    harness = make_harness(pair.decoder, drafter, plan=plan, prefill_chunk=7)
    with mock.patch.object(harness.engine.controller, "choose", Gaps(seed).choose):
        submit(harness, [SpeculationMode.AUTO, SpeculationMode.AUTO, SpeculationMode.ON])
        harness.run()
    assert check(pair, harness, plain, trees) > 10
    plain_rounds = [sum(len(one.nodes) == 1 for one in harness.sink.rounds[str(index)]) for index in range(2)]
    assert min(plain_rounds) > 0, "sessions must have skipped rounds"


def lose(drafter: InprocDrafter, session_id: int) -> None:
    """Lose a session, and overwrite its pages, which the session may get again when it is opened again."""
    engine = drafter._engine
    session = engine.sessions.get(HOST_PEER, session_id)
    if session is None:
        return
    engine.sessions.lose(session)
    drafter._lost.add(session_id)
    pool = engine.strategy._pool  # type: ignore[attr-defined]
    with pool.allocator.allocate(pool.allocator.free_pages) as lease:
        for plane in pool.planes():
            plane[lease.pages] = torch.randn_like(plane[lease.pages]) * 100


@pytest.mark.parametrize(("plan", "seed"), PLANS_AND_SEEDS)
def test_sessions_that_are_lost(
    pair: Pair,
    drafter: InprocDrafter,
    plain: list[list[int]],
    trees: list[dict[int, Tree]],
    plan: LoopPlan,
    seed: int,
) -> None:
    harness = make_harness(pair.decoder, drafter, plan=plan)
    handles = submit(harness, [SpeculationMode.AUTO] * 3)
    rng = random.Random(seed)
    with mock.patch.object(harness.engine.controller, "choose", Gaps(seed).choose):
        while harness.engine.has_work():
            harness.step()
            if rng.random() < 0.3:
                lose(drafter, rng.choice(handles))
    assert harness.engine._sessions.num_resyncs > 1
    assert check(pair, harness, plain, trees) > 10


@pytest.mark.parametrize("plan", PLANS)
def test_sessions_of_retracted_sequences(
    pair: Pair,
    drafter: InprocDrafter,
    plain: list[list[int]],
    trees: list[dict[int, Tree]],
    plan: LoopPlan,
) -> None:
    harness = make_harness(pair.decoder, drafter, plan=plan, num_pages=26, page_size=4)
    submit(harness, [SpeculationMode.ON] * 3)
    harness.run()
    assert harness.scheduler.num_retractions > 0, "the pool must be too small for this test"
    assert check(pair, harness, plain, trees) > 10


@pytest.mark.parametrize("plan", PLANS)
def test_sessions_that_are_refused(
    pair: Pair, plain: list[list[int]], trees: list[dict[int, Tree]], plan: LoopPlan
) -> None:
    """The drafter's pool is too small for all sessions together."""
    sizes = {"kv_tokens": 112, "page_size": 4, "max_topk": 4, "max_steps": 5}
    small = drafter_beside(pair.decoder, pair.settings.model_copy(update=sizes))
    harness = make_harness(pair.decoder, small, plan=plan)
    submit(harness, [SpeculationMode.ON] * 3)
    harness.run()
    reasons = {harness.sink.finished[str(index)].speculation.fallback_reason for index in range(3)}
    assert "kv_full" in reasons, "the drafter's pool must be too small for this test"
    assert check(pair, harness, plain, trees) > 5
    small.shutdown()
