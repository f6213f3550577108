"""The draft engine and the in-process drafter with toy heads: memory, failures and deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.drafts.session_table import fence_of
from support.models.toys import make_toy_eagle3, make_toy_pair

from outrider.services.draft.build import build_engine
from outrider.services.draft.engine import Drafted, DraftEngine
from outrider.services.draft.inproc import HOST_PEER, InprocDrafter, drafter_beside
from outrider.services.draft.sessions.session import Ask, MessageVerdict, PeerId, RefusalReason
from outrider.services.draft.settings import DraftSettings, plan_pages, plan_threads
from outrider.services.draft.warmup import warm_up
from outrider.shared.base.errors import CheckpointError, ConfigurationError
from outrider.shared.nn.open import load_decoder
from outrider.shared.spec.drafter import Commit, Commits, ProposalRequest, ProposalRow, SequenceOpen
from outrider.shared.spec.tree import DraftShape

VOCAB, HIDDEN = 40, 32
CPU = torch.device("cpu")
PEER = PeerId(1)
SHAPE = DraftShape(4, 3, 9)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_toy_pair(tmp_path_factory.mktemp("pair"), 24, vocab_size=VOCAB, hidden_size=HIDDEN)


def settings(pair: tuple[Path, Path], **changes: object) -> DraftSettings:
    return DraftSettings.load(
        {
            "draft": pair[1],
            "target_weights": pair[0],
            "device": "cpu",
            "kv_tokens": 1024,
            "page_size": 4,
            **changes,
        }
    )


def make_engine(pair: tuple[Path, Path], **changes: object) -> DraftEngine:
    return build_engine(settings(pair, **changes), CPU, torch.float32)


def features(tokens: Sequence[int]) -> torch.Tensor:
    return torch.randn(len(tokens) - 1, HIDDEN, generator=torch.Generator().manual_seed(sum(tokens)))


def prompt_of(session_id: int, length: int = 6) -> list[int]:
    return [(session_id * 7 + index) % VOCAB for index in range(length)]


def follow(engine: DraftEngine, session_id: int, length: int = 6, ask: Ask | None = None) -> list[int]:
    tokens = prompt_of(session_id, length)
    rows = features(tokens)
    assert (
        engine.open(PEER, SequenceOpen(fence_of(tokens[:-1], session_id), tokens[:-1], 0, 0.0)).verdict
        is MessageVerdict.ACCEPTED
    )
    engine.add_features(PEER, session_id, 1, 0, rows)
    engine.commit(
        PEER, Commit(fence_of(tokens, session_id), length - 1, tokens[-1:], None), ask or Ask(1, SHAPE, 0.0)
    )
    return tokens


def sessions_of(drafted: Drafted) -> list[int]:
    return [origin.fence.session_id for proposal in drafted.proposals for origin in proposal.origins]


def test_prompts_are_extended_in_chunks_before_anybody_asks(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.services.draft.strategies.head.EXTEND_ROWS", 16)
    engine = make_engine(pair)
    tokens = prompt_of(1, 50)
    engine.open(PEER, SequenceOpen(fence_of(tokens, 1), tokens, 0, 0.0))
    engine.add_features(PEER, 1, 1, 0, features(tokens))
    session = engine.sessions.get(PEER, 1)
    assert session is not None
    steps = []
    while engine.has_work():
        assert engine.step() == Drafted((), ())
        steps.append(session.cached_rows)
    assert steps == [16, 32, 48, 49]


def test_a_tree_is_asked_for_once_and_answered_once(pair: tuple[Path, Path]) -> None:
    engine = make_engine(pair)
    follow(engine, 1)
    assert sessions_of(engine.step()) == [1]
    assert not engine.has_work()


def test_asks_that_nobody_waits_for_are_dropped_but_their_rows_are_kept(pair: tuple[Path, Path]) -> None:
    engine = make_engine(pair)
    tokens = follow(engine, 1, ask=Ask(1, SHAPE, 0.0, deadline_s=0.5))
    assert sessions_of(engine.step()) == []
    session = engine.sessions.get(PEER, 1)
    assert session is not None
    assert session.cached_rows == len(tokens) - 1
    assert 'reason="late"} 1.0' in engine.metrics.render()


def test_sessions_without_memory_are_refused_and_idle_ones_make_room(pair: tuple[Path, Path]) -> None:
    now = [0.0]
    engine = make_engine(pair, kv_tokens=60, max_steps=3, max_topk=4)
    engine._clock = lambda: now[0]
    shape = DraftShape(3, 4, 8)  # 8 scratch rows
    follow(engine, 1, 30, Ask(1, shape, 0.0))
    assert sessions_of(engine.step()) == [1]
    follow(engine, 2, 30, Ask(2, shape, 0.0))
    drafted = engine.step()
    assert [refusal.session_id for refusal in drafted.refusals] == [2]
    assert engine.sessions.get(PEER, 2) is None
    now[0] = 5.0
    follow(engine, 3, 30, Ask(3, shape, 0.0))
    assert sessions_of(engine.step()) == [3]
    assert engine.sessions.get(PEER, 1) is None
    engine.drop_peer(PEER)
    engine.check()


def test_a_failed_step_costs_the_sessions_in_hand_only(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(pair)
    follow(engine, 1)
    engine.step()
    follow(engine, 2)
    monkeypatch.setattr(engine.strategy._head, "forward", _fail)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="device"):
        engine.step()
    assert engine.give_up() == 1
    assert [session.session_id for session in engine.sessions] == [1]
    monkeypatch.undo()
    tokens = [*prompt_of(1), 5]
    assert (
        engine.commit(PEER, Commit(fence_of(tokens, 2), 6, [5], None), None).reason
        is RefusalReason.UNKNOWN_SESSION
    )
    engine.check()


def _fail(*_: object) -> torch.Tensor:
    raise RuntimeError("device fault")


def test_a_head_whose_states_overflow_is_refused_by_the_warm_up(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    broken = make_toy_eagle3(tmp_path / "head", pair[0], extra={"norm.weight": torch.full((HIDDEN,), 3e38)})
    with pytest.raises(CheckpointError, match="not finite"):
        warm_up(make_engine((pair[0], broken)), torch.device("cpu"))
    warm_up(make_engine(pair), torch.device("cpu"))


def test_features_that_are_not_numbers_spoil_their_own_tree_only(pair: tuple[Path, Path]) -> None:
    trees = []
    for poison in (False, True):
        engine = make_engine(pair)
        for session_id in (1, 2):
            tokens = prompt_of(session_id)
            engine.open(PEER, SequenceOpen(fence_of(tokens[:-1], session_id), tokens[:-1], 0, 0.0))
            rows = features(tokens)
            if poison and session_id == 1:
                rows[2] = float("nan")
            engine.add_features(PEER, session_id, 1, 0, rows)
            engine.commit(
                PEER, Commit(fence_of(tokens, session_id), 5, tokens[-1:], None), Ask(1, SHAPE, 0.0)
            )
        trees.append(engine.step().proposals[0].trees)
    healthy, poisoned = trees
    assert healthy.num_nodes.tolist() == [9, 9]
    assert poisoned.num_nodes.tolist() == [1, 9]
    assert torch.equal(poisoned.tokens[1], healthy.tokens[1])


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_any_page_size_drafts_the_same(pair: tuple[Path, Path], page_size: int) -> None:
    trees = []
    for size in (page_size, 4):
        engine = make_engine(pair, page_size=size)
        for session_id in (1, 2):
            follow(engine, session_id, 11)
        trees.append(engine.step().proposals[0].trees)
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    assert torch.equal(trees[0].parents, trees[1].parents)


def test_the_plan_refuses_a_pool_without_room_for_a_tree(pair: tuple[Path, Path]) -> None:
    assert plan_pages(settings(pair), 1024, None) == 256
    assert plan_pages(settings(pair, kv_tokens=None, page_size=16), 1 << 20, None) == 64
    with pytest.raises(ConfigurationError, match="at least 260"):
        plan_pages(settings(pair, kv_tokens=200), 1024, None)


def test_a_draft_on_a_gpu_holds_about_what_a_target_does(pair: tuple[Path, Path]) -> None:
    def tokens(bytes_per_token: int, free: int, **changes: object) -> int:
        return 16 * plan_pages(
            settings(pair, **{"kv_tokens": None, "page_size": 16, **changes}),
            bytes_per_token,
            (free << 30, 140 << 30),
        )

    assert tokens(4096, 100) == 64 * 16 * 1024, "every session has room, and the cache is no larger"
    assert tokens(4096, 100, max_sessions=512) == 2 * 64 * 16 * 1024
    assert tokens(112 * 1024, 120) == pytest.approx((12 << 30) / (112 * 1024), abs=16), (
        "the target may share the GPU"
    )
    assert tokens(112 * 1024, 120, mem_fraction_static=0.85) == pytest.approx(
        (99 << 30) / (112 * 1024), abs=16
    )
    assert tokens(112 * 1024, 120, mem_fraction_static=0.85, kv_tokens=5000) == 5008
    with pytest.raises(ConfigurationError, match="at least"):
        tokens(1024, 10, mem_fraction_static=0.5)
    with pytest.raises(ConfigurationError, match="has no effect") as caught:
        settings(pair, mem_fraction_static=0.5).check()
    assert caught.value.field == "mem_fraction_static"


def test_small_heads_get_one_thread_unless_told(pair: tuple[Path, Path]) -> None:
    assert plan_threads(settings(pair), 256) == 1
    assert plan_threads(settings(pair), 4096) is None
    assert plan_threads(settings(pair, threads=3), 256) == 3


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"listen": "0.0.0.0:7002"}, "listen"), ({"draft": None}, "draft"), ({"nonsense": 1}, "nonsense")],
)
def test_wrong_settings_name_the_field(
    pair: tuple[Path, Path], changes: dict[str, object], field: str
) -> None:
    values = {"draft": pair[1], **changes}
    with pytest.raises(ConfigurationError) as caught:
        DraftSettings.load(values).check()
    assert caught.value.field == field


class Host:
    """The target's side of an in-process drafter: real features, and chains of made-up tokens."""

    def __init__(self, pair: tuple[Path, Path]) -> None:
        self.drafter: InprocDrafter = drafter_beside(load_decoder(pair[0]), settings(pair))
        self.tokens: dict[int, list[int]] = {}

    def start(self, session_id: int, epoch: int = 1, length: int = 6) -> None:
        tokens = self.tokens.setdefault(session_id, prompt_of(session_id, length))
        self.drafter.open([SequenceOpen(fence_of(tokens, session_id, epoch), tokens, 0, 0.0)])
        self.drafter.features(session_id, 0, features(tokens))

    def commit(self, session_id: int, fresh: Sequence[int], epoch: int = 1) -> None:
        tokens = self.tokens[session_id]
        base_len = len(tokens)
        tokens.extend(fresh)
        rows = torch.ones(len(fresh), HIDDEN)
        self.drafter.commit(
            Commits(1, [Commit(fence_of(tokens, session_id, epoch), base_len, list(fresh), rows)])
        )

    def row(self, session_id: int, shape: DraftShape = SHAPE, epoch: int = 1) -> ProposalRow:
        tokens = self.tokens[session_id]
        return ProposalRow(fence_of(tokens, session_id, epoch), tokens[-1], shape)


