"""Rounds on the draft's device for a remote target: batches that may enter, and the cost of failed rounds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import pytest
import torch
from support.toys import make_toy_eagle3, make_toy_target

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.build import build_engine
from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.peers.peer_batches import PeerBatches
from outrider.services.draft.sessions.session import Ask, PeerId
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.draft_client.fences import fence_to_proto
from outrider.shared.rpc.tensors import wire_dtype
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.resident import RoundState
from outrider.shared.spec.tree import DraftBatch, DraftShape

CPU = torch.device("cpu")
VOCAB, HIDDEN, COLUMNS = 64, 64, 6
SHAPE = DraftShape(3, 2, 8)
PEER, OTHER = PeerId(1), PeerId(2)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = make_toy_target(folder / "target")
    return target, make_toy_eagle3(folder / "head", target)


@pytest.fixture
def engine(pair: tuple[Path, Path]) -> DraftEngine:
    values = {
        "draft": pair[1],
        "target_weights": pair[0],
        "device": "cpu",
        "kv_tokens": 256,
        "page_size": 16,
        "max_steps": 8,
    }
    return build_engine(DraftSettings.load(values), CPU, torch.float32)


@pytest.fixture
def batches(engine: DraftEngine) -> PeerBatches:
    return PeerBatches(engine, CPU)


class FakeExchange:
    """Delivers the state that the test has set, or none."""

    def __init__(self) -> None:
        self.broken = False
        self.state: RoundState | None = RoundState.idle(1, COLUMNS, HIDDEN, torch.float32, CPU)
        self.given: list[torch.Tensor] = []
        self.tried: list[bool] = []
        self.room = 1 << 30

    def goes_ahead(self, message: draft_pb2.RoundsNext, tried: bool) -> bool:
        self.tried.append(tried)
        return True

    def take(
        self, message: draft_pb2.RoundsNext, blob: torch.Tensor, expected: torch.Tensor, limit_s: float
    ) -> None:
        expected.fill_(message.number)
        if self.state is not None and self.state.packed is not None:
            blob.copy_(self.state.packed)
            blob[:4].view(torch.int32).fill_(message.number)

    def give(self, message: draft_pb2.RoundsNext, blob: torch.Tensor) -> None:
        self.given.append(blob[256:].view(torch.int32).clone())

    def skip(self, rounds: int, number: int) -> None: ...

    def mend(self) -> bool:
        return not self.broken

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        return state.nbytes <= self.room


def features(begin: int, end: int) -> torch.Tensor:
    return torch.stack(
        [
            torch.randn(HIDDEN, generator=torch.Generator().manual_seed(position))
            for position in range(begin, end)
        ]
    )


def fence(tokens: Sequence[int], session: int = 7, epoch: int = 1) -> Fence:
    return Fence(session, epoch, len(tokens), extend_prefix_hash(FNV_OFFSET, tokens))


def follow(engine: DraftEngine, peer: PeerId = PEER, *, rows: bool = True) -> None:
    engine.open(peer, SequenceOpen(fence(PROMPT), PROMPT, seed=1, temperature=0.0))
    if rows:
        engine.add_features(peer, 7, 1, 0, features(0, len(PROMPT) - 1))


def entering(tokens: Sequence[int], **changes: object) -> draft_pb2.RoundsEnter:
    """Return RoundsEnter for a session that has received its prompt, but not the `tokens` chosen since."""
    message = draft_pb2.RoundsEnter(
        rounds=1,
        shape=draft_pb2.Shape(depth=SHAPE.depth, topk=SHAPE.topk, max_nodes=SHAPE.max_nodes),
        batch=1,
        columns=COLUMNS,
        feature_size=HIDDEN,
        feature_dtype=wire_dtype(torch.float32),
    )
    row = message.rows.add(
        fence=fence_to_proto(fence([*PROMPT, *tokens])), base_len=len(PROMPT), token_ids=tokens
    )
    for name, value in changes.items():
        setattr(row if name in ("base_len",) else message, name, value)
    return message


def put(exchange: FakeExchange, length: int, tokens: Sequence[int]) -> None:
    """Set the state after a target round that chose `tokens`, with `length` tokens committed."""
    state = exchange.state
    assert state is not None
    state.committed_lens[0], state.counts[0] = length, len(tokens)
    state.tokens[0, : len(tokens)] = torch.tensor(tokens)
    state.features[0, : len(tokens)] = features(length - 1 - len(tokens), length - 1)


def host_trees(engine: DraftEngine, tokens: Sequence[int], told: int) -> DraftBatch:
    commit = Commit(fence(tokens), told, tokens[told:], features(told - 1, len(tokens) - 1))
    engine.commit(PEER, commit, Ask(1, SHAPE, asked_s=0.0))
    (proposal,) = engine.step().proposals
    return proposal.trees


def follow_up(
    rounds: int, number: int, upper: int, chosen: Sequence[Sequence[int]] = ()
) -> draft_pb2.RoundsNext:
    told = [draft_pb2.RoundTokens(counts=[len(tokens)], token_ids=tokens) for tokens in chosen]
    return draft_pb2.RoundsNext(rounds=rounds, number=number, committed_upper=[upper], chosen=told)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (entering([8]), ""),
        (entering([8], base_len=5), "resync"),
        (entering([]), "resync"),
        (entering([8, VOCAB]), "resync"),
        (entering([8] * (COLUMNS + 1)), "resync"),
        (entering([8], columns=2), "size"),
        (entering([8], batch=0), "size"),
        (entering([8], batch=1 << 20), "size"),
        (entering([8], feature_size=HIDDEN - 1), "size"),
        (entering([8], feature_dtype=wire_dtype(torch.float16)), "size"),
    ],
)
def test_only_rows_that_go_on_where_their_sessions_are_may_enter(
    engine: DraftEngine, batches: PeerBatches, message: draft_pb2.RoundsEnter, reason: str
) -> None:
    follow(engine)
    assert batches.enter(PEER, message, FakeExchange()) == reason
    assert (batches.peer == PEER) == (not reason)


def test_rows_that_have_not_come_yet_are_waited_for_elsewhere(
    engine: DraftEngine, batches: PeerBatches
) -> None:
    follow(engine, rows=False)
    assert batches.enter(PEER, entering([8]), FakeExchange()) == "warming"


class Graphs:
    """A fake graph cache that records captures, and counts runs of rounds that were not captured.

    Args:
        replay: Whether captured rounds can be replayed.
    """

    enabled = True

    def __init__(self, replay: bool = True) -> None:
        self.keys: list[Hashable] = []
        self.strange = 0
        self._replay = replay

    def replays(self, key: Hashable) -> bool:
        return self._replay and key in self.keys

    def holds(self, key: Hashable) -> bool:
        return key in self.keys

    def capture(self, key: Hashable, record: Callable[[], object]) -> None:
        record()
        self.keys.append(key)

    def run(self, key: Hashable, record: Callable[[], object]) -> None:
        self.strange += key not in self.keys
        record()


def test_a_size_that_was_recorded_ahead_is_not_recorded_when_it_is_entered(
    engine: DraftEngine, batches: PeerBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, exchange, size = Graphs(), FakeExchange(), entering([8])
    monkeypatch.setattr(batches, "graphs", graphs)
    del size.rows[:]
    batches.record(size)
    assert len(graphs.keys) == 1
    follow(engine)
    assert batches.enter(PEER, entering([8]), exchange) == ""
    put(exchange, len(PROMPT) + 1, [8])
    assert batches.run(PEER, follow_up(1, 1, len(PROMPT) + 1), exchange)
    assert (len(graphs.keys), graphs.strange) == (1, 0)
    assert exchange.given[0][0] > 1
    batches.record(size)  # ignored while other rounds run
    size.columns = 2
    batches.record(size)  # ignored: this size cannot run here
    assert len(graphs.keys) == 1


@pytest.mark.parametrize("replay", [True, False])
def test_a_round_that_cannot_be_recorded_is_never_enqueued_before_its_state(
    engine: DraftEngine, batches: PeerBatches, monkeypatch: pytest.MonkeyPatch, replay: bool
) -> None:
    """Such a round may block on the device, and so on a state that this thread has yet to deliver."""
    exchange = FakeExchange()
    monkeypatch.setattr(batches, "graphs", Graphs(replay))
    follow(engine)
    assert batches.enter(PEER, entering([8]), exchange) == ""
    put(exchange, len(PROMPT) + 1, [8])
    assert batches.run(PEER, follow_up(1, 1, len(PROMPT) + 1), exchange)
    put(exchange, len(PROMPT) + 2, [5])
    assert batches.run(PEER, follow_up(1, 2, len(PROMPT) + 2, [[5]]), exchange)
    assert exchange.tried == [False, replay]


def test_one_target_at_a_time(engine: DraftEngine, batches: PeerBatches) -> None:
    follow(engine)
    follow(engine, OTHER)
    assert batches.enter(PEER, entering([8]), FakeExchange()) == "busy"


def test_blobs_that_do_not_travel(engine: DraftEngine, batches: PeerBatches) -> None:
    follow(engine)
    exchange = FakeExchange()
    exchange.room = 100
    assert batches.enter(PEER, entering([8]), exchange) == "mailbox"


def test_rounds_draft_what_the_hosts_way_drafts_and_leave_sessions_that_go_on(
    pair: tuple[Path, Path], engine: DraftEngine, batches: PeerBatches
) -> None:
    follow(engine)
    exchange = FakeExchange()
    assert batches.enter(PEER, entering([8, 9]), exchange) == ""
    text = [*PROMPT, 8, 9]
    put(exchange, len(text), [8, 9])
    assert batches.run(PEER, follow_up(1, 1, len(text)), exchange)
    text += [11]
    put(exchange, len(text), [11])
    assert batches.run(PEER, follow_up(1, 2, len(text), [[11]]), exchange)
    batches.leave(PEER, draft_pb2.RoundsLeave(rounds=1), exchange)
    after = host_trees(engine, [*text, 12, 13], len(text))
    # Draft the same trees through the host.
    engine.close(PEER, 7)
    follow(engine)
    for (length, told), given in zip(
        [(len(PROMPT) + 2, len(PROMPT)), (len(text), len(PROMPT) + 2)], exchange.given, strict=True
    ):
        trees = host_trees(engine, text[:length], told)
        nodes = int(trees.num_nodes[0])
        assert given[0] == nodes
        assert given[2 : 1 + nodes].tolist() == trees.tokens[0, 1:nodes].tolist()
        assert (
            given[2 + SHAPE.max_nodes : 1 + SHAPE.max_nodes + nodes].tolist()
            == trees.parents[0, 1:nodes].tolist()
        )
    expected = host_trees(engine, [*text, 12, 13], len(text))
    assert torch.equal(after.tokens, expected.tokens)
    assert torch.equal(after.parents, expected.parents)


def test_rounds_that_were_left_without_one_leave_no_trace(engine: DraftEngine, batches: PeerBatches) -> None:
    follow(engine)
    assert batches.enter(PEER, entering([8, 9]), FakeExchange()) == ""
    batches.leave(PEER, draft_pb2.RoundsLeave(rounds=1), FakeExchange())
    session = engine.sessions.get(PEER, 7)
    assert session is not None
    assert (session.fence, session.engaged) == (fence(PROMPT), False)
    engine.sessions.check()
    assert int(host_trees(engine, [*PROMPT, 8, 9], len(PROMPT)).num_nodes[0]) > 1


def test_a_session_that_is_closed_in_rounds_goes_idle(engine: DraftEngine, batches: PeerBatches) -> None:
    follow(engine)
    exchange = FakeExchange()
    assert batches.enter(PEER, entering([8]), exchange) == ""
    put(exchange, len(PROMPT) + 1, [8])
    assert batches.run(PEER, follow_up(1, 1, len(PROMPT) + 1), exchange)
    engine.close(PEER, 7)
    assert exchange.state is not None
    exchange.state.counts.zero_()
    assert batches.run(PEER, follow_up(1, 2, 0, [[]]), exchange)
    batches.leave(PEER, draft_pb2.RoundsLeave(rounds=1), exchange)
    engine.check()
    assert engine.strategy.pages().held == 0


def test_a_state_of_another_round_drafts_nothing(engine: DraftEngine, batches: PeerBatches) -> None:
    follow(engine)
    exchange = FakeExchange()
    assert batches.enter(PEER, entering([8]), exchange) == ""
    put(exchange, len(PROMPT) + 1, [8])
    assert batches.run(PEER, follow_up(1, 1, len(PROMPT) + 1), exchange)
    assert exchange.given[0][0] > 1
    exchange.state = None
    assert batches.run(PEER, follow_up(1, 2, len(PROMPT) + 5), exchange)
    assert exchange.given[1][0] == 1


@pytest.mark.parametrize("how", ["broken", "no room", "nothing told", "gone"])
def test_rounds_that_go_wrong_cost_their_sessions_and_nothing_else(
    engine: DraftEngine, batches: PeerBatches, how: str
) -> None:
    follow(engine)
    exchange = FakeExchange()
    assert batches.enter(PEER, entering([8]), exchange) == ""
    put(exchange, len(PROMPT) + 1, [8])
    for number in (1, 2):
        assert batches.run(PEER, follow_up(1, number, len(PROMPT) + 1), exchange)
    if how == "broken":
        exchange.broken = True
        assert not batches.run(PEER, follow_up(1, 3, len(PROMPT) + 2), exchange)
    elif how == "no room":
        assert not batches.run(PEER, follow_up(1, 3, 5000), exchange)
    elif how == "nothing told":  # the tokens of the first round were never reported
        batches.leave(PEER, draft_pb2.RoundsLeave(rounds=1), exchange)
    else:
        batches.abandon(PEER)
        engine.drop_peer(PEER)
    assert engine.sessions.get(PEER, 7) is None
    assert batches.peer is None
    assert not batches.run(PEER, follow_up(1, 4, len(PROMPT) + 2), exchange), "the rounds have ended"
    engine.check()
    exchange = FakeExchange()
    follow(engine)
    assert batches.enter(PEER, entering([8]), exchange) == ""


def test_a_batch_above_what_the_draft_records_names_the_option_once(
    engine: DraftEngine, batches: PeerBatches, caplog: pytest.LogCaptureFixture
) -> None:
    follow(engine)
    assert engine.strategy.rounds is not None
    engine.strategy.rounds.graphs.limit(disabled=False, max_bs=2)
    for _ in range(2):
        assert batches.enter(PEER, entering([8], batch=4), FakeExchange()) == "size"
        batches.record(entering([8], batch=4))
    (told,) = [
        record.getMessage() for record in caplog.records if "--cuda-graph-max-bs" in record.getMessage()
    ]
    assert "rounds of 4 sequences" in told
    assert "--cuda-graph-max-bs 2" in told
    assert batches.enter(PEER, entering([8], batch=2), FakeExchange()) == ""
