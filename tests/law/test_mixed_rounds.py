"""Every request gets the output of plain decoding alone, whatever else the rounds contain.

`hypothesis` draws mixtures of everything at once: modes, shapes, samplings, forms, traces, logprobs, hidden
states, stop tokens, times of joining, pausing and cancelling, prompts in packed chunks of any length,
recorded and not, small pools, and drafters that fail or change.
"""

from __future__ import annotations

from collections import Counter
from functools import cache, lru_cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from support.engine.device_toys import AnswerDrafter
from support.engine.target_harness import assert_same_tokens, generate_plain, hidden_of, load_toy
from support.grammars.toy_grammar import ToyGrammar
from support.models.toys import make_toy_target
from support.outputs.drawn_requests import (
    MOST_NODES,
    MOST_TOKENS,
    PROMPTS,
    VOCAB,
    Asked,
    Machine,
    machines,
    requests,
)
from support.outputs.mixed_requests import Service
from support.outputs.traces import check_report, check_traces

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.base.generation import FinishReason, SamplingParams, SpeculationMode
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import FeatureSpec

torch.set_num_threads(1)
MIXTURES = 64
"""Number of mixtures per plan."""
ALWAYS = {
    "accepted tokens",
    "bounded trees",
    "cancelled",
    "forms",
    "logprobs",
    "losses",
    "mixed",
    "retractions",
    "states",
    "tokens cut",
    "trees",
}
PROMPTS_IN = {"recorded prompts", "packed prompts", "recorded chunks behind others"}
ON_DEVICE = {"drafts on the device", "kv_full"}
ON_HOST = {"draft changes", "drafts through the host", "fake"}
"""What the mixtures of a plan must cover, as counted in `Service.seen`."""
PROMPTS_THAT_ARRIVE_TOGETHER = [
    Asked(
        prompt=prompt,
        new_tokens=12,
        sampling=SamplingParams(temperature=0.0),
        mode=SpeculationMode.ON,
        shape=(3, 2, 7),
        trace=False,
        priority=0,
        stop_at=None,
        joins=0,
        cancels=None,
        pauses=None,
    )
    for prompt in (1, 2, 3, 2)
]
"""A mixture whose prompts always share a recorded pass. Drawn prompts seldom arrive together."""
ROOMY = Machine(
    max_running=6,
    page_size=4,
    spare_slots=1000,
    prefill_chunk=512,
    prefill_budget=64,
    prefill_sizes=(4, 16, 64),
    max_packed_rows=2048,
    features=True,
    accuracy=0.8,
    refuse_every=0,
    losses=(),
    down=(0, 0),
    seed=0,
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(
        make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=3, num_layers=3)
    )


@cache
def plain(
    decoder: Decoder, prompt: int, sampling: SamplingParams, grammar: ToyGrammar | None = None
) -> list[int]:
    """Return the output of plain decoding alone."""
    form = {} if grammar is None else {"grammar": grammar}
    return generate_plain(decoder, NoDrafter(), PROMPTS[prompt], MOST_TOKENS, sampling=sampling, **form)


