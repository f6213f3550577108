"""Penalties, biases, forbidden tokens and logprobs mean the same with and without speculation.

The oracle is `support.outputs.rule_oracle`, which computes each token from one pass over all tokens
before it.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from support.engine.device_toys import AnswerDrafter
from support.engine.target_harness import (
    Harness,
    assert_same_tokens,
    generate_plain,
    load_toy,
    make_harness,
    next_logits,
    next_scores,
)
from support.models.toys import make_toy_target
from support.outputs.rule_oracle import ruled
from support.suite.compute_device import GRAPHS

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.generation import FinishReason, SamplingParams, SpeculationMode
from outrider.shared.base.logit_rules import LogitRules, LogprobParams, TokenLogprob
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
VOCAB = 48
NEW_TOKENS = 24
SHAPES = ((5, 1, 6), (3, 2, 7), (5, 4, 21))
MODES = (SpeculationMode.ON, SpeculationMode.AUTO, SpeculationMode.OFF)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(
        make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=4, num_layers=3)
    )


def draw_rules(rng: random.Random) -> LogitRules:
    """Draw rules. Each option is on in about half of the draws."""

    def on() -> bool:
        return rng.random() < 0.5

    return LogitRules(
        presence_penalty=rng.choice([-1.0, 0.5, 2.0]) if on() else 0.0,
        frequency_penalty=rng.choice([-0.3, 0.6, 1.7]) if on() else 0.0,
        repetition_penalty=rng.choice([0.7, 1.2, 2.0]) if on() else 1.0,
        logit_bias=tuple((token, rng.uniform(-5, 5)) for token in rng.sample(range(VOCAB), 5))
        if on()
        else (),
        min_tokens=rng.choice([1, 4, 30]) if on() else 0,
        allowed_token_ids=tuple(rng.sample(range(VOCAB), 20)) if on() else None,
        bad_words=tuple(tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 3]))) for _ in range(9))
        if on()
        else (),
    )


def draw_sampling(rng: random.Random) -> SamplingParams:
    warm = SamplingParams(temperature=0.8, top_p=rng.choice([1.0, 0.9]), seed=rng.randrange(1 << 63))
    plain = rng.choice([SamplingParams(temperature=0.0), warm])
    return SamplingParams(plain.temperature, 0, plain.top_p, 0.0, plain.seed, rules=draw_rules(rng))


@cache
def prompt_of(index: int) -> tuple[int, ...]:
    rng = random.Random(index)
    return tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 17, 40])))


@pytest.mark.parametrize("seed", range(12))
def test_a_plain_request_gets_the_tokens_of_the_oracle(decoder: Decoder, seed: int) -> None:
    rng = random.Random(seed)
    sampling, prompt = draw_sampling(rng), prompt_of(seed)
    stops = rng.sample(range(VOCAB), 2)
    found = generate_plain(
        decoder, NoDrafter(decoder.device), prompt, NEW_TOKENS, sampling=sampling, stop=stops
    )
    tokens = list(prompt)
    for token in found:
        scores = next_scores(decoder, tokens, sampling, len(prompt), stops)
        best = scores.topk(2)
        assert token == int(best.indices[0]) or float(best.values[0] - best.values[1]) < 1e-4
        tokens.append(token)
    assert len(found) == NEW_TOKENS or (found[-1] in stops and len(found) > sampling.rules.min_tokens)


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_speculation_changes_neither_tokens_nor_logprobs(
    decoder: Decoder, seed: int, lookahead: int, graphs: bool
) -> None:
    rng = random.Random(100 + seed)
    asked = []
    for index in range(9):
        neutral = SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=index)
        sampling = neutral if index % 3 == 2 else draw_sampling(rng)
        wanted = LogprobParams(rng.choice([None, 0, 5]), rng.choice([None, 3]), rng.choice([0, 2]))
        asked.append((prompt_of(seed * 10 + index), sampling, wanted, rng.choice(MODES), rng.choice(SHAPES)))
    stops = [rng.randrange(VOCAB)]
    answers = [
        generate_plain(decoder, NoDrafter(decoder.device), prompt, NEW_TOKENS, sampling=sampling, stop=stops)
        for prompt, sampling, *_ in asked
    ]
    known = [[*prompt, *answer] for (prompt, *_), answer in zip(asked, answers, strict=True)]
    plan = LoopPlan(lookahead, drafts_on_device=True, max_depth=5, max_nodes=21)
    harness = make_harness(
        decoder,
        AnswerDrafter(known, VOCAB, 0.8, device=decoder.device, checked=not graphs),
        plan=plan,
        graphs=GraphCache(decoder.device, graphs),
        max_running=4,
        num_pages=24,
        page_size=8,
        prefill_chunk=16,
    )
    for index, (prompt, sampling, wanted, mode, shape) in enumerate(asked):
        harness.submit(
            prompt,
            NEW_TOKENS,
            request_id=str(index),
            sampling=sampling,
            mode=mode,
            shape=shape,
            stop=stops,
            logprobs=wanted,
        )
    harness.run()
    assert not harness.sink.failed
    assert harness.engine.stats().speculation.accepted_tokens > 0
    for index, (prompt, sampling, wanted, *_) in enumerate(asked):
        found = harness.sink.tokens[str(index)]
        assert_same_tokens(decoder, prompt, answers[index], found, sampling)
        logits = next_logits(decoder, [*prompt, *found])
        output = harness.sink.logprobs[str(index)]
        check_logprobs(output, logits[len(prompt) - 1 : -1], found, wanted.top)
        first = max(1, wanted.prompt_start)
        scored = harness.sink.prompt_logprobs[str(index)]
        check_logprobs(scored, logits[first - 1 : len(prompt) - 1], prompt[first:], wanted.prompt_top)


def check_logprobs(
    found: list[TokenLogprob], logits: torch.Tensor, tokens: list[int] | tuple[int, ...], top: int | None
) -> None:
    """Assert that logprobs are those of the raw logits ``[n, V]`` at each token's place."""
    assert len(found) == (0 if top is None else len(tokens))
    for one, row, token in zip(found, logits.log_softmax(-1), tokens, strict=False):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert len(one.top) == top
        if one.top:
            expected = row.topk(len(one.top)).values.tolist()
            assert [logprob for _, logprob in one.top] == pytest.approx(expected, abs=1e-3)
            assert [float(row[token]) for token, _ in one.top] == pytest.approx(expected, abs=1e-3)


