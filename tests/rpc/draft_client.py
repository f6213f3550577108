"""A scripted target for tests of the draft service: sends messages, computes fences, keeps every reply."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import grpc
import torch

from outrider.draft.v1 import draft_pb2, draft_pb2_grpc
from outrider.shared.rpc.client import open_channel
from outrider.shared.rpc.ipc.doorbells import Side
from outrider.shared.rpc.tensors import encode_tensor
from outrider.shared.rpc.version import MIN_VERSION, VersionOffer
from outrider.shared.spec.fence import FNV_OFFSET, extend_prefix_hash

TIMEOUT_S = 20.0


class ScriptedTarget:
    """One target with a session stream and a bulk stream, each on its own channel."""

    def __init__(self, address: str, target_id: str = "t1") -> None:
        self.target_id = target_id
        self._channels = [open_channel(address), open_channel(address)]
        self.stub, self._bulk_stub = (draft_pb2_grpc.DraftStub(channel) for channel in self._channels)
        self._requests: queue.SimpleQueue[draft_pb2.SessionRequest | None] = queue.SimpleQueue()
        self._chunks: queue.SimpleQueue[draft_pb2.BulkRequest | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[draft_pb2.SessionReply | grpc.RpcError | None] = queue.SimpleQueue()
        self.call = self.stub.Session(iter(self._requests.get, None))
        self._bulk = self._bulk_stub.Bulk(iter(self._chunks.get, None))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ScriptedTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """End both streams cleanly and close the channels."""
        self._requests.put(None)
        self._chunks.put(None)
        self._reader.join(TIMEOUT_S)
        for channel in self._channels:
            channel.close()

    def vanish(self) -> None:
        """Disappear without notice."""
        self.call.cancel()
        self._bulk.cancel()
        self.leave()

    def hello(
        self, vocab_size: int, hidden_size: int, num_layers: int, fingerprint: str = "f"
    ) -> draft_pb2.HelloAck:
        """Send Hello and return the acknowledgement."""
        hello = draft_pb2.Hello(
            target_id=self.target_id,
            target_fingerprint=fingerprint,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
        )
        VersionOffer.ours(Side.TARGET).write(hello, MIN_VERSION)
        self.send(draft_pb2.SessionRequest(hello=hello))
        return self.expect("hello").hello

    def send(self, request: draft_pb2.SessionRequest) -> None:
        """Send one message on the session stream."""
        self._requests.put(request)

    def receive(self) -> draft_pb2.SessionReply:
        """Return the next reply. Raises the stream's error, or EOFError at its end."""
        reply = self._replies.get(timeout=TIMEOUT_S)
        if reply is None:
            raise EOFError("the session stream has ended")
        if isinstance(reply, grpc.RpcError):
            raise reply
        return reply

    def expect(self, kind: str) -> draft_pb2.SessionReply:
        """Return the next reply, which must be of the given kind."""
        reply = self.receive()
        assert reply.WhichOneof("message") == kind, reply
        return reply

    def bulk(self, session_id: int, epoch: int, base: int, rows: torch.Tensor) -> draft_pb2.BulkReply:
        """Send one chunk of feature rows and return its acknowledgement."""
        chunk = draft_pb2.BulkRequest(
            session_id=session_id,
            epoch=epoch,
            base=base,
            features=encode_tensor(rows),
            target_id=self.target_id,
        )
        self._chunks.put(chunk)
        reply: draft_pb2.BulkReply = next(self._bulk)
        return reply

    def _read(self) -> None:
        try:
            for reply in self.call:
                self._replies.put(reply)
        except grpc.RpcError as error:
            self._replies.put(error)
        else:
            self._replies.put(None)


def fence(session_id: int, epoch: int, tokens: Sequence[int]) -> draft_pb2.Fence:
    """Return the fence of a committed prefix."""
    return draft_pb2.Fence(
        session_id=session_id,
        epoch=epoch,
        committed_len=len(tokens),
        prefix_hash=extend_prefix_hash(FNV_OFFSET, tokens),
    )


def open_request(
    session_id: int, tokens: Sequence[int], epoch: int = 1, seed: int = 0, temperature: float = 0.0
) -> draft_pb2.SessionRequest:
    """Return an Open message."""
    opening = draft_pb2.Open(
        fence=fence(session_id, epoch, tokens), token_ids=tokens, seed=seed, temperature=temperature
    )
    return draft_pb2.SessionRequest(open=opening)


def commit_request(
    round_number: int,
    commits: Sequence[tuple[int, Sequence[int], int]],
    features: torch.Tensor | None,
    shape: tuple[int, int, int] = (4, 2, 8),
    epoch: int = 1,
    want: draft_pb2.Want = draft_pb2.WANT_DRAFT,
) -> draft_pb2.SessionRequest:
    """Return a frame of commits.

    Args:
        round_number: The number of the round.
        commits: Tuples of session id, all its tokens after the round, and base_len.
        features: The commits' rows, one commit after another.
        shape: depth, topk and max_nodes of the requested trees.
        epoch: Epoch of all the sessions.
        want: What the target requests in return.
    """
    frame = draft_pb2.TargetFrame(round=round_number)
    if features is not None:
        frame.features.CopyFrom(encode_tensor(features))
    row = 0
    for session_id, tokens, base_len in commits:
        count = len(tokens) - base_len
        frame.commits.add(
            fence=fence(session_id, epoch, tokens),
            base_len=base_len,
            token_ids=tokens[base_len:],
            feature_row=row,
            num_feature_rows=count if features is not None else 0,
            shape=draft_pb2.Shape(depth=shape[0], topk=shape[1], max_nodes=shape[2]),
            want=want,
        )
        row += count
    return draft_pb2.SessionRequest(frame=frame)


def batches(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ``(start, stop)`` ranges that split `total` into chunks of `size`."""
    for start in range(0, total, size):
        yield start, min(total, start + size)
