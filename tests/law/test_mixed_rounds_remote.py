"""Mixed rounds with a draft in another process stay on the device, and every tree is the right one.

Requests of different shapes and modes join and leave while others draft, and requests in mode `auto` change
their shapes from round to round. Each of their trees must be the tree that a new request for the same tokens
gets in its first round, in the target's process and through the host. The output cannot show a wrong tree,
because verification corrects wrong drafts.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.drafts.draft_faults import Fault
from support.drafts.draft_pairs import KINDS
from support.drafts.draft_process import DraftProcess
from support.engine.deterministic_rig import assert_bits, harness_of, load, recorded
from support.engine.target_harness import Harness, assert_same_tokens, generate_plain, load_toy, make_harness
from support.suite.compute_device import DEVICE

from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.draft_client.answer_wait import AnswerWait, Awaited
from outrider.services.target.draft_client.connection import Connection
from outrider.services.target.draft_client.exchange_blobs import BoundedTreeExchange
from outrider.services.target.draft_client.link import TargetIdentity
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.policy.controller import EntryBound
from outrider.services.target.policy.offered_shapes import cut
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import DrafterState, ProposalRequest
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

torch.set_num_threads(1)
AHEAD = LoopPlan(lookahead=1, drafts_on_device=True, max_depth=5, max_nodes=16)
AT_ONCE = LoopPlan(lookahead=0, drafts_on_device=True, max_depth=5, max_nodes=16)
BOUND_S = 30.0
"""Time limit of a run with a fault. A run delayed by more than a few fault deadlines is considered hung."""
FAULT_S = 2.0
"""Fault deadline of a draft with a fault."""
CAP_S = 1.0
"""Bound for the time, in seconds, for which a round with rows in another mode than `on` may wait for trees.

