"""A proxy between target and draft that replaces proposed trees by garbage on demand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
from support.connection.ipc_bridge import IpcBridge

from outrider.draft.v1 import draft_pb2
from outrider.shared.rpc.address import IpcAddress, grpc_address

SERVICE = "/outrider.draft.v1.Draft/"
Mangle = Callable[[draft_pb2.Tree, random.Random], list[draft_pb2.Tree]]


def random_tokens(tree: draft_pb2.Tree, rng: random.Random) -> list[draft_pb2.Tree]:
    """Replace the tokens of a well-formed tree."""
    tree.token_ids[:] = [rng.randrange(300) for _ in tree.token_ids]
    return [tree]


def tokens_outside_vocabulary(tree: draft_pb2.Tree, rng: random.Random) -> list[draft_pb2.Tree]:
    tree.token_ids[:] = [rng.randrange(1 << 20, 1 << 31) for _ in tree.token_ids]
    return [tree]


def parents_after_children(tree: draft_pb2.Tree, rng: random.Random) -> list[draft_pb2.Tree]:
    tree.parents[:] = [index + 1 + rng.randrange(5) for index, _ in enumerate(tree.parents)]
    return [tree]


def ragged(tree: draft_pb2.Tree, rng: random.Random) -> list[draft_pb2.Tree]:
    """Remove parents, so that there are fewer parents than tokens."""
    del tree.parents[rng.randrange(len(tree.parents)) if tree.parents else 0 :]
    return [tree]


def oversized(tree: draft_pb2.Tree, rng: random.Random) -> list[draft_pb2.Tree]:
    """Return far more nodes than requested."""
    tree.token_ids[:] = [rng.randrange(300) for _ in range(5000)]
    tree.parents[:] = range(5000)
    return [tree]


def stale_fence(tree: draft_pb2.Tree, rng: random.Random) -> list[draft_pb2.Tree]:
    tree.fence.committed_len = max(1, tree.fence.committed_len - rng.randrange(1, 4))
    return [tree]


def other_session(tree: draft_pb2.Tree, rng: random.Random) -> list[draft_pb2.Tree]:
    tree.fence.session_id ^= rng.randrange(1, 1 << 32)
    return [tree]


def duplicated(tree: draft_pb2.Tree, rng: random.Random) -> list[draft_pb2.Tree]:
    """Return the correct tree after two wrong trees with the same fence."""
    wrong = []
    for _ in range(2):
        copy = draft_pb2.Tree.FromString(tree.SerializeToString())
        wrong.extend(random_tokens(copy, rng))
    return [*wrong, tree]


def dropped(tree: draft_pb2.Tree, rng: random.Random) -> list[draft_pb2.Tree]:
    return []


GARBAGE: dict[str, Mangle] = {
    mangle.__name__: mangle
    for mangle in (
        random_tokens,
        tokens_outside_vocabulary,
        parents_after_children,
        ragged,
        oversized,
        stale_fence,
        other_session,
        duplicated,
        dropped,
    )
}


class ManglingProxy:
    """Listens on `listen` and forwards to the draft at `upstream`.

    While `mangle` is set, it rewrites every proposed tree. Other messages are forwarded unchanged. The two
    counters let a test check that the draft was good before, and that garbage was really sent.

    Attributes:
        mangle: Function that rewrites trees, or None.
        forwarded: Number of frames with trees that were forwarded unchanged.
        mangled: Number of rewritten trees.
    """

    def __init__(self, listen: str, upstream: str, seed: int = 0) -> None:
        self.mangle: Mangle | None = None
        self.mangled = 0
        self.forwarded = 0
        self._rng = random.Random(seed)
        self._channel = grpc.insecure_channel(upstream, options=[("grpc.max_receive_message_length", -1)])
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=16),
            options=[
                ("grpc.max_receive_message_length", -1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
            ],
        )
        self._server.add_generic_rpc_handlers((_Handlers(self),))
        self._server.add_insecure_port(grpc_address(listen, "listen"))
        ipc = IpcAddress.parse(listen, "listen")
        self._bridge = IpcBridge(ipc.streams, _Streams(self)) if ipc else None

    def __enter__(self) -> ManglingProxy:
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bridge is not None:
            self._bridge.stop()
        self._server.stop(None).wait()
        self._channel.close()

    def forward(
        self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Forward one call as streams of bytes in both directions. A unary message is a stream of one."""
        call = self._channel.stream_stream(method)(requests)
        context.add_callback(call.cancel)
        try:
            for reply in call:
                yield self.rewrite(reply) if method == SERVICE + "Session" else reply
        except grpc.RpcError as error:
            context.abort(error.code(), error.details() or "")  # type: ignore[attr-defined]

    def rewrite(self, reply: bytes) -> bytes:
        """Return a reply with its trees rewritten, if it has any and `mangle` is set."""
        message = draft_pb2.SessionReply.FromString(reply)
        if message.WhichOneof("message") != "frame" or not message.frame.trees:
            return reply
        mangle = self.mangle
        if mangle is None:
            self.forwarded += 1
            return reply
        trees = [mangled for tree in message.frame.trees for mangled in mangle(tree, self._rng)]
        self.mangled += len(message.frame.trees)
        del message.frame.trees[:]
        message.frame.trees.extend(trees)
        return message.SerializeToString()


class _Streams:
    """Adapts a proxy to the interface that `IpcBridge` calls."""

    def __init__(self, proxy: ManglingProxy) -> None:
        self._proxy = proxy

    def Session(
        self, requests: Iterator[draft_pb2.SessionRequest], context: Any
    ) -> Iterator[draft_pb2.SessionReply]:
        sent = (request.SerializeToString() for request in requests)
        return map(draft_pb2.SessionReply.FromString, self._proxy.forward(SERVICE + "Session", sent, context))


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, proxy: ManglingProxy) -> None:
        self._proxy = proxy

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, context: self._proxy.forward(method, requests, context)
        )
