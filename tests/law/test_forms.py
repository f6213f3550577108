"""Outputs with a form have the same tokens with and without speculation, in every batch.

The oracle follows the form by itself, and computes each token from one pass over all tokens before it.
"""

from __future__ import annotations

import random

import pytest
import torch
from support.engine.device_toys import AnswerDrafter
from support.engine.target_harness import (
    FakeDrafter,
    generate_plain,
    load_toy,
    make_harness,
    next_scores,
    oracle_plan,
    random_plan,
)
from support.grammars.toy_grammar import ToyGrammar
from support.models.toys import make_toy_target
from support.suite.compute_device import GRAPHS

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.generation import FinishReason, SamplingParams, SpeculationMode
from outrider.shared.base.logit_rules import LogitRules, LogprobParams
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
VOCAB = 48
NEW_TOKENS = 20
ENDS = (5, 9)
SHAPES = ((5, 1, 6), (3, 2, 7), (5, 4, 21))
MODES = (SpeculationMode.ON, SpeculationMode.AUTO, SpeculationMode.OFF)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(
        make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=4, num_layers=3)
    )


def prompt_of(index: int) -> list[int]:
    rng = random.Random(index)
    return [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 17, 40]))]


def sampling_of(index: int) -> SamplingParams:
    rules = LogitRules(frequency_penalty=0.7, logit_bias=((3, 2.0),)) if index % 4 == 3 else LogitRules()
    return SamplingParams([0.0, 0.7, 1.0][index % 3], 0, 0.95 if index % 2 else 1.0, seed=index, rules=rules)


@pytest.mark.parametrize("index", range(9))
def test_a_plain_request_gets_the_tokens_of_the_oracle(decoder: Decoder, index: int) -> None:
    grammar, prompt, sampling = ToyGrammar(VOCAB, ENDS, index), prompt_of(index), sampling_of(index)
    found = generate_plain(
        decoder, NoDrafter(decoder.device), prompt, NEW_TOKENS, sampling=sampling, grammar=grammar
    )
    tokens, state = list(prompt), 0
    for token in found:
        allowed = tuple(sorted(grammar.allowed(state)))
        rules = LogitRules(
            frequency_penalty=sampling.rules.frequency_penalty,
            logit_bias=sampling.rules.logit_bias,
            allowed_token_ids=allowed,
        )
        asked = SamplingParams(sampling.temperature, 0, sampling.top_p, seed=sampling.seed, rules=rules)
        scores = next_scores(decoder, tokens, asked, len(prompt), [])
        best = scores.topk(2)
        assert token == int(best.indices[0]) or float(best.values[0] - best.values[1]) < 1e-4
        tokens.append(token)
        state = grammar.after(state, token)
    assert len(found) == NEW_TOKENS or found[-1] in ENDS


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_speculation_changes_no_token_in_a_mixed_batch(
    decoder: Decoder, seed: int, lookahead: int, graphs: bool
) -> None:
    rng = random.Random(seed)
    asked = []
    for index in range(9):
        grammar = None if index % 3 == 2 else ToyGrammar(VOCAB, ENDS, seed * 10 + index)
        wanted = LogprobParams(rng.choice([None, 2]))
        asked.append((prompt_of(seed * 10 + index), sampling_of(index), grammar, wanted))
    answers = [
        generate_plain(
            decoder, NoDrafter(decoder.device), prompt, NEW_TOKENS, sampling=sampling, grammar=grammar
        )
        for prompt, sampling, grammar, _ in asked
    ]
    known = [[*prompt, *answer] for (prompt, *_), answer in zip(asked, answers, strict=True)]
    harness = make_harness(
        decoder,
        AnswerDrafter(known, VOCAB, 0.7, device=decoder.device, checked=not graphs),
        plan=LoopPlan(lookahead, drafts_on_device=True, max_depth=5, max_nodes=21),
        graphs=GraphCache(decoder.device, enabled=graphs),
        max_running=6,
    )
    for index, (prompt, sampling, grammar, wanted) in enumerate(asked):
        harness.submit(
            prompt,
            NEW_TOKENS,
            request_id=str(index),
            sampling=sampling,
            mode=rng.choice(MODES),
            shape=rng.choice(SHAPES),
            grammar=grammar,
            logprobs=wanted,
            trace=index % 2 == 0,
        )
        if index % 2:
            harness.step()
    harness.run()
    assert not harness.sink.failed
    assert harness.sink.tokens == {str(index): answer for index, answer in enumerate(answers)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plan", ["answers", "noise"])
def test_trees_from_the_host_change_no_token(
    decoder: Decoder, plan: str, shape: tuple[int, int, int]
) -> None:
    grammars = [ToyGrammar(VOCAB, ENDS, 70 + index) for index in range(5)]
    answers = [
        generate_plain(
            decoder,
            NoDrafter(decoder.device),
            prompt_of(index),
            NEW_TOKENS,
            sampling=sampling_of(index),
            grammar=grammar,
        )
        for index, grammar in enumerate(grammars)
    ]
    known = [[*prompt_of(index), *answer] for index, answer in enumerate(answers)]
    planned = oracle_plan(known, VOCAB, 0.8) if plan == "answers" else random_plan(VOCAB)
    harness = make_harness(decoder, FakeDrafter(planned))
    for index, grammar in enumerate(grammars):
        harness.submit(
            prompt_of(index),
            NEW_TOKENS,
            request_id=str(index),
            sampling=sampling_of(index),
            shape=shape,
            grammar=grammar,
        )
    harness.run()
    assert not harness.sink.failed
    assert harness.sink.tokens == {str(index): answer for index, answer in enumerate(answers)}


def test_text_that_a_form_forces_is_accepted_even_if_the_draft_knows_nothing(decoder: Decoder) -> None:
    grammar = ToyGrammar(VOCAB, ENDS, 3)
    harness = make_harness(decoder, FakeDrafter(lambda tokens, row: [(0, 0)] * (row.shape.max_nodes - 1)))
    harness.submit(prompt_of(3), NEW_TOKENS, request_id="a", shape=(5, 4, 12), grammar=grammar)
    harness.run()
    plain = generate_plain(decoder, NoDrafter(decoder.device), prompt_of(3), NEW_TOKENS, grammar=grammar)
    assert harness.sink.tokens["a"] == plain
    assert harness.sink.finished["a"].speculation.accepted_tokens > 0


def test_preemption_keeps_the_place_in_the_form(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = [ToyGrammar(VOCAB, ENDS, 20 + index) for index in range(6)]
    prompts = [prompt_of(2 + 4 * index)[:20] for index in range(6)]
    answers = [
        generate_plain(decoder, NoDrafter(decoder.device), prompt, 30, grammar=grammar)
        for prompt, grammar in zip(prompts, grammars, strict=True)
    ]
    known = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    harness = make_harness(
        decoder,
        AnswerDrafter(known, VOCAB, 0.8, device=decoder.device),
        plan=LoopPlan(1, drafts_on_device=True, max_depth=3, max_nodes=7),
        num_pages=16,
        page_size=4,
        prefill_chunk=8,
    )
    retract, retracted = harness.scheduler._retract, []
    monkeypatch.setattr(harness.scheduler, "_retract", lambda one: (retracted.append(one), retract(one)))
    for index, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True)):
        harness.submit(prompt, 30, request_id=str(index), shape=(3, 2, 7), grammar=grammar)
    harness.run()
    assert retracted
    assert not harness.sink.failed
    assert harness.sink.tokens == {str(index): answer for index, answer in enumerate(answers)}


