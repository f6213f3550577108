"""Rounds in which outputs have forms: two recorded parts, launched before the previous round is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engine.device_toys import AnswerDrafter
from support.engine.played_graphs import BoundedGraphs
from support.engine.target_harness import Harness, generate_plain, load_toy, make_harness
from support.grammars.toy_grammar import ToyGrammar
from support.models.toys import make_toy_target

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.model import tree_forms
from outrider.services.target.model.graph_key import GraphKey
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.engine.graphs import RECORD_AFTER
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import Drafter

torch.set_num_threads(1)
VOCAB, NEW_TOKENS, ENDS = 48, 24, (5, 9)
AHEAD = LoopPlan(lookahead=1, drafts_on_device=True, max_depth=5, max_nodes=21)
PROMPTS = [[5, 9, 2, 33, 7], [4, 4, 1], [8, 40, 3, 2, 1, 17, 6]]


class AloneGraphs(BoundedGraphs):
    """Graphs of a single rank. `log` lists whether each round with forms was replayed."""

    def __init__(self) -> None:
        super().__init__(max_late_graphs=50)
        self.log: list[bool] = []

    @property
    def observed(self) -> bool:
        return False

    def run_parts(self, key: Any, record: Any) -> Any:
        self.log.append(self.replays(key))
        return super().run_parts(key, record)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(
        make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=4, num_layers=3)
    )


@pytest.fixture(scope="module")
def answers(decoder: Decoder) -> list[list[int]]:
    return [
        generate_plain(decoder, NoDrafter(), prompt, NEW_TOKENS, sampling=sampling_of(index), grammar=form)
        for index, (prompt, form) in enumerate(zip(PROMPTS, forms(), strict=True))
    ]


def forms() -> list[ToyGrammar | None]:
    return [ToyGrammar(VOCAB, ENDS, 8), None, ToyGrammar(VOCAB, ENDS, 13)]


def sampling_of(index: int) -> SamplingParams:
    return SamplingParams(0.0 if index == 0 else 0.8, seed=index)


def masked_keys(graphs: BoundedGraphs) -> list[GraphKey]:
    return [key for key in graphs.keys if isinstance(key, GraphKey) and key.masked]


def started(decoder: Decoder, drafter: Drafter, graphs: BoundedGraphs, **options: Any) -> Harness:
    harness = make_harness(decoder, drafter, plan=AHEAD, graphs=graphs)
    for index, (prompt, form) in enumerate(zip(PROMPTS, forms(), strict=True)):
        harness.submit(
            prompt, NEW_TOKENS, request_id=str(index), sampling=sampling_of(index), grammar=form, **options
        )
    return harness


@pytest.mark.parametrize("shape", [None, (5, 4, 21), (3, 1, 4)])
def test_recorded_rounds_emit_the_same_tokens(
    decoder: Decoder, answers: list[list[int]], shape: tuple[int, int, int] | None
) -> None:
    graphs = AloneGraphs()
    known = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    drafter = NoDrafter() if shape is None else AnswerDrafter(known, VOCAB, 0.7, checked=False)
    harness = started(decoder, drafter, graphs, shape=shape or (5, 4, 21))
    harness.run()
    assert harness.sink.tokens == {str(index): answer for index, answer in enumerate(answers)}
    assert masked_keys(graphs)
    assert graphs.log
    assert all(graphs.log), "until start-up is over, every size is recorded at its first use"
    assert all(len(graphs._recorded[key].parts) == 2 for key in masked_keys(graphs))


def test_trees_that_are_not_fitted_change_no_token(
    decoder: Decoder, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In large rounds, only the masks exclude forbidden nodes."""
    monkeypatch.setattr(tree_forms, "MOST_FITTED", 0)
    fitted, sizes = tree_forms.fitted, []
    monkeypatch.setattr(tree_forms, "fitted", lambda *given: (sizes.append(1), fitted(*given))[1])
    known = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    graphs = AloneGraphs()
    harness = started(decoder, AnswerDrafter(known, VOCAB, 0.7, checked=False), graphs, shape=(5, 4, 21))
    harness.run()
    assert harness.sink.tokens == {str(index): answer for index, answer in enumerate(answers)}
    stats = harness.sink.finished["0"].speculation
    assert stats.accepted_tokens > 0
    assert len(sizes) < stats.rounds + harness.sink.finished["2"].speculation.rounds


def test_rounds_are_recorded_once_they_are_frequent(decoder: Decoder, answers: list[list[int]]) -> None:
    graphs = AloneGraphs()
    with graphs.keeping():
        pass  # start-up is over
    harness = started(decoder, NoDrafter(), graphs, mode=SpeculationMode.OFF)
    harness.run()
    assert harness.sink.tokens == {str(index): answer for index, answer in enumerate(answers)}
    assert not any(graphs.log[:RECORD_AFTER])
    assert any(graphs.log)


def test_rounds_without_forms_have_one_graph(decoder: Decoder) -> None:
    graphs = AloneGraphs()
    harness = make_harness(decoder, NoDrafter(), plan=AHEAD, graphs=graphs)
    harness.submit(PROMPTS[0], NEW_TOKENS, request_id="free", mode=SpeculationMode.OFF)
    harness.run()
    assert not masked_keys(graphs)
    assert not graphs.log
    assert all(len(one.parts) == 1 for one in graphs._recorded.values())


def test_the_next_round_is_launched_before_a_round_with_forms_is_read(decoder: Decoder) -> None:
    harness = started(decoder, NoDrafter(), AloneGraphs(), mode=SpeculationMode.OFF)
    ahead = []
    while harness.engine.has_work():
        harness.step()
        ahead.append(harness.engine.on_device)
    assert len(ahead) > 10
    assert all(ahead[1:-2])


def test_several_ranks_run_rounds_with_forms_kernel_by_kernel(
    decoder: Decoder, answers: list[list[int]]
) -> None:
    graphs = BoundedGraphs(50)
    harness = started(decoder, NoDrafter(), graphs, mode=SpeculationMode.OFF)
    harness.run()
    assert harness.sink.tokens == {str(index): answer for index, answer in enumerate(answers)}
    assert not masked_keys(graphs)
