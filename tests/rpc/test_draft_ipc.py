"""The draft service on unix sockets: rounds through mailboxes, and targets that die or misbehave."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from draft_client import ScriptedTarget, commit_request, fence, open_request
from ipc_target import HIDDEN, LAYERS, PROMPT, TIMEOUT_S, VOCAB, IpcTarget, address
from support.models.toys import make_toy_pair

from outrider.common.v1 import common_pb2
from outrider.draft.v1 import draft_pb2
from outrider.services.draft.app import DraftService
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.draft_client.transport.carrier import ConnectionLost
from outrider.shared.base.errors import OutriderError
from outrider.shared.rpc.ipc.frames import HEADER, EndOfStream, FrameKind, FrameSocket
from outrider.shared.rpc.ipc.sockets import connect
from outrider.shared.rpc.version import FEATURES


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_toy_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def service(pair: tuple[Path, Path], tmp_path: Path) -> Iterator[DraftService]:
    listen = f"ipc://{tmp_path}/draft.sock"
    values = {
        "draft": pair[1],
        "target_weights": pair[0],
        "listen": listen,
        "device": "cpu",
        "lease_s": 600.0,
    }
    running = DraftService(DraftSettings.load(values))
    running.start()
    assert running.address == listen
    yield running
    running.stop()
    running.engine.check()
    assert running.engine.strategy.pages().held == 0
    assert list(tmp_path.iterdir()) == [], "the socket files are removed"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline


def sessions(service: DraftService) -> int:
    return service.loop.call(lambda: len(service.engine.sessions))


def test_rounds_are_answered_through_mailboxes(service: DraftService) -> None:
    target = IpcTarget(service).start()
    target.open(7)
    target.feed(7, len(PROMPT) - 1)
    tokens = [*PROMPT, 8]
    for number in range(20):  # more rounds than there are slots
        frame = target.round(7, number, tokens, len(tokens) - 1)
        assert frame.round == number
        (tree,) = frame.trees
        assert tree.fence == fence(7, 1, tokens)
        assert len(tree.token_ids) == 7
        tokens.append(number)
    target.leave()
    wait_for(lambda: sessions(service) == 0)


def test_the_trees_equal_those_over_grpc(service: DraftService) -> None:
    rows = torch.randn(len(PROMPT), HIDDEN, generator=torch.Generator().manual_seed(7))
    tokens = [*PROMPT, 8]
    target = IpcTarget(service).start()
    target.open(7)
    message = draft_pb2.BulkRequest(session_id=7, epoch=1, base=0, target_id="t1")
    target.carrier.send_rows(message, rows[:-1])
    request = commit_request(1, [(7, tokens, len(PROMPT))], None)
    request.frame.commits[0].num_feature_rows = 1
    request.frame.features.CopyFrom(target.carrier.tensors.write([rows[-1:]]))
    target.carrier.send(request)
    (here,) = target.expect("frame").frame.trees
    target.leave()
    with ScriptedTarget(address(service).grpc, "other") as other:
        other.hello(VOCAB, HIDDEN, LAYERS)
        other.send(open_request(7, PROMPT))
        other.expect("open")
        other.bulk(7, 1, 0, rows[:-1])
        other.send(commit_request(1, [(7, tokens, len(PROMPT))], rows[-1:]))
        (there,) = other.expect("frame").frame.trees
    assert (here.fence, here.token_ids, here.parents) == (there.fence, there.token_ids, there.parents)


def test_a_session_may_join_a_slot_when_the_rows_of_its_prompt_are_there(service: DraftService) -> None:
    target = IpcTarget(service, on_device=True).start()
    assert target.open_slots().accepted
    target.open(7)
    assert target.carrier.receive(0.2) is None, "the draft lacks rows"
    target.feed(7, len(PROMPT) - 1)
    ready = target.expect("slot_ready").slot_ready
    assert (ready.session_id, ready.epoch) == (7, 1)
    target.leave()
    wait_for(lambda: sessions(service) == 0)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [({"slots": 0}, "slots"), ({"slots": 1 << 31}, "slots"), ({"feature_size": HIDDEN - 1}, "features")],
)
def test_slots_that_the_draft_cannot_serve_are_refused(
    service: DraftService, sizes: dict[str, int], reason: str
) -> None:
    target = IpcTarget(service, on_device=True).start()
    opened = target.open_slots(**sizes)
    assert (opened.accepted, opened.reason) == (False, reason)
    target.open(7)
    target.feed(7, len(PROMPT) - 1)
    assert len(target.round(7, 1, [*PROMPT, 8], len(PROMPT)).trees) == 1, "frames must still be answered"
    target.leave()
    wait_for(lambda: sessions(service) == 0)


def test_several_targets_share_a_draft(service: DraftService) -> None:
    targets = [IpcTarget(service, f"t{index}").start() for index in range(3)]
    for index, target in enumerate(targets):
        target.open(index)
        target.feed(index, len(PROMPT) - 1)
        assert len(target.round(index, 1, [*PROMPT, 8], len(PROMPT)).trees) == 1
    assert sessions(service) == 3
    targets[0].leave()
    wait_for(lambda: sessions(service) == 2)
    assert len(targets[1].round(1, 2, [*PROMPT, 8, 9], len(PROMPT) + 1).trees) == 1
    for target in targets[1:]:
        target.leave()
    wait_for(lambda: sessions(service) == 0)


def test_a_reconnecting_target_ends_its_old_streams(service: DraftService) -> None:
    old = IpcTarget(service).start()
    old.open(7)
    new = IpcTarget(service).start()
    wait_for(lambda: old.carrier.ended.is_set())
    wait_for(lambda: sessions(service) == 0)
    new.open(8)
    assert sessions(service) == 1
    old.leave()
    assert sessions(service) == 1
    new.leave()


def test_a_ping_is_answered_outside_the_session_socket(service: DraftService) -> None:
    target = IpcTarget(service).start()
    target.carrier.ping(draft_pb2.SessionRequest(ping=draft_pb2.Ping(nonce=5)))
    wait_for(lambda: target.pongs == [5])
    assert target.carrier.receive(0.0) is None
    target.leave()


def test_connections_that_hang_up_before_hello_leak_nothing(service: DraftService) -> None:
    def mailboxes() -> int:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum("outrider-mailbox" in os.readlink(link) for link in links if os.path.islink(link))

    gc.collect()  # frees carriers of other tests
    before = mailboxes()
    for _ in range(5):
        connect(address(service).streams, 1.0).close()
    target = IpcTarget(service).start()
    target.open(7)
    assert mailboxes() == before + 4
    target.leave()
    del target
    wait_for(lambda: sessions(service) == 0)
    wait_for(lambda: mailboxes() <= before)
    ipc = service._ipc
    assert ipc is not None
    wait_for(lambda: not ipc._sockets)


def test_a_draft_that_hangs_up_before_the_mailbox_offer_leaks_no_descriptors(
    service: DraftService,
) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    target = IpcTarget(service, on_device=True)
    target.carrier.hello(target.hello)
    target.carrier._session.close()
    before = descriptors()
    for _ in range(5):
        with pytest.raises(ConnectionLost):
            target.carrier.open_bulk(target.hello.target_id, FEATURES)
        assert target.carrier.exchange is None
    gc.collect()  # frees mappings, which own descriptors
    assert descriptors() <= before
    target.leave()


def test_a_late_bulk_stream_does_not_end_the_next_connection(service: DraftService) -> None:
    target = IpcTarget(service).start()
    late = FrameSocket(connect(address(service).streams, 1.0))
    hello = draft_pb2.BulkHello(target_id=target.hello.target_id, connection=1)
    late.send(FrameKind.BULK_HELLO, hello.SerializeToString())
    with pytest.raises(EndOfStream):
        late.receive(TIMEOUT_S)
    late.close()
    target.open(7)
    target.feed(7, len(PROMPT) - 1)
    target.carrier.ping(draft_pb2.SessionRequest(ping=draft_pb2.Ping(nonce=5)))
    wait_for(lambda: target.pongs == [5])
    target.leave()


def test_targets_that_come_and_go_leak_nothing(service: DraftService) -> None:
    """Must not depend on the garbage collector, which may not run for a long time."""

    def visit() -> None:
        target = IpcTarget(service, on_device=True).start()
        assert target.open_slots().accepted
        target.open(7)
        target.feed(7, len(PROMPT) - 1)
        target.expect("slot_ready")
        target.leave()
        wait_for(lambda: sessions(service) == 0)

    def mapped() -> int:
        return sum("outrider-mailbox" in line for line in Path("/proc/self/maps").read_text().splitlines())

    gc.collect()
    before, threads = mapped(), threading.active_count()
    gc.disable()
    try:
        for _ in range(20):
            visit()
        wait_for(lambda: mapped() == before)
        wait_for(lambda: threading.active_count() <= threads)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("hello", "named"),
    [
        ({"vocab_size": 63}, "vocab"),
        ({"hidden_size": 65}, "hidden"),
    ],
)
def test_an_incompatible_target_receives_the_reason(
    service: DraftService, hello: dict[str, object], named: str
) -> None:
    target = IpcTarget(service, **hello)
    with pytest.raises(OutriderError) as error:
        target.start()
    assert named in f"{error.value.field} {error.value.message}"
    target.leave()


def shaken(service: DraftService) -> FrameSocket:
    """Return a session stream after Hello, without mailboxes."""
    frames = FrameSocket(connect(address(service).streams, 1.0))
    frames.send(FrameKind.HELLO, IpcTarget(service).hello.SerializeToString())
    assert frames.receive(TIMEOUT_S) is not None
    return frames


def last_error(frames: FrameSocket) -> common_pb2.ErrorDetail:
    """Return the draft's last message, after which it must have hung up."""
    received = frames.receive(TIMEOUT_S)
    assert received is not None
    assert received[0] is FrameKind.ERROR
    with pytest.raises(EndOfStream):
        frames.receive(TIMEOUT_S)
    frames.close()
    return common_pb2.ErrorDetail.FromString(received[1])