def test_only_the_end_of_the_form_ends_the_output(decoder: Decoder) -> None:
    start = ToyGrammar(VOCAB, ENDS, 1)
    (first, *_) = sorted(start.allowed(0))
    grammar = ToyGrammar(VOCAB, ENDS, 1, last=start.after(0, first))
    harness = make_harness(decoder, NoDrafter(decoder.device), eos=[5])
    rules = LogitRules(allowed_token_ids=(first, 5, 7))
    harness.submit([1, 2], 9, request_id="a", sampling=SamplingParams(0.0, rules=rules), grammar=grammar)
    harness.submit(
        [1, 2], 9, request_id="b", sampling=SamplingParams(0.0, rules=rules), grammar=grammar, ignore_eos=True
    )
    harness.run()
    for name in "ab":
        assert harness.sink.tokens[name] == [first, 5]
        assert harness.sink.finished[name].reason is FinishReason.STOP


def test_a_dead_end_fails_one_request_alone(decoder: Decoder) -> None:
    good = ToyGrammar(VOCAB, ENDS, 6)
    (first, *_) = sorted(good.allowed(0))
    bad = ToyGrammar(VOCAB, ENDS, 6, stuck=good.after(0, first))
    plain = generate_plain(decoder, NoDrafter(decoder.device), [4, 2], NEW_TOKENS, grammar=good)
    harness = make_harness(decoder, FakeDrafter(random_plan(VOCAB)))
    rules = LogitRules(allowed_token_ids=(first,))
    harness.submit([4, 2], NEW_TOKENS, request_id="good", grammar=good)
    harness.submit(
        [4, 2], NEW_TOKENS, request_id="bad", sampling=SamplingParams(0.0, rules=rules), grammar=bad
    )
    harness.run()
    assert harness.sink.tokens["good"] == plain
    error = harness.sink.failed["bad"].error
    assert isinstance(error, InvalidRequestError)
    assert "No token is left to choose" in error.message


@pytest.mark.parametrize("opening", ["", "<11>"])
def test_the_form_begins_after_the_marker(decoder: Decoder, opening: str) -> None:
    grammar = ToyGrammar(VOCAB, ENDS, 8)
    constraint = Constraint(ConstraintKind.GRAMMAR, "toy", "<7>", opening)
    bias = LogitRules(logit_bias=((7, 9.0), (11, 10.0 if opening else 0.0), (5, 50.0)))
    sampling = SamplingParams(1.0, seed=3, rules=bias)
    options = {"sampling": sampling, "grammar": grammar, "constraint": constraint, "stop": [5]}
    plain = generate_plain(decoder, NoDrafter(decoder.device), [1, 2], 40, **options)
    marker = plain.index(7)
    assert (plain[0] == 11) == bool(opening)
    assert 5 not in plain[:marker], "the end before the form is forbidden, however likely it is"
    assert grammar.accepts(plain[marker + 1 :])
    assert len(plain) > marker + 1
    harness = make_harness(decoder, FakeDrafter(oracle_plan([[1, 2, *plain]], VOCAB, 0.8)))
    harness.submit([1, 2], 40, request_id="a", shape=(5, 4, 21), **options)  # type: ignore[arg-type]
    harness.run()
    assert harness.sink.tokens["a"] == plain