@pytest.fixture
def host(pair: tuple[Path, Path]) -> Host:
    return Host(pair)


def test_the_inprocess_drafter_answers_in_the_order_of_the_rows_and_pads(host: Host) -> None:
    for session_id in (1, 2, 3):
        host.start(session_id)
        host.commit(session_id, [session_id])
    rows = [host.row(3), host.row(1, DraftShape(2, 2, 4)), host.row(2, DraftShape(0, 1, 1))]
    trees = host.drafter.propose(ProposalRequest(1, rows, None))
    assert trees.tokens[:, 0].tolist() == [3, 1, 2]
    assert trees.num_nodes.tolist() == [9, 4, 1]
    assert trees.tokens.shape == (3, 9)
    assert [host.drafter.fallback_reason(session_id) for session_id in (3, 1)] == ["", ""]
    alone = host.drafter.propose(ProposalRequest(2, [rows[1]], None))
    assert torch.equal(alone.tokens[0], trees.tokens[1, :4])
    assert torch.equal(alone.ancestors[0, :, 0], trees.ancestors[1, :4, 0])
    host.drafter.shutdown()


def test_rows_without_features_get_the_root_and_a_reason(host: Host) -> None:
    host.tokens[1] = prompt_of(1)
    host.drafter.open([SequenceOpen(fence_of(host.tokens[1], 1), host.tokens[1], 0, 0.0)])
    host.commit(1, [4])
    trees = host.drafter.propose(ProposalRequest(1, [host.row(1)], None))
    assert trees.num_nodes.tolist() == [1]
    assert host.drafter.fallback_reason(1) == "warming"
    host.drafter.features(1, 0, features(host.tokens[1][:-1]))
    assert host.drafter.propose(ProposalRequest(2, [host.row(1)], None)).num_nodes.tolist() == [9]


