"""The draft service over real gRPC on a unix socket: handshake, drafting, faulty targets, no leaks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from draft_client import ScriptedTarget, batches, commit_request, open_request
from support.models.toys import make_toy_pair, read_target_tensor

from outrider.draft.v1 import draft_pb2
from outrider.services.draft import warmup
from outrider.services.draft.app import DraftService
from outrider.services.draft.serving import protocol
from outrider.services.draft.settings import DraftSettings
from outrider.shared.rpc.interceptors import error_from_rpc
from outrider.shared.rpc.tensors import join_tensors, split_tensor

VOCAB, HIDDEN, LAYERS = 64, 64, 8
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_toy_pair(tmp_path_factory.mktemp("pair"))


def start(pair: tuple[Path, Path], socket: Path, borrow: bool = True, **settings: object) -> DraftService:
    values = {
        "draft": pair[1],
        "target_weights": pair[0] if borrow else None,
        "listen": f"unix:{socket}",
        "device": "cpu",
        **settings,
    }
    service = DraftService(DraftSettings.load(values))
    service.start()
    return service


@pytest.fixture
def service(pair: tuple[Path, Path], tmp_path: Path) -> Iterator[DraftService]:
    running = start(pair, tmp_path / "draft.sock", lease_s=600.0)
    yield running
    running.stop()
    running.engine.check()
    assert running.engine.strategy.pages().held == 0


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def wait_for_idle(service: DraftService) -> draft_pb2.GetInfoReply:
    """Return the state once every session is gone. Sessions are freed only after their stream has ended."""
    deadline = time.monotonic() + 10
    with ScriptedTarget(service.address, "observer") as observer:
        while (
            info := observer.stub.GetInfo(draft_pb2.GetInfoRequest())
        ).sessions and time.monotonic() < deadline:
            pass
    return info


def opened(service: DraftService, target_id: str = "t1") -> ScriptedTarget:
    target = ScriptedTarget(service.address, target_id)
    target.hello(VOCAB, HIDDEN, LAYERS)
    target.send(open_request(7, PROMPT))
    assert target.expect("open").open.have_len == 0
    return target


def test_a_round_is_answered_with_a_valid_tree_under_the_same_fence(service: DraftService) -> None:
    with opened(service) as target:
        features = rows(len(PROMPT))
        for first, stop in batches(len(PROMPT) - 1, 4):
            assert target.bulk(7, 1, first, features[first:stop]).have_len == stop
        request = commit_request(5, [(7, [*PROMPT, 8], len(PROMPT))], features[-1:])
        target.send(request)
        frame = target.expect("frame").frame
        assert frame.round == 5
        (tree,) = frame.trees
        assert tree.fence == request.frame.commits[0].fence
        assert len(tree.token_ids) == 7
        assert all(parent <= index for index, parent in enumerate(tree.parents))
        assert all(token < VOCAB for token in tree.token_ids)


def test_a_commit_ahead_of_its_bulk_features_is_answered_once_they_are_complete(
    service: DraftService,
) -> None:
    with opened(service) as target:
        target.send(commit_request(1, [(7, [*PROMPT, 8], len(PROMPT))], rows(1)))
        target.send(draft_pb2.SessionRequest(ping=draft_pb2.Ping(nonce=3)))
        assert target.expect("pong").pong.nonce == 3
        target.bulk(7, 1, 0, rows(len(PROMPT) - 1))
        assert target.expect("frame").frame.round == 1


def test_a_gap_requests_a_resync_of_one_sequence_and_reopening_repairs_it(service: DraftService) -> None:
    with opened(service) as target:
        target.send(open_request(8, PROMPT))
        target.expect("open")
        for session in (7, 8):
            target.bulk(session, 1, 0, rows(len(PROMPT)))
        target.send(commit_request(1, [(7, [*PROMPT, 1, 2, 3], len(PROMPT) + 1)], None))
        resync = target.expect("need_resync").need_resync
        assert (resync.session_id, resync.epoch, resync.reason) == (7, 1, "gap")
        target.send(commit_request(2, [(8, [*PROMPT, 1], len(PROMPT))], rows(1)))
        assert target.expect("frame").frame.trees[0].fence.session_id == 8
        target.send(open_request(7, [*PROMPT, 1, 2], epoch=2))
        target.expect("open")
        target.bulk(7, 2, 0, rows(len(PROMPT) + 1))
        target.send(commit_request(3, [(7, [*PROMPT, 1, 2, 3], len(PROMPT) + 2)], rows(1), epoch=2))
        assert target.expect("frame").frame.trees[0].fence.epoch == 2


def test_several_sequences_are_answered_in_one_frame_or_in_further_frames_of_the_round(
    service: DraftService,
) -> None:
    with ScriptedTarget(service.address) as target:
        target.hello(VOCAB, HIDDEN, LAYERS)
        for session in range(5):
            target.send(open_request(session, PROMPT[: session + 2]))
            target.expect("open")
            if session:
                target.bulk(session, 1, 0, rows(session + 2))
        commits = [(session, [*PROMPT[: session + 2], 4], session + 2) for session in range(5)]
        target.send(commit_request(1, commits, rows(5)))
        answered = {tree.fence.session_id for tree in target.expect("frame").frame.trees}
        assert answered == {1, 2, 3, 4}
        target.bulk(0, 1, 0, rows(2))
        late = target.expect("frame").frame
        assert late.round == 1
        assert [tree.fence.session_id for tree in late.trees] == [0]


def test_pages_are_free_after_close_and_after_the_target_vanished(service: DraftService) -> None:
    target = opened(service)
    target.bulk(7, 1, 0, rows(len(PROMPT)))
    target.send(commit_request(1, [(7, [*PROMPT, 8], len(PROMPT))], rows(1)))
    target.expect("frame")
    assert target.stub.GetInfo(draft_pb2.GetInfoRequest()).pages_held > 0
    target.send(draft_pb2.SessionRequest(close=draft_pb2.Close(session_id=7)))
    target.send(open_request(9, PROMPT))
    target.expect("open")
    assert target.stub.GetInfo(draft_pb2.GetInfoRequest()).sessions == 1
    target.vanish()
    info = wait_for_idle(service)
    assert (info.sessions, info.pages_held, info.pages_free) == (0, 0, info.pages_total)


def test_a_new_stream_of_the_same_target_takes_over(service: DraftService) -> None:
    old = opened(service)
    with opened(service) as new:
        new.bulk(7, 1, 0, rows(len(PROMPT)))
        new.send(commit_request(1, [(7, [*PROMPT, 8], len(PROMPT))], rows(1)))
        new.expect("frame")
        with pytest.raises(EOFError):
            old.receive()
        assert new.stub.GetInfo(draft_pb2.GetInfoRequest()).sessions == 1
    old.leave()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"vocab_size": 65}, "vocab_size"),
        ({"hidden_size": 32}, "hidden size"),
        ({"num_layers": 3}, "layers"),
    ],
)
def test_an_incompatible_target_is_refused_with_the_fix(
    service: DraftService, changes: dict[str, int], complaint: str
) -> None:
    values = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": LAYERS, **changes}
    with ScriptedTarget(service.address) as target:
        with pytest.raises(grpc.RpcError) as caught:
            target.hello(**values)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert complaint in error_from_rpc(caught.value).message


def test_malformed_frames_end_that_stream_only(service: DraftService) -> None:
    with opened(service, "good") as good, opened(service, "bad") as bad:
        request = commit_request(1, [(7, [*PROMPT, 8], len(PROMPT))], rows(1))
        request.frame.commits[0].feature_row = 5
        bad.send(request)
        with pytest.raises(grpc.RpcError, match="feature rows"):
            bad.receive()
        good.bulk(7, 1, 0, rows(len(PROMPT)))
        good.send(commit_request(1, [(7, [*PROMPT, 8], len(PROMPT))], rows(1)))
        good.expect("frame")


def test_the_projector_is_served_bit_for_bit(service: DraftService, pair: tuple[Path, Path]) -> None:
    with ScriptedTarget(service.address) as target:
        ack = target.hello(VOCAB, HIDDEN, LAYERS)
        assert list(ack.aux_layer_ids) == [1, 3, 4]
        assert ack.feature_size == HIDDEN
        assert list(ack.projector_tensors) == ["fc.weight"]
        stream = target.stub.GetTensor(draft_pb2.GetTensorRequest(name="fc.weight"))
        ((name, tensor),) = join_tensors((reply.chunk for reply in stream), max_bytes=1 << 20)
        assert name == "fc.weight"
        assert torch.equal(tensor, read_target_tensor(pair[1], "fc.weight"))
        with pytest.raises(grpc.RpcError, match=r"fc\.weight"):
            next(target.stub.GetTensor(draft_pb2.GetTensorRequest(name="nothing")))


def test_a_draft_without_target_weights_borrows_them_over_the_wire(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = []
    monkeypatch.setattr(
        protocol,
        "warm_up",
        lambda engine, device, **how: warm.append(device) or warmup.warm_up(engine, device, **how),
    )
    running = start(pair, tmp_path / "draft.sock", borrow=False)
    try:
        with ScriptedTarget(running.address) as target:
            ack = target.hello(VOCAB, HIDDEN, LAYERS)
            (name,) = ack.missing_tensors
            target.send(open_request(7, PROMPT))
            reject = target.expect("reject").reject
            assert reject.reason == "missing_tensors"
            assert reject.retry_after_ms > 0
            embedding = read_target_tensor(pair[0], name)
            chunks = (
                draft_pb2.PutTensorRequest(chunk=chunk) for chunk in split_tensor(name, embedding, 1000)
            )
            assert list(target.stub.PutTensor(chunks).still_missing) == []
            assert warm == [torch.device("cpu")], (
                "kernels are compiled before the target continues, not at its first request"
            )
            target.send(open_request(7, PROMPT))
            target.expect("open")
            with (
                ScriptedTarget(running.address, "other") as other,
                pytest.raises(grpc.RpcError, match="another target"),
            ):
                other.hello(VOCAB, HIDDEN, LAYERS, fingerprint="else")
    finally:
        running.stop()


def test_a_silent_target_loses_its_sessions(pair: tuple[Path, Path], tmp_path: Path) -> None:
    running = start(pair, tmp_path / "draft.sock", lease_s=0.1)
    try:
        target = opened(running)
        assert wait_for_idle(running).sessions == 0
        target.send(commit_request(1, [(7, [*PROMPT, 8], len(PROMPT))], rows(1)))
        assert target.expect("need_resync").need_resync.reason == "unknown_session"
        target.leave()
    finally:
        running.stop()