@lru_cache(maxsize=2000)
def one_pass(decoder: Decoder, tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states and the logprobs of the next token, from one pass over all of `tokens`."""
    hidden = hidden_of(decoder, tokens)
    return hidden, decoder.logits(hidden).float().log_softmax(-1)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_every_mixture_gives_everybody_the_plain_output(
    decoder: Decoder, on_device: bool, lookahead: int
) -> None:
    plan = LoopPlan(lookahead, on_device, max_depth=5, max_nodes=MOST_NODES)
    seen: Counter[str] = Counter()

    @settings(
        max_examples=MIXTURES,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.lists(requests(), min_size=4, max_size=8), machines())
    @example(PROMPTS_THAT_ARRIVE_TOGETHER, ROOMY)
    def check(asked: list[Asked], machine: Machine) -> None:
        seen.update(serve(decoder, plan, asked, machine))

    check()
    print(seen)
    covered = {name for name, count in seen.items() if count}
    assert ALWAYS | PROMPTS_IN | (ON_DEVICE if on_device else ON_HOST) <= covered, (
        "the mixtures must cover all of these"
    )


def serve(decoder: Decoder, plan: LoopPlan, asked: list[Asked], machine: Machine) -> Counter[str]:
    """Serve a mixture, and assert everything that holds at its end. Return what has happened."""
    answers = [plain(decoder, one.prompt, one.sampling, one.grammar)[: one.new_tokens] for one in asked]
    stops = [
        frozenset(answer[one.stop_at : one.stop_at + 1]) if one.stop_at is not None else frozenset[int]()
        for one, answer in zip(asked, answers, strict=True)
    ]
    size = 3 * decoder.config.hidden_size
    spec = FeatureSpec(aux_layer_ids=(0, 1, 2), feature_size=size, fingerprint="raw")
    known = [[*PROMPTS[one.prompt], *answer] for one, answer in zip(asked, answers, strict=True)]
    drafter = AnswerDrafter(known, VOCAB, machine.accuracy, spec if machine.features else None)
    service = Service(decoder, plan, machine, drafter)
    service.serve(asked, stops)
    service.check_idle()
    for index, one in enumerate(asked):
        expected = answers[index]
        for stop in stops[index]:
            expected = expected[: expected.index(stop) + 1]
        check_request(decoder, service, str(index), one, expected)
    return service.seen


def check_request(decoder: Decoder, service: Service, name: str, one: Asked, expected: list[int]) -> None:
    """Assert that a request has its output, its finish reason, and traces and statistics that explain it."""
    sink, seen = service.harness.sink, service.seen
    prompt, found, finished = PROMPTS[one.prompt], sink.tokens.get(name, []), sink.finished[name]
    # 1. The tokens.
    ended = len(found) == len(expected)
    if one.cancels is not None and not ended:
        keep = one.cancels[1]
        assert finished.reason is (FinishReason.CANCELLED if keep is None else FinishReason.STOP)
        assert finished.completion_tokens == min(len(found), len(found) if keep is None else keep)
        expected = expected[: len(found)]
        seen["cancelled"] += 1
    else:
        assert ended
        reason = FinishReason.LENGTH if finished.matched_token is None else FinishReason.STOP
        assert finished.reason is reason
        assert finished.matched_token in (None, found[-1])
        assert finished.completion_tokens == len(found)
    if one.grammar is None:
        assert_same_tokens(decoder, prompt, expected, found, one.sampling)
    else:
        assert found == expected
        seen["forms"] += bool(found)
    # 2. The data about the tokens.
    check_logprobs(decoder, service, name, one, ended)
    check_states(decoder, service, name, one, ended)
    # 3. The traces.
    rounds = sink.rounds.get(name, [])
    if one.trace:
        prefilled = check_traces(rounds, [*prompt, *found], len(prompt))
        assert prefilled == service.prefilled[name]
        check_report(finished, rounds)
    else:
        assert not rounds
    # 4. The statistics.
    stats, report = service.sequences[name].stats, finished.speculation
    assert sum(stats.histogram) == stats.rounds == report.rounds
    assert stats.accepted_tokens == sum(k * count for k, count in enumerate(stats.histogram))
    by_rounds = finished.completion_tokens - service.prefilled[name] + stats.tokens_cut
    assert sum((k + 1) * count for k, count in enumerate(stats.histogram)) == by_rounds
    if one.mode is SpeculationMode.OFF:
        assert not stats.draft_rounds
        assert not stats.fallbacks
    seen["accepted tokens"] += stats.accepted_tokens
    seen["tokens cut"] += stats.tokens_cut
    seen.update(stats.fallbacks)


def check_logprobs(decoder: Decoder, service: Service, name: str, one: Asked, ended: bool) -> None:
    """Assert that a client gets the logprobs that it wants, of the raw logits of one pass."""
    sink, wanted, prompt = service.harness.sink, one.logprobs, PROMPTS[one.prompt]
    found, scored = sink.tokens.get(name, []), sink.logprobs.get(name, [])
    before = sink.prompt_logprobs.get(name, [])
    assert len(scored) == (len(found) if wanted.top is not None else 0)
    if wanted.prompt_top is None:
        assert not before
    elif ended:
        assert len(before) == len(prompt) - 1
    if not (scored or before):
        return
    tokens = (*prompt, *found)
    _, logprobs = one_pass(decoder, tokens)
    for first, some in ((1, before), (len(prompt), scored)):
        rows = logprobs[first - 1 : first - 1 + len(some)]
        named = torch.tensor([one.requested for one in some]).view(len(some), len(wanted.token_ids))
        torch.testing.assert_close(named, rows[:, list(wanted.token_ids)], atol=1e-3, rtol=0)
        own = rows.gather(1, torch.tensor(tokens[first : first + len(some)])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([one.logprob for one in some]), own, atol=1e-3, rtol=0)
    service.seen["logprobs"] += len(scored)


def check_states(decoder: Decoder, service: Service, name: str, one: Asked, ended: bool) -> None:
    """Assert that a client gets the hidden states that it wants, of one pass."""
    sink, states = service.harness.sink, service.harness.sink.states.get(name, [])
    tokens = (*PROMPTS[one.prompt], *sink.tokens.get(name, []))[:-1]
    if not (one.states.wanted and states):
        assert not states
        assert not (one.states.wanted and ended)
        return
    assert [part.first for part in states] == [0, *[part.stop for part in states[:-1]]]
    assert states[-1].stop <= len(tokens)
    assert states[-1].stop == len(tokens) or not ended, "each token but the last has states"
    found = np.frombuffer(b"".join(part.hidden_states for part in states), "<f4")
    expected, _ = one_pass(decoder, tokens)
    rows = expected[: states[-1].stop].cpu()
    np.testing.assert_allclose(found.reshape(rows.shape), rows, atol=1e-3, rtol=1e-3)
    service.seen["states"] += len(rows)