def test_bytes_that_are_not_frames_close_the_connection(service: DraftService) -> None:
    frames = FrameSocket(connect(address(service).streams, 1.0))
    frames._socket.send(b"GET / HTTP/1.1\r\n\r\n")
    assert "frame" in last_error(frames).message.lower()


def test_a_hello_that_does_not_parse_closes_the_connection(service: DraftService) -> None:
    frames = FrameSocket(connect(address(service).streams, 1.0))
    frames.send(FrameKind.HELLO, b"\xff\xff\xff")
    assert "parse" in last_error(frames).message


@pytest.mark.parametrize("kind", [FrameKind.SESSION, FrameKind.MAILBOX, FrameKind.ERROR])
def test_a_stream_that_does_not_begin_with_hello_is_closed(service: DraftService, kind: FrameKind) -> None:
    frames = FrameSocket(connect(address(service).streams, 1.0))
    frames.send(kind, b"")
    assert "HELLO" in last_error(frames).message


def test_a_bulk_stream_of_an_unknown_target_is_closed(service: DraftService) -> None:
    frames = FrameSocket(connect(address(service).streams, 1.0))
    frames.send(FrameKind.BULK_HELLO, draft_pb2.BulkHello(target_id="nobody").SerializeToString())
    with pytest.raises(EndOfStream):
        frames.receive(TIMEOUT_S)
    frames.close()


