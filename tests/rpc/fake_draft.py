"""A scripted draft service: drafts by a plan, falls silent, sends wrong replies, or loses sessions."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import torch
from support.connection.ipc_bridge import IpcBridge

from outrider.common.v1 import common_pb2
from outrider.draft.v1 import draft_pb2, draft_pb2_grpc
from outrider.shared.rpc.address import IpcAddress, grpc_address
from outrider.shared.rpc.ipc.doorbells import Side
from outrider.shared.rpc.server import SyncServer, sync_server
from outrider.shared.rpc.tensors import decode_tensor, split_tensor
from outrider.shared.rpc.version import MAX_VERSION, VersionOffer
from outrider.shared.spec.fence import FNV_OFFSET, extend_prefix_hash

Plan = Callable[[list[int], draft_pb2.Commit], draft_pb2.Tree | None]
FEATURE_SIZE = 8
Request = TypeVar("Request")


@dataclass
class Followed:
    """A session as the fake sees it.

    Rows of the bulk stream and of commits may arrive in either order, but none may arrive twice.
    """

    epoch: int
    tokens: list[int]
    by_position: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> list[torch.Tensor]:
        """The rows from position 0 up to the first gap."""
        rows: list[torch.Tensor] = []
        while len(rows) in self.by_position:
            rows.append(self.by_position[len(rows)])
        return rows

    def add(self, base: int, rows: torch.Tensor) -> bool:
        """Add rows. Return whether all of them are new."""
        new = not any(base + index in self.by_position for index in range(rows.shape[0]))
        self.by_position |= {base + index: row for index, row in enumerate(rows)}
        return new


@dataclass
class Served:
    """A listening fake draft."""

    server: SyncServer
    bridge: IpcBridge | None

    def stop(self, grace_s: float) -> None:
        if self.bridge is not None:
            self.bridge.stop()
        self.server.stop(grace_s)


class FakeDraft(draft_pb2_grpc.DraftServicer):
    """Follows sessions strictly: records gaps, wrong hashes and repeated rows in `problems`.

    Answers by `plan`.
    """

    def __init__(
        self, plan: Plan, *, hidden_size: int, aux_layer_ids: tuple[int, ...] = (1, 3, 4), seed: int = 0
    ) -> None:
        self.plan = plan
        self.silent = False
        self.ack: draft_pb2.HelloAck = draft_pb2.HelloAck(
            head_fingerprint=f"head-{seed}",
            algorithm="EAGLE3",
            model_id="fake",
            aux_layer_ids=aux_layer_ids,
            feature_size=FEATURE_SIZE,
            feature_dtype=common_pb2.DATA_TYPE_FLOAT32,
            projector_tensors=["fc.weight"],
            projector_fingerprint=f"fc-{seed}",
        )
        VersionOffer.ours(Side.DRAFT).write(self.ack, MAX_VERSION)
        self.projector = torch.randn(
            FEATURE_SIZE, len(aux_layer_ids) * hidden_size, generator=torch.Generator().manual_seed(seed)
        )
        self.sessions: dict[int, Followed] = {}
        self.problems: list[str] = []
        self.hellos: list[draft_pb2.Hello] = []
        self.tensor_requests = 0
        self.opens: list[tuple[int, int]] = []
        self.closed: list[int] = []
        self.asked = 0
        self.bulk_requests = 0
        self.pings = 0
        self.frame_arrived = threading.Event()
        self._lock = threading.Lock()
        self._outboxes: list[queue.SimpleQueue[draft_pb2.SessionReply | None]] = []

    def serve(self, address: str) -> Served:
        """Listen on any address. For `ipc:`, the streams have a socket of their own."""
        ipc = IpcAddress.parse(address, "address")
        bridge = IpcBridge(ipc.streams, self) if ipc else None
        server = sync_server(
            grpc_address(address, "address"),
            [(draft_pb2_grpc.add_DraftServicer_to_server, self)],
            ["outrider.draft.v1.Draft"],
        )
        server.start()
        server.set_serving(True)
        return Served(server, bridge)

    def push(self, reply: draft_pb2.SessionReply) -> None:
        for outbox in self._outboxes:
            outbox.put(reply)

    def Session(
        self, request_iterator: Iterator[draft_pb2.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[draft_pb2.SessionReply]:
        outbox: queue.SimpleQueue[draft_pb2.SessionReply | None] = queue.SimpleQueue()
        first = next(request_iterator)
        assert first.HasField("hello")
        self.hellos.append(first.hello)
        self._outboxes.append(outbox)
        yield draft_pb2.SessionReply(hello=self.ack)

        def read() -> None:
            for request in _until_gone(request_iterator):
                with self._lock:
                    self._take(request, outbox)
            outbox.put(None)

        threading.Thread(target=read, daemon=True).start()
        context.add_callback(lambda: outbox.put(None))
        yield from iter(outbox.get, None)

    def Bulk(
        self, request_iterator: Iterator[draft_pb2.BulkRequest], context: grpc.ServicerContext
    ) -> Iterator[draft_pb2.BulkReply]:
        for request in _until_gone(request_iterator):
            with self._lock:
                self.bulk_requests += 1
                have_len = self._take_rows(request)
            yield draft_pb2.BulkReply(session_id=request.session_id, epoch=request.epoch, have_len=have_len)

    def GetTensor(
        self, request: draft_pb2.GetTensorRequest, context: grpc.ServicerContext
    ) -> Iterator[draft_pb2.GetTensorReply]:
        self.tensor_requests += 1
        for chunk in split_tensor(request.name, self.projector):
            yield draft_pb2.GetTensorReply(chunk=chunk)

    def _take(
        self, request: draft_pb2.SessionRequest, outbox: queue.SimpleQueue[draft_pb2.SessionReply | None]
    ) -> None:
        if request.HasField("open"):
            fence = request.open.fence
            self.sessions[fence.session_id] = Followed(fence.epoch, list(request.open.token_ids))
            self.opens.append((fence.session_id, fence.epoch))
            outbox.put(
                draft_pb2.SessionReply(open=draft_pb2.OpenAck(session_id=fence.session_id, epoch=fence.epoch))
            )
        elif request.HasField("close"):
            self.sessions.pop(request.close.session_id, None)
            self.closed.append(request.close.session_id)
        elif request.HasField("ping"):
            self.pings += 1
            if not self.silent:
                outbox.put(draft_pb2.SessionReply(pong=draft_pb2.Pong(nonce=request.ping.nonce)))
        elif request.HasField("frame"):
            self._take_frame(request.frame, outbox)
        elif request.HasField("rows"):
            self._take_rows(request.rows)

    def _take_rows(self, request: draft_pb2.BulkRequest) -> int:
        followed = self.sessions.get(request.session_id)
        if followed is None or followed.epoch != request.epoch:
            self.problems.append(
                f"rows for session {request.session_id} epoch {request.epoch}, which is not open"
            )
            return 0
        if not followed.add(request.base, decode_tensor(request.features, columns=FEATURE_SIZE)):
            self.problems.append(f"rows from {request.base} came twice")
        return len(followed.rows)

    def _take_frame(
        self, frame: draft_pb2.TargetFrame, outbox: queue.SimpleQueue[draft_pb2.SessionReply | None]
    ) -> None:
        rows = (
            decode_tensor(frame.features, columns=FEATURE_SIZE)
            if frame.HasField("features")
            else torch.empty(0, FEATURE_SIZE)
        )
        trees = []
        for commit in frame.commits:
            followed = self.sessions.get(commit.fence.session_id)
            if followed is None or followed.epoch != commit.fence.epoch:
                self.problems.append(f"a commit for session {commit.fence.session_id}, which is not open")
                continue
            if commit.base_len != len(followed.tokens):
                self.problems.append(f"a commit from {commit.base_len}, expected {len(followed.tokens)}")
            followed.tokens.extend(commit.token_ids)
            if not followed.add(
                commit.base_len - 1, rows[commit.feature_row : commit.feature_row + commit.num_feature_rows]
            ):
                self.problems.append(f"rows from {commit.base_len - 1} came twice")
            if extend_prefix_hash(FNV_OFFSET, followed.tokens) != commit.fence.prefix_hash:
                self.problems.append("the prefix hash does not match")
            if commit.want != draft_pb2.WANT_DRAFT:
                continue
            self.asked += 1
            tree = self.plan(followed.tokens, commit)
            if tree is not None:
                tree.fence.CopyFrom(commit.fence)
                trees.append(tree)
        if not self.silent:
            outbox.put(
                draft_pb2.SessionReply(
                    frame=draft_pb2.DraftFrame(round=frame.round, trees=trees, draft_ms=1.5)
                )
            )
        self.frame_arrived.set()


def chain(tokens: list[int]) -> draft_pb2.Tree:
    """Return a chain of tokens."""
    return draft_pb2.Tree(token_ids=tokens, parents=range(len(tokens)), logprobs=[-0.5] * len(tokens))


def _until_gone(requests: Iterator[Request]) -> Iterator[Request]:
    """Yield a stream's messages. Ends whether the peer vanishes or hangs up."""
    try:
        yield from requests
    except grpc.RpcError:
        return
