"""Threads of the draft's engine: its own thread runs commands, and receiving threads run urgent ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
import torch
from support.models.toys import make_toy_eagle3, make_toy_target

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.build import build_engine
from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.peers.peer import Peer
from outrider.services.draft.peers.replies import Reply
from outrider.services.draft.serving import loop as draft_loop
from outrider.services.draft.serving.loop import DraftLoop
from outrider.services.draft.serving.protocol import DraftProtocol
from outrider.services.draft.sessions.session import Ask, PeerId, Session
from outrider.services.draft.settings import DraftSettings
from outrider.shared.rpc.tensors import InlineTensors, encode_tensor
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.tree import DraftShape

CPU = torch.device("cpu")
WAIT_S = 10.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> DraftEngine:
    folder = tmp_path_factory.mktemp("pair")
    target = make_toy_target(folder / "target", vocab_size=40, hidden_size=32)
    values = {
        "draft": make_toy_eagle3(folder / "head", target),
        "target_weights": target,
        "device": "cpu",
        "kv_tokens": 512,
    }
    return build_engine(DraftSettings.load(values), CPU, torch.float32)


@pytest.fixture
def loop(engine: DraftEngine) -> Iterator[DraftLoop]:
    made = DraftLoop(engine)
    made.start()
    yield made
    made.stop()


def runner(seen: SimpleQueue[int]) -> None:
    seen.put(threading.get_ident())


def test_what_is_urgent_runs_where_it_came(loop: DraftLoop) -> None:
    assert loop.call(lambda: True)
    seen: SimpleQueue[int] = SimpleQueue()
    here = False
    for _ in range(50):  # the engine thread may be checking for work at that very moment
        loop.run_here(lambda: runner(seen))
        here |= seen.get(timeout=WAIT_S) == threading.get_ident()
    assert here


def test_it_waits_its_turn_behind_a_step_and_behind_older_commands(loop: DraftLoop) -> None:
    started, go_on = threading.Event(), threading.Event()
    order: SimpleQueue[str] = SimpleQueue()

    def step() -> None:
        started.set()
        assert go_on.wait(WAIT_S)
        order.put("step")

    loop.submit(step)
    assert started.wait(WAIT_S)
    loop.submit(lambda: order.put("older"))
    loop.run_here(lambda: order.put("urgent"))
    assert order.empty()
    go_on.set()
    assert [order.get(timeout=WAIT_S) for _ in range(3)] == ["step", "older", "urgent"]


def test_two_threads_never_run_commands_at_once(loop: DraftLoop) -> None:
    inside = 0
    clashes = 0

    def command() -> None:
        nonlocal inside, clashes
        inside += 1
        clashes += inside > 1
        threading.Event().wait(1e-4)
        inside -= 1

    def bring() -> None:
        for number in range(100):
            (loop.run_here if number % 3 else loop.submit)(command)

    threads = [threading.Thread(target=bring) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert loop.call(lambda: inside) == 0
    assert clashes == 0


def test_a_command_that_fails_where_it_came_costs_what_a_failed_step_does(
    loop: DraftLoop, engine: DraftEngine
) -> None:
    before = engine.metrics.failures._value.get()

    def fail() -> None:
        raise RuntimeError("a fault of the device")

    loop.run_here(fail)
    assert loop.call(lambda: engine.metrics.failures._value.get()) == before + 1
    assert loop.call(lambda: "alive") == "alive"


def test_ticks_come_by_themselves(loop: DraftLoop) -> None:
    ticked = threading.Event()
    loop.tick(ticked.set)
    assert ticked.wait(WAIT_S)


def test_what_is_for_idle_times_waits_until_nobody_is_followed(loop: DraftLoop, engine: DraftEngine) -> None:
    tokens = [1, 2, 3]
    opening = SequenceOpen(
        Fence(7, 1, 3, extend_prefix_hash(FNV_OFFSET, tokens)), tokens, seed=0, temperature=0.0
    )
    done: SimpleQueue[int] = SimpleQueue()

    def begin() -> None:
        engine.open(PeerId(1), opening)
        for number in range(2):
            loop.later(lambda number=number: done.put(number))  # type: ignore[misc]

    loop.call(begin)
    loop.call(lambda: None)
    loop.call(lambda: None)
    assert done.empty()
    loop.call(lambda: engine.close(PeerId(1), 7))
    assert [done.get(timeout=WAIT_S), done.get(timeout=WAIT_S)] == [0, 1]


class Outlet:
    def send(self, reply: Reply) -> None: ...

    def end(self) -> None: ...


class Prompt:
    """A session whose feature rows arrive in two messages, on the test's thread."""

    TOKENS = tuple(range(1, 10))

    def __init__(self, loop: DraftLoop, session_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = loop.engine
        self.fence = Fence(session_id, 1, len(self.TOKENS), extend_prefix_hash(FNV_OFFSET, self.TOKENS))
        self.computed_on: list[int] = []
        self._protocol = DraftProtocol(loop, CPU, only_enqueues=True)
        self._peer: Peer = loop.call(lambda: loop.join(f"target {session_id}", Outlet()))
        opening = SequenceOpen(self.fence, self.TOKENS, seed=0, temperature=0.0)
        loop.call(lambda: self.engine.open(self._peer.id, opening))
        extend = self.engine.strategy.extend

        def noted(sessions: list[Session], max_rows: int, keep: int = 0) -> None:
            self.computed_on.append(threading.get_ident())
            extend(sessions, max_rows, keep)

        monkeypatch.setattr(self.engine.strategy, "extend", noted)

    @property
    def session(self) -> Session:
        found = self.engine.sessions.get(self._peer.id, self.fence.session_id)
        assert found is not None
        return found

    def bring(self, base: int, count: int) -> None:
        rows = torch.ones(count, self.engine.strategy.info.feature_size)
        request = draft_pb2.BulkRequest(
            session_id=self.fence.session_id, epoch=1, base=base, features=encode_tensor(rows)
        )
        self._protocol.take(self._peer, draft_pb2.SessionRequest(rows=request), InlineTensors())


def test_a_prompt_is_computed_by_the_thread_that_brings_its_last_rows(
    loop: DraftLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = 0
    for number in range(20):  # the engine thread may be checking for work at that very moment
        with monkeypatch.context() as patch:
            prompt = Prompt(loop, 100 + number, patch)
            prompt.bring(0, 5)
            known = list(prompt.computed_on)
            prompt.bring(5, 3)
            loop.call(lambda: None)
            assert prompt.session.cached_rows == prompt.session.num_rows == 8
            here += not known and prompt.computed_on == [threading.get_ident()]
            loop.call(lambda prompt=prompt: prompt.engine.close(prompt.session.peer, prompt.fence.session_id))  # type: ignore[misc]
    assert here


def test_rows_are_not_computed_here_where_a_tree_is_asked_for(
    loop: DraftLoop, engine: DraftEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = Prompt(loop, 200, monkeypatch)
    loop.call(lambda: None)
    with loop._turn:  # keeps the engine thread from answering first
        answer = engine.add_features(
            prompt.session.peer, 200, 1, 0, torch.ones(8, engine.strategy.info.feature_size)
        )
        assert answer.have_len == 8
        engine.commit(
            prompt.session.peer, Commit(prompt.fence, 9, (), None), Ask(0, DraftShape(2, 2, 4), asked_s=0.0)
        )
        loop.advance()
        assert not prompt.computed_on
        assert prompt.session.ask is not None
    loop.call(lambda: engine.close(prompt.session.peer, 200))


def test_rows_that_complete_what_a_tree_is_asked_for_wake_the_engine_thread(
    loop: DraftLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_loop, "EXPIRY_PERIOD_S", 1e6)  # the periodic check would wake it too
    for number in range(10):
        with monkeypatch.context() as patch:
            prompt = Prompt(loop, 300 + number, patch)
            ask = Ask(0, DraftShape(2, 2, 4), asked_s=0.0)
            commit = Commit(prompt.fence, len(Prompt.TOKENS), (), None)
            loop.call(
                lambda prompt=prompt, commit=commit, ask=ask: prompt.engine.commit(
                    prompt.session.peer, commit, ask
                )
            )  # type: ignore[misc]
            prompt.bring(0, 8)
            for _ in range(1000):
                if prompt.session.ask is None:
                    break
                threading.Event().wait(0.005)
            assert prompt.session.ask is None
            loop.call(lambda prompt=prompt: prompt.engine.close(prompt.session.peer, prompt.fence.session_id))  # type: ignore[misc]