The limits follow the measured times. On an idle machine, they are 0.05 to 0.25 s."""
PATIENT_S = 16.0
"""Fault deadline of the draft. No sequence is then given up because the machine is busy."""
ON, AUTO, OFF = SpeculationMode.ON, SpeculationMode.AUTO, SpeculationMode.OFF
GREEDY = SamplingParams(temperature=0.0)
REQUESTS: list[tuple[list[int], int, SamplingParams, SpeculationMode, tuple[int, int, int]]] = [
    ([1, 2, 3, 4], 40, GREEDY, ON, (4, 3, 12)),
    ([9, 8, 7] * 6, 60, SamplingParams(temperature=1.0, seed=9), AUTO, (3, 1, 4)),
    ([5], 30, SamplingParams(temperature=0.8, top_p=0.9, seed=4), ON, (3, 1, 4)),
    ([6, 1], 35, GREEDY, OFF, (3, 1, 4)),
    ([3, 3, 3, 2], 50, GREEDY, AUTO, (4, 3, 12)),
    ([8, 2, 5] * 9, 30, SamplingParams(temperature=0.7, seed=(1 << 64) - 3), ON, (5, 1, 6)),
    ([7, 7], 25, GREEDY, AUTO, (2, 2, 5)),
    ([4, 6, 4], 12, GREEDY, ON, (4, 3, 12)),
]
"""Prompt, number of tokens, sampling parameters, mode and shape of each request."""


HEADS = [("EAGLE3", "ipc://"), ("EAGLE3", "unix:")]
"""Kinds of drafts, and schemes of their addresses."""


@pytest.fixture(scope="module", params=[*HEADS, ("MTP", "ipc://")], ids=str)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module")
def folders(kind: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return KINDS[kind[0]](tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def decoder(folders: tuple[Path, Path]) -> Decoder:
    return load_toy(folders[0])


@pytest.fixture(scope="module")
def draft(
    kind: tuple[str, str], folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DraftProcess]:
    process = DraftProcess(tmp_path_factory.mktemp("draft"), kind[1], *folders)
    yield process
    assert process.stop() == 0, process.output()


def follow(draft: DraftProcess, decoder: Decoder, fault_s: float) -> RemoteDrafter:
    """Return a drafter whose draft has accepted its slots."""
    made = RemoteDrafter(
        draft.address,
        TargetIdentity.of(decoder),
        decoder.weight,
        DEVICE,
        fault_deadline_s=fault_s,
        on_device=True,
    )
    deadline, pause = time.monotonic() + 120, threading.Event()
    while made.state() is not DrafterState.ON or not made.slots._accepted:
        assert time.monotonic() < deadline, draft.output()
        made.feature_spec()
        pause.wait(0.005)
    return made


@pytest.fixture
def drafter(draft: DraftProcess, decoder: Decoder) -> Iterator[RemoteDrafter]:
    made = follow(draft, decoder, PATIENT_S)
    yield made
    made.shutdown()


class Choices:
    """Chooses for `auto` entries, at random, a depth or not to draft, in phases of several rounds.

    Attributes:
        most: Largest number of shapes of the `auto` entries of a round.
    """

    def __init__(self, seed: int) -> None:
        self.most = 0
        self._rng = random.Random(seed)
        self._left: dict[int, int] = {}
        self._shapes: dict[int, DraftShape] = {}

    def choose(self, entries: Sequence[EntryBound], *_: object) -> list[DraftShape]:
        shapes = [self._turn(id(entry.state), entry.bound) for entry in entries]
        self.most = max(self.most, len(set(shapes) - {NO_DRAFT}))
        return shapes

    def _turn(self, sequence: int, bound: DraftShape) -> DraftShape:
        if not self._left.get(sequence):
            self._left[sequence] = self._rng.randint(1, 4)
            drafts = self._rng.random() < 0.7
            self._shapes[sequence] = self._rng.choice(depths_of(bound)) if drafts else NO_DRAFT
        self._left[sequence] -= 1
        return self._shapes[sequence]


def depths_of(bound: DraftShape) -> list[DraftShape]:
    """Return the shape cut to each of its depths. Each of these shapes has another number of nodes."""
    return [cut(bound, depth) for depth in range(1, bound.depth + 1)]


class Watch:
    """Counts the groups of every exchanged round, and records for how long rounds may wait for trees.

    Args:
        patient: True to wait for all trees, so that none is late because the machine is busy.

    Attributes:
        groups: Number of groups of each exchanged round.
        limits: Longest wait, in seconds, of each round with rows in another mode than `on`.
    """

    def __init__(self, patient: bool = True) -> None:
        self.groups: list[int] = []
        self.limits: list[float] = []
        self._patient = patient

    def __enter__(self) -> Watch:
        exchange = BoundedTreeExchange.exchange

        def watching(started: BoundedTreeExchange, limit_s: float | None, ahead: bool) -> None:
            self.groups.append(len(started.states))
            exchange(started, None if self._patient else limit_s, ahead)
            if not started.patient:
                self.limits.append(started.limit_s)

        run = AnswerWait.run

        def watching_host(wait: AnswerWait, awaited: Sequence[Awaited], request: ProposalRequest) -> bool:
            take_reply, others = wait._take_reply, request.has_other_rows
            others = others or any(not row.must_wait for row in request.rows)

            def taking(connection: Connection, seconds: float) -> bool:
                if others:
                    self.limits.append(seconds)
                return take_reply(connection, seconds)

            with mock.patch.object(wait, "_take_reply", taking):
                return run(wait, awaited, request)

        self._patches = [
            mock.patch.object(BoundedTreeExchange, "exchange", watching),
            mock.patch.object(AnswerWait, "run", watching_host),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def serve(harness: Harness, seed: int) -> None:
    """Submit all requests at random moments, and run them to their end."""
    rng = random.Random(seed)
    waiting = list(enumerate(REQUESTS))
    rng.shuffle(waiting)
    while waiting or harness.engine.has_work():
        if waiting and (rng.random() < 0.6 or not harness.engine.has_work()):
            index, (prompt, count, sampling, mode, shape) = waiting.pop()
            harness.submit(
                prompt, count, request_id=str(index), sampling=sampling, mode=mode, shape=shape, trace=True
            )
        harness.step()
    harness.check_idle()


def check(decoder: Decoder, folders: tuple[Path, Path], kind: str, harness: Harness) -> int:
    """Compare outputs and trees. Return the number of trees that were compared."""
    settings = {
        "draft": folders[1],
        "target_weights": folders[0],
        "speculative_algorithm": kind,
        "device": str(DEVICE),
        "dtype": "float32",
        "threads": 1,
        "kv_tokens": 8192,
    }
    beside = drafter_beside(decoder, DraftSettings.load(settings))
    fresh = make_harness(decoder, beside, max_running=64)
    found: dict[str, list[tuple[int, int]]] = {}
    for index, (prompt, count, sampling, _, shape) in enumerate(REQUESTS):
        plain = generate_plain(decoder, NoDrafter(), prompt, count, sampling=sampling)
        tokens = harness.sink.tokens[str(index)]
        assert_same_tokens(decoder, prompt, plain, tokens, sampling)
        known = [*prompt, *tokens]
        for one in harness.sink.rounds[str(index)]:
            if len(one.nodes) > 1:
                name = f"{index}-{one.base_len}"
                found[name] = [(node.token, node.parent) for node in one.nodes]
                start = known[: one.base_len - 1]
                (asked,) = (
                    made for made in depths_of(DraftShape(*shape)) if made.max_nodes == len(one.nodes)
                )
                asked_shape = asked.depth, asked.topk, asked.max_nodes
                fresh.submit(start, 3, request_id=name, sampling=sampling, shape=asked_shape, trace=True)
    fresh.run()
    for name, tree in found.items():
        first = fresh.sink.rounds[name][0]
        assert first.base_len == int(name.split("-")[1])
        assert tree == [(node.token, node.parent) for node in first.nodes], name
    beside.shutdown()
    drafted = {int(name.split("-")[0]) for name in found}
    modes = [request[3] for request in REQUESTS]
    assert drafted >= {index for index, mode in enumerate(modes) if mode is ON}
    assert any(modes[index] is AUTO for index in drafted)
    return len(found)


@pytest.mark.parametrize(("plan", "seed"), [(AT_ONCE, 0), (AHEAD, 1)], ids=["at once", "ahead"])
def test_mixed_rounds_stay_on_the_device_and_have_the_right_trees(
    decoder: Decoder,
    drafter: RemoteDrafter,
    folders: tuple[Path, Path],
    kind: tuple[str, str],
    plan: LoopPlan,
    seed: int,
) -> None:
    harness = make_harness(decoder, drafter, plan=plan, max_running=7, prefill_chunk=16)
    choices = Choices(seed)
    with (
        mock.patch.object(harness.engine.controller, "choose", choices.choose),
        mock.patch.object(drafter, "propose", wraps=drafter.propose) as proposed,
        Watch() as watch,
    ):
        serve(harness, seed)
    assert not proposed.call_count, "no round may go through the host"
    assert harness.engine._sessions.num_resyncs == 0, "no session may be opened again"
    assert max(watch.groups) >= 3, "rounds must have several shapes"
    assert choices.most >= 2, "entries in mode `auto` must have different shapes"
    reasons = {
        harness.sink.finished[str(index)].speculation.fallback_reason for index in range(len(REQUESTS))
    }
    # Sequences in mode `auto` decode plainly until the draft has their prompt.
    assert reasons <= {"", "user", "warming"}
    assert check(decoder, folders, kind[0], harness) > 20


def crowd(harness: Harness, fault: Callable[[], bool]) -> None:
    """Serve all requests together. Call `fault` after every step. It returns True once the fault happened."""
    for index, (prompt, count, sampling, mode, shape) in enumerate(REQUESTS):
        harness.submit(prompt, count, request_id=str(index), sampling=sampling, mode=mode, shape=shape)
    done = False
    while harness.engine.has_work():
        harness.step()
        done = fault() or done
    harness.check_idle()
    assert done, "the fault must happen while requests draft"


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(HEADS[0], "killed"), (HEADS[0], "garbage"), (HEADS[1], "stopped")],
    ids=str,
    indirect=["kind"],
    scope="module",
)
def test_a_fault_changes_no_bit_of_a_deterministic_target(
    kind: tuple[str, str], folders: tuple[Path, Path], tmp_path: Path, fault: str
) -> None:
    """With `--deterministic`, no near-tie excuses another token."""
    decoder = load(folders[0], DEVICE, torch.float32)
    draft = DraftProcess(tmp_path, kind[1], *folders, spoils=fault == "garbage")
    drafter = follow(draft, decoder, fault_s=FAULT_S)
    try:
        harness = harness_of(decoder, drafter, plan=AHEAD, max_running=7, prefill_chunk=16)
        with (
            mock.patch.object(harness.engine.controller, "choose", Choices(1).choose),
            Watch(patient=False) as watch,
            recorded(decoder) as rows,
        ):
            crowd(harness, Fault(draft, fault, watch.groups).strike)
    finally:
        draft.kill()
        drafter.shutdown()
        draft.stop()
    assert harness.engine.stats().speculation.accepted_tokens > 0
    for index, (tokens, logits) in enumerate(bits_alone(folders[0])):
        assert harness.sink.tokens[str(index)] == tokens
        assert_bits(logits, rows)


@cache
def bits_alone(target: Path) -> list[tuple[list[int], dict[int, torch.Tensor]]]:
    """Return the tokens and the logits of each request alone, without drafts, of a deterministic target."""
    decoder, found = load(target, DEVICE, torch.float32), []
    for prompt, count, sampling, _, _ in REQUESTS:
        alone = harness_of(decoder, NoDrafter())
        alone.submit(prompt, count, request_id="plain", sampling=sampling, mode=OFF)
        with recorded(decoder) as rows:
            alone.run()
        found.append((alone.sink.tokens["plain"], {position: one[0] for position, one in rows.items()}))
    return found


def check_output(decoder: Decoder, harness: Harness) -> None:
    assert not harness.sink.failed
    for index, (prompt, count, sampling, _, _) in enumerate(REQUESTS):
        plain = generate_plain(decoder, NoDrafter(), prompt, count, sampling=sampling)
        assert_same_tokens(decoder, prompt, plain, harness.sink.tokens[str(index)], sampling)


@pytest.mark.parametrize("kind", HEADS, ids=str, indirect=True, scope="module")
@pytest.mark.parametrize("fault", ["killed", "stopped", "pulsing", "garbage"])
def test_a_fault_in_mixed_rounds_costs_no_token_and_no_long_wait(
    kind: tuple[str, str], decoder: Decoder, folders: tuple[Path, Path], tmp_path: Path, fault: str
) -> None:
    draft = DraftProcess(tmp_path, kind[1], *folders, spoils=fault == "garbage")
    drafter = follow(draft, decoder, fault_s=FAULT_S)
    try:
        harness = make_harness(decoder, drafter, plan=AHEAD, max_running=7, prefill_chunk=16)
        started = time.monotonic()
        with (
            mock.patch.object(harness.engine.controller, "choose", Choices(1).choose),
            Watch(patient=False) as watch,
        ):
            crowd(harness, Fault(draft, fault, watch.groups).strike)
        # Rows in mode `on` may wait for a few fault deadlines. Their neighbours may not.
        assert time.monotonic() - started < BOUND_S
        assert watch.limits
        assert max(watch.limits) <= CAP_S
        check_output(decoder, harness)
    finally:
        draft.kill()  # a stopped process does not handle other signals
        drafter.shutdown()
        draft.stop()
