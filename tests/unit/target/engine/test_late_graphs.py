"""The number of CUDA graphs stays bounded for all shapes that clients request, and tokens stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.device_toys import AnswerDrafter
from support.played_graphs import BoundedGraphs
from support.target_harness import Harness, generate_plain, load_toy, make_harness
from support.toys import make_toy_target

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.device_loop import OverlapPlan
from outrider.services.target.model import round_runner
from outrider.shared.engine.buckets import Buckets
from outrider.shared.engine.graphs import RECORD_AFTER
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import Drafter
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

torch.set_num_threads(1)
VOCAB = 64
PROMPT = [5, 9, 2, 33, 7]
NEW_TOKENS = 40
MAX_LATE_GRAPHS = 3
SHAPES = [(depth, topk, 1 + depth * topk) for depth in (1, 2, 3, 4) for topk in (1, 2, 3)]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=3))


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> list[int]:
    return generate_plain(decoder, NoDrafter(), PROMPT, NEW_TOKENS)


def test_batches_above_the_largest_that_is_recorded_overlap_without(
    decoder: Decoder, plain: list[int]
) -> None:
    graphs = BoundedGraphs(MAX_LATE_GRAPHS)
    drafter = AnswerDrafter([PROMPT + plain], VOCAB, checked=False)
    harness = make_harness(
        decoder,
        drafter,
        overlap=OverlapPlan((1, 2, 4), 6, recorded=2),
        graphs=graphs,
        buckets=Buckets.make(2, 16),
    )
    for index in range(4):
        harness.submit(PROMPT, NEW_TOKENS, request_id=str(index), shape=SHAPES[3])
    harness.run()
    assert all(harness.sink.tokens[str(index)] == plain for index in range(4))
    assert drafter.reservations > 0, "rounds must stay on the device"
    assert not graphs.captured


def served(decoder: Decoder, drafter: Drafter, graphs: BoundedGraphs, overlap: OverlapPlan | None) -> Harness:
    harness = make_harness(decoder, drafter, overlap=overlap, graphs=graphs, buckets=Buckets.make(4, 16))
    with graphs.keeping():
        for record in harness.engine.recordings(1, DraftShape(2, 2, 5)) + harness.engine.recordings(
            1, NO_DRAFT
        ):
            record()
    return harness


@pytest.mark.parametrize("overlap", [OverlapPlan((1, 2, 4), 6), None], ids=["device", "host"])
def test_graphs_do_not_grow_with_the_shapes_that_clients_ask_for(
    decoder: Decoder, plain: list[int], overlap: OverlapPlan | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_runner, "MOST_TABLES", 4)
    graphs = BoundedGraphs(MAX_LATE_GRAPHS)
    harness = served(decoder, AnswerDrafter([PROMPT + plain], VOCAB, checked=False), graphs, overlap)
    of_the_start = set(graphs.keys)
    for index, shape in enumerate(SHAPES):
        harness.submit(PROMPT, NEW_TOKENS, request_id=str(index), shape=shape)
        harness.run()
        assert harness.sink.tokens[str(index)] == plain, shape
        assert len(graphs.keys) <= len(of_the_start) + MAX_LATE_GRAPHS
    assert of_the_start < set(graphs.keys), "late graphs are recorded, and those of the start stay"
    if overlap is not None:
        assert len(graphs.captured) > len(of_the_start) + MAX_LATE_GRAPHS, (
            "the test must need more graphs than are kept"
        )
        engine: Any = harness.engine
        assert len(engine._loop._rounds._tables) <= 4 + len(graphs.keys)


def test_a_round_that_hardly_ever_comes_up_is_not_recorded(decoder: Decoder, plain: list[int]) -> None:
    graphs = BoundedGraphs(MAX_LATE_GRAPHS)
    harness = served(
        decoder,
        AnswerDrafter([PROMPT + plain], VOCAB, accuracy=0.0, checked=False),
        graphs,
        OverlapPlan((1, 2, 4), 6),
    )
    of_the_start = graphs.keys
    harness.submit(PROMPT, RECORD_AFTER, request_id="few", shape=SHAPES[-1])
    harness.run()
    assert graphs.keys == of_the_start
    harness.submit(PROMPT, RECORD_AFTER + 2, request_id="more", shape=SHAPES[-1])
    harness.run()
    assert len(graphs.keys) == len(of_the_start) + 1
    assert harness.sink.tokens["more"] == plain[: RECORD_AFTER + 2]


def test_a_batch_that_shrinks_is_halved_and_meets_no_size_between(decoder: Decoder, plain: list[int]) -> None:
    graphs = BoundedGraphs(MAX_LATE_GRAPHS)
    drafter = AnswerDrafter([PROMPT + plain], VOCAB, checked=False)
    harness = make_harness(
        decoder, drafter, overlap=OverlapPlan((1, 2, 3, 4, 6, 8), 6), graphs=graphs, max_running=8
    )
    for index in range(8):
        harness.submit(PROMPT, 8 + 4 * index, request_id=str(index), shape=SHAPES[3])
    harness.run()
    assert all(harness.sink.tokens[str(index)] == plain[: 8 + 4 * index] for index in range(8))
    assert {key[1] for key in graphs.keys} == {8, 4, 2, 1}  # type: ignore[index]
