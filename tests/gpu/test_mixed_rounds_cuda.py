"""Tests of rounds that mix everything, in CUDA graphs: modes, shapes, samplings, traces, joins and leaves.

Some clients also want hidden states and logprobs, which need the sampling mode `FULL`. Each request must get
the tokens that it gets alone, whoever else is in the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drafts.gpu_pair import TARGET, make_pair_drafter
from support.engine.deterministic_rig import assert_bits, harness_of, load, recorded
from support.engine.device_toys import AnswerDrafter
from support.engine.target_harness import FakeDrafter, Harness, generate_plain, make_harness, oracle_plan
from support.models.toys import make_toy_target
from support.outputs.mixed_crowd import Client, Crowd, check_outputs, draw_clients, watched_rounds

from outrider.services.draft.inproc import InprocDrafter
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.packed_batch import WIDTHS, SamplingMode
from outrider.services.target.model.verify_pass import PassSize
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.open import load_decoder
from outrider.shared.spec.drafter import Drafter
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
AHEAD = LoopPlan(lookahead=1, drafts_on_device=True, max_depth=8)
VOCAB = 64
COUNT = 24
LIMITS: dict[str, Any] = {"max_running": 8, "max_queued": 64, "prefill_chunk": 48}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_decoder(TARGET, "cuda", torch.float32)


@pytest.fixture(scope="module")
def pair(decoder: Decoder) -> Iterator[InprocDrafter]:
    drafter = make_pair_drafter(decoder)
    yield drafter
    drafter.shutdown()


@pytest.fixture(scope="module")
def clients(decoder: Decoder) -> list[Client]:
    return draw_clients(random.Random(11), COUNT, decoder.config.vocab_size, data_every=8)


@pytest.fixture(scope="module")
def plain(decoder: Decoder, clients: list[Client]) -> dict[str, list[int]]:
    """Return the output of each client alone, without graphs, drafts and stop tokens."""
    return {
        client.name: generate_plain(
            decoder, NoDrafter(), client.prompt, client.new_tokens, sampling=client.sampling
        )
        for client in clients
    }


def the_pair(pair: InprocDrafter, _answers: list[list[int]], _vocab_size: int) -> Drafter:
    return pair


def right_answers(_pair: InprocDrafter, answers: list[list[int]], vocab_size: int) -> Drafter:
    return AnswerDrafter(answers, vocab_size, 0.7, device="cuda", checked=False)


def host_answers(_pair: InprocDrafter, answers: list[list[int]], vocab_size: int) -> Drafter:
    return FakeDrafter(oracle_plan(answers, vocab_size, 0.7))


class CountedGraphs(GraphCache):
    """Counts the replays of rounds in mode `FULL`."""

    full_rounds = 0

    def run(self, key: Hashable, record: Callable[[], Any]) -> Any:
        self.full_rounds += isinstance(key, GraphKey) and key.mode is SamplingMode.FULL
        return super().run(key, record)


def record_full_rounds(harness: Harness) -> None:
    """Record rounds in mode `FULL`. Without this, few sizes would occur often enough to be recorded."""
    harness.engine.recordings.rounds([])  # adopts the draft
    step_runner = harness.engine.step_runner
    with harness.runner.graphs.keeping():
        for rows in (256, 128, 64, 32, 8):
            for width in WIDTHS:
                for capture in {harness.runner.captures, False}:
                    step_runner.capture(PassSize(rows, width, SamplingMode.FULL, capture))


@pytest.mark.parametrize(("num_pages", "page_size"), [(700, 16), (64, 4)], ids=["roomy", "crowded"])
@pytest.mark.parametrize("make_drafter", [the_pair, right_answers, host_answers])
def test_each_request_gets_what_it_gets_alone(
    decoder: Decoder,
    pair: InprocDrafter,
    clients: list[Client],
    plain: dict[str, list[int]],
    make_drafter: Callable[[InprocDrafter, list[list[int]], int], Drafter],
    num_pages: int,
    page_size: int,
) -> None:
    answers = [client.prompt + plain[client.name] for client in clients]
    drafter = make_drafter(pair, answers, decoder.config.vocab_size)
    cache = CountedGraphs(decoder.device)
    harness = make_harness(
        decoder, drafter, plan=AHEAD, graphs=cache, num_pages=num_pages, page_size=page_size, **LIMITS
    )
    record_full_rounds(harness)
    again = [replace(client, name=f"{client.name} again") for client in clients]
    outputs = plain | {one.name: plain[client.name] for one, client in zip(again, clients, strict=True)}
    with watched_rounds() as seen:
        Crowd(harness, random.Random(num_pages)).run(clients)
        random.Random(3).shuffle(again)
        Crowd(harness, random.Random(num_pages + 1), haste=1.0).run(again)
    check_outputs(decoder, harness, [*clients, *again], outputs)
    stats = harness.engine.stats().speculation
    print(seen, f"{harness.scheduler.num_retractions} retractions")
    # How often rows in mode `auto` draft depends on measured times, so they do not count.
    assert seen.meetings > seen.rounds / 8
    assert seen.mixed_meetings > seen.meetings / 2
    assert stats.accepted_tokens > 0
    if num_pages < 100:  # with room for all, only a paused request may be retracted, to lend its slot
        assert harness.scheduler.num_retractions > 0
    keys = [key for key in cache.keys if isinstance(key, GraphKey)]
    modes = {key.mode for key in keys if key.kind == "verify"}
    assert len(modes) > 1, "rounds without states and logprobs must also be recorded"
    assert cache.full_rounds > 20, "rounds with states and logprobs must be replays"
    assert any(key.kind == "draft" for key in keys) == (make_drafter is not host_answers)


def test_rounds_within_a_budget_of_rows_take_turns(
    decoder: Decoder, pair: InprocDrafter, clients: list[Client], plain: dict[str, list[int]]
) -> None:
    """Trees that do not fit into a round wait, and no token changes."""
    cache, plan = GraphCache(decoder.device), replace(AHEAD, max_packed_rows=40)
    harness = make_harness(decoder, pair, plan=plan, graphs=cache, **LIMITS)
    patient = [replace(client, cancel_after=None) for client in clients]
    Crowd(harness, random.Random(5), haste=1.0).run(patient)
    check_outputs(decoder, harness, patient, plain)
    reasons = [harness.sink.finished[client.name].speculation.fallback_reason for client in patient]
    assert "budget" in reasons
    assert max(key.rows for key in cache.keys if isinstance(key, GraphKey) and key.kind == "verify") <= 40


def busy(decoder: Decoder, drafter: Drafter, clients: list[Client]) -> Harness:
    """Return an engine in the middle of its rounds, with one round in flight."""
    cache = GraphCache(decoder.device)
    harness = make_harness(decoder, drafter, plan=AHEAD, graphs=cache, **LIMITS)
    crowd = Crowd(harness, random.Random(1))
    for client in clients:
        crowd.submit(client)
    for _ in range(6):
        harness.step()
    assert harness.engine.num_live == len(clients)
    torch.cuda.synchronize()
    return harness


def state_of(harness: Harness, drafter: InprocDrafter) -> dict[str, torch.Tensor]:
    """Return a copy of everything that a round leaves for later rounds."""
    table = harness.engine.step_runner.table
    state, sampling = table.state, table.sampling
    planes = {
        **{f"target plane {index}": plane for index, plane in enumerate(harness.runner.pool.planes())},
        **{
            f"draft plane {index}": plane
            for index, plane in enumerate(drafter._engine.strategy._pool.planes())  # type: ignore[attr-defined]
        },
    }
    found = {
        "committed_lens": state.committed_lens,
        "limits": state.limits,
        "tokens": state.tokens,
        "counts": state.counts,
        "features": table.features,
        "page_table": table.page_table,
        "temperature": sampling.temperature,
        "seeds": sampling.seeds,
        "choices": sampling.choices,
        **planes,
    }
    return {name: tensor.clone() for name, tensor in found.items()}


def test_graphs_that_are_recorded_while_requests_are_live_leave_the_slots_alone(
    decoder: Decoder, pair: InprocDrafter, clients: list[Client], plain: dict[str, list[int]]
) -> None:
    lively = [
        replace(client, prompt=client.prompt[:20], new_tokens=160, stop=None, cancel_after=None)
        for client in clients[:6]
    ]
    outputs = {
        client.name: generate_plain(decoder, NoDrafter(), client.prompt, 160, sampling=client.sampling)
        for client in lively
    }
    harness = busy(decoder, pair, lively)
    first = len(harness.runner.graphs.keys)
    sizes = [(size, shape) for size in (8, 3, 1) for shape in (DraftShape(6, 2, 11), NO_DRAFT)]
    with harness.runner.graphs.keeping():
        for what, record in harness.engine.recordings.rounds(sizes):
            assert harness.engine.num_live == len(lively)
            torch.cuda.synchronize()
            before = state_of(harness, pair)
            record()
            torch.cuda.synchronize()
            for name, tensor in state_of(harness, pair).items():
                # Compare bits, because features that were never written may be NaN.
                assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), (what, name)
            harness.step()  # at most one graph is recorded between two rounds
    assert len(harness.runner.graphs.keys) > first + 6, "the sizes must be new"
    harness.run()
    check_outputs(decoder, harness, lively, outputs)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1408, "head_dim": 64, "num_heads": 8}
    return make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=3, **sizes)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("chunk", [512, 17])
def test_deterministic_rounds_have_equal_bits_in_any_company(
    target_dir: Path, graphs: bool, chunk: int
) -> None:
    """With `--deterministic`, bf16 gives each request exactly its own tokens, and without graphs its logits.

    The chunks of the prompts, the sizes of pages and pools, and all other requests are varied.
    """
    decoder = load(target_dir, "cuda", torch.bfloat16)
    lone = draw_clients(random.Random(7), 10, VOCAB, prompt_lens=(1, 9, 70), most_tokens=40)
    drawn = [replace(client, new_tokens=40, cancel_after=None) for client in lone]
    logits: list[dict[int, torch.Tensor]] = []
    outputs: dict[str, list[int]] = {}
    for client in drawn:
        harness = harness_of(decoder, NoDrafter())
        crowd = Crowd(harness, random.Random(0))
        with recorded(decoder) as rows:
            crowd.submit(replace(client, mode=SpeculationMode.OFF, stop=None, trace=False))
            crowd.settle()
        outputs[client.name] = harness.sink.tokens[client.name]
        logits.append({position: found[0] for position, found in rows.items()})
    answers = [client.prompt + outputs[client.name] for client in drawn]
    for seed in range(2):
        drafter = AnswerDrafter(answers, VOCAB, 0.7, device="cuda", checked=False)
        harness = harness_of(
            decoder,
            drafter,
            plan=AHEAD,
            graphs=GraphCache(decoder.device, graphs),
            page_size=(3, 16)[seed],
            num_pages=(150, 40)[seed],
            max_running=6,
            max_queued=64,
            prefill_chunk=chunk,
        )
        with watched_rounds() as seen:
            if graphs:
                Crowd(harness, random.Random(seed)).run(drawn)
            else:
                with recorded(decoder) as rows:
                    Crowd(harness, random.Random(seed)).run(drawn)
                for client, own in zip(drawn, logits, strict=True):
                    length = len(client.prompt) + len(client.expected(outputs[client.name]))
                    assert_bits({at: row for at, row in own.items() if at < length}, rows)
        assert seen.mixed > 0
        for client in drawn:
            assert harness.sink.tokens[client.name] == client.expected(outputs[client.name]), client
