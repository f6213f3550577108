"""Outputs with a form beside others, with CUDA graphs and a draft on the device, on the demo pair."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from support.drafts.gpu_pair import TARGET, make_pair_drafter
from support.engine.target_harness import assert_same_tokens, generate_plain, make_harness

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.grammar.guidance import compile_guidance
from outrider.services.target.grammar.vocabulary import Vocabulary
from outrider.services.target.model.graph_key import GraphKey
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.engine.recorded_graph import Parts
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.open import load_decoder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "coastal": {"type": "boolean"}},
    "required": ["name", "coastal"],
    "additionalProperties": False,
}


PROMPTS = [[(7 * index + step) % 200 for step in range(20)] for index in range(6)]
SAMPLINGS = [SamplingParams([0.0, 0.7, 1.0][index % 3], seed=index) for index in range(6)]


class CountedGraphs(GraphCache):
    """Counts the rounds with forms whose two graphs are replayed, and those that run kernel by kernel."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        super().__init__(device, enabled)
        self.replayed = self.eager = 0

    def run_parts(self, key: Hashable, record: Callable[[], Parts[Any]]) -> Parts[Any]:
        if self.replays(key):
            self.replayed += 1
        else:
            self.eager += 1
        return super().run_parts(key, record)

    @property
    def masked(self) -> list[GraphKey]:
        return [key for key in self.keys if isinstance(key, GraphKey) and key.masked]


class Pair:
    """An engine on the demo pair that drafts on the device."""

    def __init__(self, decoder: Decoder, cache: GraphCache) -> None:
        self.drafter = make_pair_drafter(decoder)
        plan = LoopPlan(lookahead=1, drafts_on_device=True)
        self.harness = make_harness(decoder, self.drafter, plan=plan, graphs=cache, max_running=4, eos=[2])
        self.grammar = grammar_of(decoder)

    def serve(self, mode: SpeculationMode, every: int) -> tuple[list[list[int]], int]:
        """Return the tokens of six requests, and the number of steps after which a round was in flight.

        Every `every`-th request has a form.
        """
        harness, ahead, names = self.harness, 0, []
        for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
            form = self.grammar if index % every == 0 else None
            names.append(f"{len(harness.sink.finished)}-{index}")
            harness.submit(prompt, 50, request_id=names[-1], sampling=sampling, grammar=form, mode=mode)
        while harness.engine.has_work():
            harness.step()
            ahead += harness.engine.on_device
        assert not harness.sink.failed
        return [harness.sink.tokens[name] for name in names], ahead


def grammar_of(decoder: Decoder) -> Any:
    vocabulary = Vocabulary(TARGET / "tokenizer.json", decoder.config.vocab_size, (2,))
    return compile_guidance(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)), vocabulary)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("mode", [SpeculationMode.OFF, SpeculationMode.ON])
def test_rounds_with_forms_replay_two_graphs_and_emit_what_eager_rounds_emit(
    mode: SpeculationMode, every: int
) -> None:
    decoder = load_decoder(TARGET, "cuda", torch.float32)
    eager, cache = CountedGraphs(decoder.device, False), CountedGraphs(decoder.device, True)
    unrecorded, recorded = Pair(decoder, eager), Pair(decoder, cache)
    expected, _ = unrecorded.serve(mode, every)
    found, ahead = recorded.serve(mode, every)
    assert found == expected
    assert eager.replayed == 0
    assert eager.eager > 0
    assert cache.masked
    assert cache.replayed > 0
    assert cache.eager == 0, "before start-up is over, every size is recorded at its first use"
    assert all(len(cache._recorded[key].parts) == 2 for key in cache.masked)
    assert ahead > 5, "the next round must be launched before a round with forms has been read"
    unrecorded.drafter.shutdown()
    recorded.drafter.shutdown()


def test_graphs_of_rounds_with_forms_survive_other_graphs() -> None:
    """Graphs that are recorded and replayed in between may use the same memory."""
    decoder = load_decoder(TARGET, "cuda", torch.float32)
    cache = CountedGraphs(decoder.device, True)
    pair = Pair(decoder, cache)
    first, _ = pair.serve(SpeculationMode.OFF, 3)
    pair.serve(SpeculationMode.ON, 2)
    pair.serve(SpeculationMode.OFF, 7)
    keys, replayed = set(cache.masked), cache.replayed
    again, _ = pair.serve(SpeculationMode.OFF, 3)
    assert again == first
    assert set(cache.masked) == keys, "no graph is recorded twice"
    assert cache.replayed > replayed
    pair.drafter.shutdown()


@pytest.mark.parametrize("graphs", [False, True])
def test_forms_emit_plain_tokens_beside_free_outputs(graphs: bool) -> None:
    decoder = load_decoder(TARGET, "cuda", torch.float32)
    drafter = make_pair_drafter(decoder)
    grammar = grammar_of(decoder)
    cache = GraphCache(decoder.device, enabled=graphs)
    plan = LoopPlan(lookahead=1, drafts_on_device=True)
    harness = make_harness(decoder, drafter, plan=plan, graphs=cache, max_running=4, eos=[2])
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        form = grammar if index % 2 else None
        harness.submit(prompt, 50, request_id=str(index), sampling=sampling, grammar=form)
    harness.run()
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        form = grammar if index % 2 else None
        options = {"sampling": sampling, "grammar": form, "stop": [2]}
        plain = generate_plain(decoder, NoDrafter(decoder.device), prompt, 50, **options)
        if form is None:
            assert_same_tokens(decoder, prompt, plain, harness.sink.tokens[str(index)], sampling)
        else:
            assert harness.sink.tokens[str(index)] == plain
    drafter.shutdown()
