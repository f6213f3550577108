"""A prompt with a stored prefix gets the output of a computed prompt, and drafts that are as good."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.drafts.draft_pairs import KINDS, Pair, make_pair
from support.engine.deterministic_rig import harness_of, load, recorded
from support.engine.target_harness import (
    FakeDrafter,
    Harness,
    assert_same_tokens,
    generate_plain,
    load_toy,
    make_harness,
    oracle_plan,
)
from support.models.toys import make_toy_target
from support.outputs.mixed_crowd import Client, Crowd, draw_clients
from support.suite.compute_device import DEVICE, GRAPHS

from outrider.services.draft.inproc import drafter_beside
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.model.model_runner import ChosenTokens, ModelRunner
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.base.logit_rules import LogitRules, LogprobParams
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder, DecoderOutput
from outrider.shared.spec.drafter import Drafter, FeatureSpec

torch.set_num_threads(1)
VOCAB = 64
PAGE = 16
PROMPT = [random.Random(1).randrange(VOCAB) for _ in range(70)]
STORED = 64
"""The tokens of the full pages of `PROMPT`."""
NEW_TOKENS = 24
OFF = {"mode": SpeculationMode.OFF}
CHAIN = {"mode": SpeculationMode.ON, "shape": (4, 1, 5)}
TREE = {"mode": SpeculationMode.ON, "shape": (3, 2, 8)}
AUTO = {"mode": SpeculationMode.AUTO}
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.8, top_k=9, seed=3, rules=LogitRules(repetition_penalty=1.3)),
]
AHEAD = LoopPlan(lookahead=1, drafts_on_device=True)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=3, num_layers=3)


@pytest.fixture(scope="module")
def decoder(target_dir: Path) -> Decoder:
    return load_toy(target_dir)


def features_of(decoder: Decoder) -> FeatureSpec:
    return FeatureSpec(
        aux_layer_ids=(0, 1, 2), feature_size=3 * decoder.config.hidden_size, fingerprint="raw"
    )


def drafter_for(decoder: Decoder, prompts: Sequence[Sequence[int]], **options: object) -> FakeDrafter:
    answers = [
        [*prompt, *generate_plain(decoder, NoDrafter(), prompt, NEW_TOKENS, **options)] for prompt in prompts
    ]
    return FakeDrafter(oracle_plan(answers, VOCAB, 0.8), features_of(decoder))


@contextmanager
def computed_rows() -> Iterator[list[tuple[int, int]]]:
    """Collect the token ranges of all prompt chunks that are computed in this block."""
    spans: list[tuple[int, int]] = []
    begin = ModelRunner.begin_prefill

    def noting(runner: ModelRunner, chunks: Sequence[PrefillChunk], *arguments: object) -> ChosenTokens:
        spans.extend((chunk.start, chunk.stop) for chunk in chunks)
        return begin(runner, chunks, *arguments)  # type: ignore[arg-type]

    with mock.patch.object(ModelRunner, "begin_prefill", noting):
        yield spans


@pytest.mark.parametrize("how", [OFF, CHAIN, TREE, AUTO], ids=["plain", "chain", "tree", "auto"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "rules"])
def test_a_hit_has_the_tokens_and_logprobs_of_a_miss(
    decoder: Decoder, how: dict[str, object], sampling: SamplingParams
) -> None:
    harness = make_harness(decoder, drafter_for(decoder, [PROMPT], sampling=sampling), prefill_chunk=27)
    with computed_rows() as spans:
        for name in ("miss", "hit"):
            harness.submit(
                PROMPT,
                NEW_TOKENS,
                request_id=name,
                sampling=sampling,
                logprobs=LogprobParams(top=2),
                **how,  # type: ignore[arg-type]
            )
            harness.run()
    assert spans == [(0, 27), (27, 54), (54, 70), (STORED, 70)]
    sink = harness.sink
    assert [sink.finished[name].cached_tokens for name in ("miss", "hit")] == [0, STORED]
    assert_same_tokens(decoder, PROMPT, sink.tokens["miss"], sink.tokens["hit"], sampling)
    if sink.tokens["miss"] == sink.tokens["hit"]:
        pairs = zip(sink.logprobs["miss"], sink.logprobs["hit"], strict=True)
        assert all(one.logprob == pytest.approx(other.logprob, abs=1e-4) for one, other in pairs)


def test_the_drafter_gets_the_feature_rows_of_a_stored_prefix(decoder: Decoder) -> None:
    kept: list[list[torch.Tensor]] = []

    class Keeping(FakeDrafter):
        def close(self, session_ids: Sequence[int]) -> None:
            kept.extend(self.rows[one] for one in session_ids)
            super().close(session_ids)

    first = drafter_for(decoder, [PROMPT])
    harness = make_harness(decoder, Keeping(first.plan, first.spec))
    for name, how in (("plain", OFF), ("chain", CHAIN), ("tree", TREE)):
        harness.submit(PROMPT, NEW_TOKENS, request_id=name, **how)  # type: ignore[arg-type]
        harness.run()
    assert [harness.sink.finished[name].cached_tokens for name in ("plain", "chain", "tree")] == [
        0,
        STORED,
        STORED,
    ]
    alone = Keeping(first.plan, first.spec)
    reference = make_harness(decoder, alone)
    reference.submit(PROMPT, NEW_TOKENS, **TREE)  # type: ignore[arg-type]
    reference.run()
    chain, tree, expected = (torch.stack(rows[: len(PROMPT) - 1]) for rows in kept)
    torch.testing.assert_close(chain, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(tree, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "mode"), [(torch.float32, OFF), (torch.bfloat16, TREE)], ids=["fp32 plain", "bf16 tree"]
)
def test_deterministic_hits_have_the_bits_of_misses(
    target_dir: Path, dtype: torch.dtype, mode: dict[str, object]
) -> None:
    decoder = load(target_dir, DEVICE, dtype)
    plain = harness_of(decoder, NoDrafter())
    plain.submit(PROMPT, NEW_TOKENS, request_id="plain", **OFF)  # type: ignore[arg-type]
    plain.run()
    answer = plain.sink.tokens["plain"]
    harness = harness_of(decoder, FakeDrafter(oracle_plan([PROMPT + answer], VOCAB, 0.7)), prefill_chunk=27)
    found = []
    for name in ("miss", "hit"):
        with recorded(decoder) as rows:
            harness.submit(PROMPT, NEW_TOKENS, request_id=name, **mode)  # type: ignore[arg-type]
            harness.run()
        found.append({position: one[0] for position, one in rows.items()})
    assert harness.sink.finished["hit"].cached_tokens == STORED
    assert harness.sink.tokens["miss"] == harness.sink.tokens["hit"] == answer
    first = len(PROMPT)
    assert torch.equal(found[0][first], found[1][first])
    if mode is OFF:
        assert all(torch.equal(found[0][position], found[1][position]) for position in found[0])


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind != "EAGLE"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize(("plan", "graphs"), [(None, False), *((AHEAD, graphs) for graphs in GRAPHS)])
def test_a_second_identical_prompt_keeps_its_accept_length(
    pair: Pair, plan: LoopPlan | None, graphs: bool
) -> None:
    drafter = drafter_beside(pair.decoder, pair.settings)
    harness = make_harness(pair.decoder, drafter, plan=plan, graphs=GraphCache(DEVICE, graphs))
    for name in ("first", "second"):
        harness.submit(PROMPT, 60, request_id=name, shape=(3, 2, 8))
        harness.run()
    first, second = (harness.sink.finished[name] for name in ("first", "second"))
    drafter.shutdown()
    assert second.cached_tokens == STORED
    assert harness.sink.tokens["first"] == harness.sink.tokens["second"]
    assert second.speculation.accept_length >= 0.99 * first.speculation.accept_length


def test_prompts_with_the_same_prefix_are_computed_once(decoder: Decoder) -> None:
    other = [*PROMPT[:48], 1, 2, 3, 4]
    harness = make_harness(decoder, NoDrafter(), prefill_chunk=30)
    with computed_rows() as spans:
        for index in range(4):
            harness.submit(PROMPT, NEW_TOKENS, request_id=str(index))
        harness.submit(other, NEW_TOKENS, request_id="other")
        harness.run()
    assert sum(stop - start for start, stop in spans) == len(PROMPT) + 3 * (len(PROMPT) - STORED) + 4
    for index in range(4):
        assert_same_tokens(decoder, PROMPT, harness.sink.tokens["0"], harness.sink.tokens[str(index)])
    assert harness.sink.finished["other"].cached_tokens == 48
    plain = generate_plain(decoder, NoDrafter(), other, NEW_TOKENS)
    assert_same_tokens(decoder, other, plain, harness.sink.tokens["other"])


def test_a_paused_or_cancelled_request_holds_up_nobody_with_its_prefix(decoder: Decoder) -> None:
    harness = make_harness(decoder, NoDrafter(), prefill_chunk=20)
    leader = harness.submit(PROMPT, NEW_TOKENS, request_id="leader")
    harness.submit(PROMPT, NEW_TOKENS, request_id="follower")
    harness.step()
    assert len(harness.scheduler.active) == 1, "the follower waits for the leader's prefix"
    harness.engine.pause(leader)
    harness.step()
    assert len(harness.scheduler.active) == 2, "a paused leader is not awaited"
    harness.engine.cancel(leader)
    harness.run()
    plain = generate_plain(decoder, NoDrafter(), PROMPT, NEW_TOKENS)
    assert_same_tokens(decoder, PROMPT, plain, harness.sink.tokens["follower"])


@pytest.mark.parametrize("mode", [OFF, TREE], ids=["plain", "tree"])
def test_the_next_turn_of_a_chat_finds_the_answer(decoder: Decoder, mode: dict[str, object]) -> None:
    harness = make_harness(decoder, drafter_for(decoder, [PROMPT]))
    harness.submit(PROMPT, NEW_TOKENS, request_id="1", **mode)  # type: ignore[arg-type]
    harness.run()
    turn = [*PROMPT, *harness.sink.tokens["1"], 7, 8, 9]
    harness.submit(turn, NEW_TOKENS, request_id="2", **mode)  # type: ignore[arg-type]
    harness.run()
    stored = (len(PROMPT) + NEW_TOKENS - 1) // PAGE * PAGE
    assert stored > STORED
    assert harness.sink.finished["2"].cached_tokens == stored
    plain = generate_plain(decoder, NoDrafter(), turn, NEW_TOKENS)
    assert_same_tokens(decoder, turn, plain, harness.sink.tokens["2"])


def test_different_salts_share_nothing(decoder: Decoder) -> None:
    harness = make_harness(decoder, NoDrafter())
    for name, salt in (("a", ""), ("b", "tenant"), ("c", "tenant")):
        harness.submit(PROMPT, 4, request_id=name, salt=salt)
        harness.run()
    assert [harness.sink.finished[name].cached_tokens for name in "abc"] == [0, 0, STORED]


@pytest.mark.parametrize("start", [0, 40])
def test_prompt_logprobs_are_those_of_a_miss(decoder: Decoder, start: int) -> None:
    harness = make_harness(decoder, NoDrafter())
    wanted = LogprobParams(prompt_top=2, prompt_start=start)
    for name in ("miss", "hit"):
        harness.submit(PROMPT, 4, request_id=name, logprobs=wanted)
        harness.run()
    stored = max(0, start - 1) // PAGE * PAGE
    assert harness.sink.finished["hit"].cached_tokens == stored
    miss, hit = (harness.sink.prompt_logprobs[name] for name in ("miss", "hit"))
    assert len(miss) == len(PROMPT) - max(1, start)
    assert all(a.logprob == pytest.approx(b.logprob, abs=1e-4) for a, b in zip(miss, hit, strict=True))


@pytest.mark.parametrize("drafts", ["host", "device"])
def test_a_crowd_with_common_prefixes_in_a_small_pool(decoder: Decoder, drafts: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    clients = [_with_prefix(rng, client) for client in draw_clients(rng, 18, VOCAB, most_tokens=70)]
    plan = AHEAD if drafts == "device" else None
    drafter: Drafter = NoDrafter()
    if drafts == "host":
        drafter = drafter_for(decoder, [client.prompt for client in clients[:8]])
    if drafts == "device":
        device_pair = make_pair("EAGLE3", tmp_path)
        decoder, drafter = device_pair.decoder, drafter_beside(device_pair.decoder, device_pair.settings)
    harness = make_harness(
        decoder, drafter, plan=plan, num_pages=28, page_size=8, max_running=6, prefill_chunk=40
    )
    Crowd(harness, rng, haste=0.8).run(clients)
    drafter.shutdown()
    _check_crowd(decoder, harness, clients)
    assert harness.scheduler.num_retractions, "the pool should be too small"
    assert harness.engine.stats().prefixes.evicted_pages
    assert harness.scheduler.prefixes.hit_tokens


def _with_prefix(rng: random.Random, client: Client) -> Client:
    """Let a client's prompt begin with one of two common prefixes, or with none."""
    object.__setattr__(client, "prompt", PROMPT[: rng.choice((0, 33, 66))] + client.prompt[:90])
    return client