@pytest.mark.parametrize(
    "offer",
    [
        draft_pb2.MailboxOffer(),
        draft_pb2.MailboxOffer(session=draft_pb2.Mailbox(slots=1 << 30, slot_bytes=64)),
    ],
)
def test_a_mailbox_outside_the_limits_is_refused(
    service: DraftService, offer: draft_pb2.MailboxOffer
) -> None:
    frames = shaken(service)
    files = [os.memfd_create("x") for _ in range(2)]
    frames.send(FrameKind.MAILBOX, offer.SerializeToString(), files)
    assert "outside the limits" in last_error(frames).message
    for file in files:
        os.close(file)


def test_a_mailbox_without_its_descriptors_is_refused(service: DraftService) -> None:
    frames = shaken(service)
    frames.send(FrameKind.MAILBOX, draft_pb2.MailboxOffer().SerializeToString())
    assert "descriptors" in last_error(frames).message


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff\xff",
        draft_pb2.SessionRequest().SerializeToString(),
        draft_pb2.SessionRequest(hello=draft_pb2.Hello()).SerializeToString(),
        commit_request(1, [(7, [*PROMPT, 8], len(PROMPT))], torch.zeros(1, HIDDEN + 1)).SerializeToString(),
    ],
    ids=["bytes", "empty", "hello", "width"],
)
def test_an_invalid_session_message_ends_the_stream_and_frees_its_sessions(
    service: DraftService, payload: bytes
) -> None:
    target = IpcTarget(service).start()
    target.open(7)
    target.carrier._session.send(FrameKind.SESSION, payload)
    wait_for(lambda: target.carrier.ended.is_set())
    wait_for(lambda: sessions(service) == 0)
    target.leave()
    IpcTarget(service, "next").start().leave()


def test_naming_an_unwritten_slot_ends_the_stream(service: DraftService) -> None:
    target = IpcTarget(service).start()
    target.open(7)
    request = commit_request(1, [(7, [*PROMPT, 8], len(PROMPT))], None)
    where = common_pb2.SharedSlot(slot=0, generation=1, num_bytes=HIDDEN * 4)
    request.frame.features.CopyFrom(
        common_pb2.TensorData(shape=(1, HIDDEN), dtype=common_pb2.DATA_TYPE_FLOAT32, shared_memory=where)
    )
    target.carrier.send(request)
    wait_for(lambda: target.carrier.ended.is_set())
    target.leave()


def test_a_truncated_frame_ends_with_its_target(service: DraftService) -> None:
    target = IpcTarget(service).start()
    target.open(7)
    target.carrier._session._socket.send(HEADER.pack(1000, FrameKind.SESSION) + b"half")
    target.leave()
    wait_for(lambda: sessions(service) == 0)
