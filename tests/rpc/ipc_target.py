"""A target's connection to a draft through mailboxes, controlled step by step by a test."""

from __future__ import annotations

import threading

import torch
from draft_client import commit_request, open_request

from outrider.common.v1 import common_pb2
from outrider.draft.v1 import draft_pb2
from outrider.services.draft.app import DraftService
from outrider.services.target.draft_client.transport.carrier import ConnectionLost
from outrider.services.target.draft_client.transport.ipc_carrier import IpcCarrier
from outrider.shared.rpc.address import IpcAddress
from outrider.shared.rpc.ipc.doorbells import Side
from outrider.shared.rpc.version import MIN_VERSION, VersionOffer, agree_with_ack

VOCAB, HIDDEN, LAYERS = 64, 64, 8
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
TIMEOUT_S = 20.0


def address(service: DraftService) -> IpcAddress:
    parsed = IpcAddress.parse(service.address, "listen")
    assert parsed is not None
    return parsed


class IpcTarget:
    """A target's carrier, controlled step by step."""

    def __init__(
        self, service: DraftService, target_id: str = "t1", *, on_device: bool = False, **hello: object
    ) -> None:
        self.carrier = IpcCarrier(address(service), torch.device("cpu"), on_device=on_device)
        self.pongs: list[int] = []
        values = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": LAYERS, "target_fingerprint": "f"}
        self.hello = draft_pb2.Hello(target_id=target_id, **(values | hello))  # type: ignore[arg-type]
        VersionOffer.ours(Side.TARGET).write(self.hello, MIN_VERSION)
        self._follower = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> IpcTarget:
        ack = self.carrier.hello(self.hello)
        self.carrier.open_bulk(self.hello.target_id, agree_with_ack(ack).features)
        self._follower.start()
        return self

    def leave(self) -> None:
        self.carrier.close()
        if self._follower.is_alive():
            self._follower.join(TIMEOUT_S)
        self.carrier.release()

    def expect(self, kind: str) -> draft_pb2.SessionReply:
        reply = self.carrier.receive(TIMEOUT_S)
        assert reply is not None
        assert reply.WhichOneof("message") == kind, reply
        return reply

    def feed(self, session_id: int, count: int) -> None:
        rows = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(session_id))
        message = draft_pb2.BulkRequest(
            session_id=session_id, epoch=1, base=0, target_id=self.hello.target_id
        )
        self.carrier.send_rows(message, rows)

    def round(self, session_id: int, number: int, tokens: list[int], base_len: int) -> draft_pb2.DraftFrame:
        rows = torch.randn(len(tokens) - base_len, HIDDEN, generator=torch.Generator().manual_seed(number))
        request = commit_request(number, [(session_id, tokens, base_len)], None)
        request.frame.commits[0].num_feature_rows = rows.shape[0]
        request.frame.features.CopyFrom(self.carrier.tensors.write([rows]))
        assert request.frame.features.HasField("shared_memory")
        self.carrier.send(request)
        return self.expect("frame").frame

    def open_slots(self, **sizes: int) -> draft_pb2.SlotsOpened:
        """Open slots for rounds on the device."""
        opening = {"slots": 4, "feature_size": HIDDEN, "feature_dtype": common_pb2.DATA_TYPE_FLOAT32} | sizes
        self.carrier.send(draft_pb2.SessionRequest(slots_open=draft_pb2.SlotsOpen(**opening)))  # type: ignore[arg-type]
        return self.expect("slots_opened").slots_opened

    def open(self, session_id: int) -> None:
        self.carrier.send(open_request(session_id, PROMPT))
        assert self.expect("open").open.session_id == session_id

    def _follow(self) -> None:
        try:
            self.carrier.follow(lambda pong: self.pongs.append(pong.nonce))
        except ConnectionLost:
            self.carrier.close()