def test_a_sequence_that_is_retracted_keeps_its_history(decoder: Decoder) -> None:
    """Two sequences do not fit, so one of them returns its pages and is prefilled again later."""
    rules = LogitRules(0.5, 1.5, 1.4, bad_words=((3, 5), (7, 8, 9)))
    sampling = SamplingParams(temperature=1.0, seed=3, rules=rules)
    harness = make_harness(decoder, NoDrafter(decoder.device), num_pages=9, page_size=4, max_running=2)
    wanted = LogprobParams(top=2, prompt_top=1)
    for name in ("0", "1"):
        harness.submit(prompt_of(3)[:3], 24, request_id=name, sampling=sampling, logprobs=wanted)
    harness.run()
    assert harness.scheduler.num_retractions > 0
    plain = generate_plain(decoder, NoDrafter(decoder.device), prompt_of(3)[:3], 24, sampling=sampling)
    for name in ("0", "1"):
        assert_same_tokens(decoder, prompt_of(3)[:3], plain, harness.sink.tokens[name], sampling)
        assert len(harness.sink.logprobs[name]) == 24
        assert len(harness.sink.prompt_logprobs[name]) == len(prompt_of(3)[:3]) - 1


def test_no_token_ends_the_text_before_its_minimum_length(decoder: Decoder) -> None:
    plain = generate_plain(decoder, NoDrafter(decoder.device), (1, 2, 3), 12)
    sampling = SamplingParams(temperature=0.0, rules=LogitRules(min_tokens=6))
    harness = _served(decoder, sampling, eos=(plain[0],))
    assert harness.sink.finished["r"].completion_tokens >= 6
    assert plain[0] not in harness.sink.tokens["r"][:6]


def test_rules_that_forbid_every_token_fail_the_request_with_a_clear_error(decoder: Decoder) -> None:
    sampling = SamplingParams(0.0, rules=LogitRules(allowed_token_ids=(4,), bad_words=((4,),)))
    error = _served(decoder, sampling).sink.failed["r"].error
    assert isinstance(error, InvalidRequestError)
    assert "allowed_token_ids" in error.message


def test_the_rules_leave_a_slot_with_their_sequence(decoder: Decoder) -> None:
    harness = make_harness(decoder, NoDrafter(decoder.device), max_running=1)
    allowed = SamplingParams(temperature=0.0, rules=LogitRules(allowed_token_ids=(4,)))
    for name, sampling in (("ruled", allowed), ("plain", None), ("again", allowed)):
        harness.submit((1, 2, 3), 8, request_id=name, sampling=sampling)
        harness.run()
    assert harness.sink.tokens["ruled"] == harness.sink.tokens["again"] == [4] * 8
    assert harness.sink.tokens["plain"] == generate_plain(decoder, NoDrafter(decoder.device), (1, 2, 3), 8)
    assert harness.sink.finished["plain"].reason is FinishReason.LENGTH


def test_the_oracle_knows_every_rule() -> None:
    logits = torch.tensor([1.0, -1.0, 2.0, 0.5])
    rules = LogitRules(0.25, 0.5, 2.0, logit_bias=((3, 1.5),))
    assert ruled(logits, [0], [1, 1], rules, ()).tolist() == [0.5, -3.25, 2.0, 2.0]
    rules = LogitRules(min_tokens=3, bad_words=((1, 0),), allowed_token_ids=(0, 1, 2))
    assert ruled(logits, [0], [1, 1], rules, (2,)).isinf().tolist() == [True, False, True, True]


def _served(decoder: Decoder, sampling: SamplingParams, eos: tuple[int, ...] = ()) -> Harness:
    harness = make_harness(decoder, NoDrafter(decoder.device), eos=eos)
    harness.submit((1, 2, 3), 12, request_id="r", sampling=sampling)
    harness.run()
    return harness