def _check_crowd(decoder: Decoder, harness: Harness, clients: Sequence[Client]) -> None:
    for client in clients:
        found = harness.sink.tokens.get(client.name, [])
        plain = generate_plain(
            decoder, NoDrafter(), client.prompt, client.new_tokens, sampling=client.sampling
        )
        expected = client.expected(plain)
        if client.cancel_after is not None:
            expected = expected[: len(found)]
        assert_same_tokens(decoder, client.prompt, expected, found, client.sampling)


def test_the_pages_of_a_request_with_nan_are_found_by_nobody(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(decoder, NoDrafter())
    forward, poisoned = decoder.forward, True

    def broken(*arguments: object) -> DecoderOutput:
        output = forward(*arguments)  # type: ignore[arg-type]
        if poisoned:
            output.hidden[:] = torch.nan
        return output

    harness.submit(PROMPT[:40], 4, request_id="before")
    harness.run()
    monkeypatch.setattr(decoder, "forward", broken)
    harness.submit(PROMPT, NEW_TOKENS, request_id="bad")
    harness.run()
    assert harness.sink.failed["bad"].error.reason == "numerical_error"
    poisoned = False
    harness.submit(PROMPT, NEW_TOKENS, request_id="after")
    harness.run()
    assert harness.sink.finished["after"].cached_tokens == 32, "the pages from before the failure are good"
    plain = generate_plain(decoder, NoDrafter(), PROMPT, NEW_TOKENS)
    assert_same_tokens(decoder, PROMPT, plain, harness.sink.tokens["after"])


def test_a_failed_step_empties_the_cache(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make_harness(decoder, NoDrafter())
    harness.submit(PROMPT, 4)
    harness.run()
    assert harness.engine.stats().prefixes.pages
    harness.engine.step_failed(RuntimeError("a kernel failed"))
    assert harness.engine.stats().prefixes.pages == 0


@pytest.mark.parametrize("requests", [1, 3])
def test_a_draft_that_connects_later_gets_the_features_of_shared_prompts(
    decoder: Decoder, requests: int
) -> None:
    drafter = drafter_for(decoder, [PROMPT])
    spec, drafter.spec = drafter.spec, FeatureSpec(fingerprint="none yet")
    harness = make_harness(decoder, drafter)
    for index in range(requests):
        harness.submit(PROMPT, NEW_TOKENS, request_id=str(index), shape=(3, 2, 8))
    for _ in range(8):
        harness.step()
    drafter.spec = spec
    harness.run()
    for index in range(requests):
        report = harness.sink.finished[str(index)].speculation
        assert report.accepted_tokens, "the draft must be used"
        assert_same_tokens(decoder, PROMPT, harness.sink.tokens["0"], harness.sink.tokens[str(index)])
    plain = generate_plain(decoder, NoDrafter(), PROMPT, NEW_TOKENS)
    assert_same_tokens(decoder, PROMPT, plain, harness.sink.tokens["0"])


def test_a_flush_during_requests_changes_no_token(decoder: Decoder) -> None:
    harness = make_harness(decoder, drafter_for(decoder, [PROMPT]))
    for index in range(3):
        harness.submit(PROMPT, NEW_TOKENS, request_id=str(index))
    for _ in range(6):
        harness.step()
    removed = harness.engine.flush_prefixes()
    harness.step()
    assert removed.result(0) == STORED // PAGE
    harness.submit(PROMPT, NEW_TOKENS, request_id="later")
    harness.run()
    assert harness.sink.finished["later"].cached_tokens == 0
    for name in ("1", "2", "later"):
        assert_same_tokens(decoder, PROMPT, harness.sink.tokens["0"], harness.sink.tokens[name])


def test_a_disabled_cache_finds_nothing(decoder: Decoder) -> None:
    harness = make_harness(decoder, NoDrafter(), prefix_cache=False)
    for name in ("a", "b"):
        harness.submit(PROMPT, 4, request_id=name)
        harness.run()
    assert harness.sink.finished["b"].cached_tokens == 0
    assert harness.scheduler.allocator.free_pages == harness.scheduler.allocator.num_pages