def test_a_mismatch_asks_to_reopen_and_reopening_heals(host: Host) -> None:
    host.start(1)
    host.tokens[1][-1] += 1
    host.commit(1, [4])
    assert host.drafter.propose(ProposalRequest(1, [host.row(1)], None)).num_nodes.tolist() == [1]
    assert list(host.drafter.wants_reopen()) == [1]
    assert list(host.drafter.wants_reopen()) == []
    host.start(1, epoch=2)
    host.commit(1, [5], epoch=2)
    assert host.drafter.propose(ProposalRequest(2, [host.row(1, epoch=2)], None)).num_nodes.tolist() == [9]


def test_a_failure_inside_never_reaches_the_target(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.start(1)
    host.commit(1, [4])
    monkeypatch.setattr(host.drafter._engine.strategy._head, "forward", _fail)  # type: ignore[attr-defined]
    assert host.drafter.propose(ProposalRequest(1, [host.row(1)], None)).num_nodes.tolist() == [1]
    assert host.drafter.fallback_reason(1) == "draft_error"
    assert list(host.drafter.wants_reopen()) == [1]


def test_closing_frees_everything(host: Host) -> None:
    host.start(1)
    host.commit(1, [4])
    host.drafter.propose(ProposalRequest(1, [host.row(1)], None))
    engine = host.drafter._engine
    assert engine.strategy.pages().held > 0
    host.drafter.close([1, 99])
    assert engine.strategy.pages().held == 0
    assert engine.sessions.get(HOST_PEER, 1) is None
    host.drafter.shutdown()
