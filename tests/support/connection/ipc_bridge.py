"""Serves a gRPC draft servicer over ``ipc:///path``: scripted drafts and proxies serve either transport."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from outrider.draft.v1 import draft_pb2
from outrider.shared.rpc.ipc.frames import EndOfStream, FrameKind, FrameSocket
from outrider.shared.rpc.ipc.handshake import acknowledge
from outrider.shared.rpc.ipc.sockets import Listener
from outrider.shared.rpc.tensors import TensorReader, encode_tensor

TIMEOUT_S = 10.0


class Streams(Protocol):
    """A draft servicer's `Session` method that also accepts feature rows. Parameters are positional."""

    def Session(self, request_iterator: Iterator[Any], context: Any) -> Iterator[draft_pb2.SessionReply]: ...


class Context:
    """The part of `grpc.ServicerContext` that the streams use."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], object]] = []

    def add_callback(self, callback: Callable[[], object]) -> bool:
        self._callbacks.append(callback)
        return True

    def abort(self, code: object, details: str) -> None:
        raise EndOfStream(details)

    def end(self) -> None:
        for callback in self._callbacks:
            callback()


class IpcBridge:
    """Listens on `path` and passes messages to `streams`. Sends pongs on the bulk socket, as a draft does."""

    def __init__(self, path: str, streams: Streams) -> None:
        self._streams = streams
        self._listener = Listener(path)
        self._sockets: list[FrameSocket] = []
        self._bulk: FrameSocket | None = None
        self._requests: queue.SimpleQueue[draft_pb2.SessionRequest | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def stop(self) -> None:
        self._listener.close()
        for frames in list(self._sockets):
            frames.close()
        for thread in list(self._threads):
            thread.join(TIMEOUT_S)

    def _accept(self) -> None:
        while (connection := self._listener.accept()) is not None:
            frames = FrameSocket(connection)
            self._sockets.append(frames)
            self._threads.append(threading.Thread(target=self._serve, args=(frames,), daemon=True))
            self._threads[-1].start()

    def _serve(self, frames: FrameSocket) -> None:
        try:
            received = frames.receive(TIMEOUT_S)
            if received is None:
                return
            kind, payload = received
            if kind is FrameKind.HELLO:
                self._session(frames, draft_pb2.Hello.FromString(payload))
            else:
                self._bulk = frames
                self._pings(frames)
        except EndOfStream:
            pass
        finally:
            for one in list(self._sockets):
                one.close()

    def _session(self, frames: FrameSocket, hello: draft_pb2.Hello) -> None:
        requests = self._requests = queue.SimpleQueue()
        requests.put(draft_pb2.SessionRequest(hello=hello))
        context = Context()
        replies = self._streams.Session(iter(requests.get, None), context)
        frames.send(FrameKind.HELLO, next(replies).hello.SerializeToString())
        received = frames.receive(TIMEOUT_S)
        if received is None:
            return
        offer = draft_pb2.MailboxOffer.FromString(received[1])
        answer, mapped = acknowledge(offer, frames.take_files(2), torch.device("cpu"))
        frames.send(FrameKind.MAILBOX, answer.SerializeToString())
        assert mapped is not None
        reader = threading.Thread(
            target=self._read, args=(frames, mapped.session, mapped.bulk, requests, context), daemon=True
        )
        reader.start()
        for reply in replies:
            to = self._bulk if reply.HasField("pong") else frames
            if to is not None:
                to.send(FrameKind.SESSION, reply.SerializeToString())

    def _read(
        self,
        frames: FrameSocket,
        tensors: TensorReader,
        bulk: TensorReader,
        requests: queue.SimpleQueue[Any],
        context: Context,
    ) -> None:
        try:
            while True:
                received = frames.receive(TIMEOUT_S)
                if received is not None:
                    request = draft_pb2.SessionRequest.FromString(received[1])
                    if request.frame.HasField("features"):
                        _make_inline(request.frame.features, tensors)
                    if request.HasField("rows"):
                        _make_inline(request.rows.features, bulk)
                    requests.put(request)
        except EndOfStream:
            requests.put(None)
            context.end()

    def _pings(self, frames: FrameSocket) -> None:
        while True:
            received = frames.receive(TIMEOUT_S)
            if received is not None:
                self._requests.put(draft_pb2.SessionRequest.FromString(received[1]))


def _make_inline(data: Any, tensors: TensorReader) -> None:
    data.CopyFrom(encode_tensor(tensors.read(data, "rows", data.shape[1])))
