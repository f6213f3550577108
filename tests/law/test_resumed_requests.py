"""A request that goes on at another target gets the tokens and logprobs of an undisturbed run.

The second target knows the prompt and the tokens that the first target has emitted.
"""

from __future__ import annotations

import random

import pytest
import torch
from support.engine.device_toys import AnswerDrafter
from support.engine.target_harness import (
    Harness,
    assert_same_tokens,
    generate_plain,
    load_toy,
    make_harness,
)
from support.models.toys import make_toy_target

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.base.errors import InvalidRequestError, OverloadedError
from outrider.shared.base.generation import FinishReason, SamplingParams, SpeculationMode
from outrider.shared.base.logit_rules import LogitRules, LogprobParams
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
VOCAB = 48
NEW_TOKENS = 24
STOP = 47
PROMPT = (5, 9, 2, 33, 7, 12, 9)
WANTED = LogprobParams(top=2)
PENALTIES = LogitRules(0.5, 1.2, 1.4, logit_bias=((3, 2.0),), bad_words=((3, 5), (7, 8, 9)))
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0, seed=(1 << 64) - 3),
    "filtered": SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, seed=7, choice_index=2),
    "penalties": SamplingParams(temperature=0.0, rules=PENALTIES),
    "seeded penalties": SamplingParams(temperature=1.0, seed=3, rules=PENALTIES),
    "min_tokens": SamplingParams(temperature=1.0, seed=5, rules=LogitRules(min_tokens=14)),
}
ROUNDS = {
    "plain": (SpeculationMode.OFF, None),
    "chain": (SpeculationMode.ON, (5, 1, 6)),
    "tree": (SpeculationMode.ON, (3, 2, 7)),
    "auto": (SpeculationMode.AUTO, (5, 4, 21)),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(
        make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=4, num_layers=5)
    )


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_the_rest_is_that_of_an_undisturbed_run(decoder: Decoder, sampling: SamplingParams) -> None:
    first = make_harness(decoder, NoDrafter(decoder.device))
    submit(first, "whole", sampling, ())
    first.run()
    whole, scores = first.sink.tokens["whole"], first.sink.logprobs["whole"]
    rng = random.Random(1)
    drafter = AnswerDrafter([[*PROMPT, *whole]], VOCAB, 0.8, device=decoder.device)
    plan = LoopPlan(1, drafts_on_device=True, max_depth=5, max_nodes=21)
    # Few pages, so that resumed sequences are also retracted and prefilled again.
    second = make_harness(decoder, drafter, plan=plan, max_running=3, num_pages=18, page_size=8)
    cuts = {1, len(whole) - 1, *rng.sample(range(2, len(whole) - 1), 2)}
    names = {f"{kind} {cut}": (kind, cut) for kind in ROUNDS for cut in sorted(cuts)}
    for name, (kind, cut) in names.items():
        submit(second, name, sampling, whole[:cut], kind)
    second.run()
    assert not second.sink.failed
    for name, (_, cut) in names.items():
        assert_same_tokens(decoder, PROMPT, whole, [*whole[:cut], *second.sink.tokens[name]], sampling)
        resumed, finished = second.sink.logprobs[name], second.sink.finished[name]
        assert [one.logprob for one in resumed] == pytest.approx(
            [one.logprob for one in scores[cut:]], abs=1e-3
        )
        assert finished.reason is first.sink.finished["whole"].reason
        assert finished.matched_token == first.sink.finished["whole"].matched_token
        assert (finished.prompt_tokens, finished.completion_tokens) == (len(PROMPT), len(whole))
    assert second.engine.stats().speculation.accepted_tokens > 0


def test_a_penalty_tells_the_prompt_from_the_output(decoder: Decoder) -> None:
    """The same tokens as a longer prompt would get other penalties, and another output."""
    sampling = SAMPLINGS["penalties"]
    whole = generate_plain(decoder, NoDrafter(decoder.device), PROMPT, NEW_TOKENS, sampling=sampling)
    as_prompt = generate_plain(
        decoder, NoDrafter(decoder.device), [*PROMPT, *whole[:8]], NEW_TOKENS - 8, sampling=sampling
    )
    assert as_prompt != whole[8:]


@pytest.mark.parametrize(
    ("resume", "complaint"),
    [
        ((3, VOCAB), "resume_ids contains token 48"),
        ((3,) * NEW_TOKENS, "none of the 24 new tokens is left"),
        ((3, STOP), "contains a stop token"),
    ],
)
def test_tokens_that_cannot_be_resumed_are_refused(
    decoder: Decoder, resume: tuple[int, ...], complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint) as error:
        submit(make_harness(decoder, NoDrafter(decoder.device)), "r", SAMPLINGS["greedy"], resume)
    assert error.value.field == "resume_ids"


def test_a_resumed_request_passes_a_full_queue_and_waits_in_front(decoder: Decoder) -> None:
    harness = make_harness(decoder, NoDrafter(decoder.device), max_running=1, max_queued=2)
    greedy = SAMPLINGS["greedy"]
    for name in ("a", "b"):
        submit(harness, name, greedy, ())
    with pytest.raises(OverloadedError):
        submit(harness, "c", greedy, ())
    submit(harness, "moved", greedy, (3,))
    harness.run()
    assert list(harness.sink.finished) == ["moved", "a", "b"]
    assert harness.sink.finished["moved"].reason is FinishReason.LENGTH


def submit(
    harness: Harness,
    name: str,
    sampling: SamplingParams,
    resume: tuple[int, ...] | list[int],
    kind: str = "plain",
) -> None:
    mode, shape = ROUNDS[kind]
    harness.submit(
        PROMPT,
        NEW_TOKENS,
        request_id=name,
        sampling=sampling,
        mode=mode,
        shape=shape,
        stop=[STOP],
        logprobs=WANTED,
        resume=resume,
    )
