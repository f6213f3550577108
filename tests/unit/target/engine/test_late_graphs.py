"""The number of CUDA graphs stays bounded for all shapes that clients request, and tokens stay the same."""

from __future__ import annotations

import pytest
import torch
from support.engine.device_toys import AnswerDrafter
from support.engine.played_graphs import BoundedGraphs
from support.engine.target_harness import Harness, generate_plain, make_harness

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.model.graph_key import GraphKey
from outrider.shared.base.generation import SpeculationMode
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
def plain(decoder: Decoder) -> list[int]:
    return generate_plain(decoder, NoDrafter(), PROMPT, NEW_TOKENS)


DEVICE_PLAN = LoopPlan(lookahead=1, drafts_on_device=True)
HOST_PLAN = LoopPlan()


def test_batches_above_the_largest_that_is_recorded_overlap_without(
    decoder: Decoder, plain: list[int]
) -> None:
    graphs = BoundedGraphs(MAX_LATE_GRAPHS)
    drafter = AnswerDrafter([PROMPT + plain], VOCAB, checked=False)
    plan = LoopPlan(lookahead=1, drafts_on_device=True, recorded_entries=2)
    harness = make_harness(decoder, drafter, plan=plan, graphs=graphs)
    for index in range(4):
        harness.submit(PROMPT, NEW_TOKENS, request_id=str(index), shape=SHAPES[3])
    harness.run()
    assert all(harness.sink.tokens[str(index)] == plain for index in range(4))
    assert drafter.drafted_rows > 0, "rounds must draft on the device"
    assert not graphs.captured


def test_only_rounds_up_to_the_largest_batch_are_recorded(decoder: Decoder, plain: list[int]) -> None:
    graphs = BoundedGraphs(MAX_LATE_GRAPHS)
    drafter = AnswerDrafter([PROMPT + plain], VOCAB, checked=False)
    plan = LoopPlan(lookahead=1, drafts_on_device=True, recorded_entries=2)
    harness = make_harness(decoder, drafter, plan=plan, graphs=graphs)
    for index in range(3):
        harness.submit(PROMPT, 8 * (index + 1), request_id=str(index), shape=SHAPES[3])
    while len(harness.sink.finished) == 0:
        harness.step()
        assert not graphs.captured
    harness.run()
    assert {(key.kind, key.rows) for key in recorded(graphs)} == {
        ("draft", 2),
        ("draft", 1),
        ("verify", 8),
        ("verify", 4),
    }


def recorded(graphs: BoundedGraphs) -> list[GraphKey]:
    return [key for key in graphs.keys if isinstance(key, GraphKey)]


def served(decoder: Decoder, drafter: Drafter, graphs: BoundedGraphs, plan: LoopPlan) -> Harness:
    harness = make_harness(decoder, drafter, plan=plan, graphs=graphs)
    with graphs.keeping():
        for _description, record in harness.engine.recordings.rounds(
            [(1, DraftShape(2, 2, 5)), (1, NO_DRAFT)]
        ):
            record()
    return harness


@pytest.mark.parametrize("plan", [DEVICE_PLAN, HOST_PLAN], ids=["device", "host"])
def test_graphs_do_not_grow_with_the_shapes_that_clients_ask_for(
    decoder: Decoder, plain: list[int], plan: LoopPlan
) -> None:
    graphs = BoundedGraphs(MAX_LATE_GRAPHS)
    harness = served(decoder, AnswerDrafter([PROMPT + plain], VOCAB, checked=False), graphs, plan)
    of_the_start = set(graphs.keys)
    for index, shape in enumerate(SHAPES):
        harness.submit(PROMPT, NEW_TOKENS, request_id=str(index), shape=shape)
        harness.run()
        assert harness.sink.tokens[str(index)] == plain, shape
        assert len(graphs.keys) <= len(of_the_start) + MAX_LATE_GRAPHS
    assert of_the_start < set(graphs.keys), "late graphs are recorded, and those of the start stay"
    if plan is DEVICE_PLAN:
        assert len(graphs.captured) > len(of_the_start) + MAX_LATE_GRAPHS, (
            "the test must need more graphs than are kept"
        )


def test_verify_passes_share_graphs_among_shapes(decoder: Decoder, plain: list[int]) -> None:
    """A dozen shapes in any mixture need four graphs of up to 8 rows."""
    graphs = BoundedGraphs(100)
    drafter = AnswerDrafter([PROMPT + plain], VOCAB, checked=False)
    harness = make_harness(decoder, drafter, plan=DEVICE_PLAN, graphs=graphs, max_running=1)
    shapes = [shape for shape in SHAPES if shape[2] <= 8]
    for index, shape in enumerate(shapes):
        harness.submit(PROMPT, NEW_TOKENS, request_id=str(index), shape=shape)
        harness.submit(PROMPT, NEW_TOKENS, request_id=f"plain {index}", mode=SpeculationMode.OFF)
    harness.run()
    assert all(tokens == plain for tokens in harness.sink.tokens.values())
    verified = {(key.rows, key.width) for key in recorded(graphs) if key.kind == "verify"}
    assert verified == {(1, 1), (2, 8), (4, 8), (8, 8)}


def test_a_round_that_hardly_ever_comes_up_is_not_recorded(decoder: Decoder, plain: list[int]) -> None:
    graphs = BoundedGraphs(MAX_LATE_GRAPHS)
    drafter = AnswerDrafter([PROMPT + plain], VOCAB, accuracy=0.0, checked=False)
    harness = served(decoder, drafter, graphs, DEVICE_PLAN)
    of_the_start = graphs.keys
    harness.submit(PROMPT, RECORD_AFTER, request_id="few", shape=SHAPES[-1])
    harness.run()
    assert graphs.keys == of_the_start
    harness.submit(PROMPT, RECORD_AFTER + 4, request_id="more", shape=SHAPES[-1])
    harness.run()
    assert {key.kind for key in recorded(graphs)[len(of_the_start) :]} == {"draft", "verify"}
    assert harness.sink.tokens["more"] == plain[: RECORD_AFTER + 4]


def test_a_batch_that_shrinks_is_padded_to_its_rows(decoder: Decoder, plain: list[int]) -> None:
    graphs = BoundedGraphs(100)
    drafter = AnswerDrafter([PROMPT + plain], VOCAB, checked=False)
    harness = make_harness(decoder, drafter, plan=DEVICE_PLAN, graphs=graphs, max_running=8)
    for index in range(8):
        harness.submit(PROMPT, 8 + 4 * index, request_id=str(index), shape=(2, 2, 4))
    harness.run()
    assert all(harness.sink.tokens[str(index)] == plain[: 8 + 4 * index] for index in range(8))
    sizes: dict[str, set[int]] = {"draft": set(), "verify": set()}
    for key in recorded(graphs):
        sizes[key.kind].add(key.rows)
    assert sizes["draft"] == {1, 2, 4, 8}
    assert sizes["verify"] <= {1, 4, 8, 16, 24, 32}
