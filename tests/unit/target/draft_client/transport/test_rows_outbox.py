"""Sending the feature rows of prompts through a mailbox that has few slots."""

from __future__ import annotations

import pytest
import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.transport import rows_outbox as rows_module
from outrider.services.target.draft_client.transport.rows_outbox import RowsOutbox, split_feature_rows
from outrider.shared.rpc.ipc.frames import EndOfStream
from outrider.shared.rpc.ipc.mailbox import SharedTensorReader, SharedTensorWriter
from outrider.shared.rpc.ipc.slots import SharedMemory, SlotLayout

COLUMNS, ROWS_A_SLOT, SLOTS = 8, 3, 2
PLACE = draft_pb2.BulkRequest(session_id=7, epoch=1, base=10, target_id="t")


class Way:
    """A mailbox and the messages that name its slots."""

    def __init__(self) -> None:
        memory, _file = SharedMemory.create(SlotLayout(SLOTS, ROWS_A_SLOT * COLUMNS * 4))
        self.sent: list[draft_pb2.BulkRequest] = []
        self.outbox = RowsOutbox(SharedTensorWriter(memory), lambda request: self.sent.append(request.rows))
        self._reader = SharedTensorReader(memory, torch.device("cpu"))

    def read(self) -> tuple[int, torch.Tensor]:
        message = self.sent.pop(0)
        return message.base, self._reader.read(message.features, "rows", COLUMNS)


def test_what_finds_no_slot_is_sent_in_order_when_one_is_free() -> None:
    way = Way()
    first, second = torch.randn(7, COLUMNS), torch.randn(4, COLUMNS)
    way.outbox.put(PLACE, first)
    way.outbox.put(draft_pb2.BulkRequest(session_id=8, epoch=1), second)
    received = []
    while way.outbox.waiting:
        assert len(way.sent) == SLOTS
        way.outbox.pump()
        assert len(way.sent) == SLOTS, "rows must wait for a free slot"
        received.append(way.read())
        way.outbox.pump()
    received += [way.read() for _ in range(SLOTS)]
    assert [base for base, _ in received] == [10, 13, 16, 0, 3]
    assert torch.equal(torch.cat([rows for _, rows in received]), torch.cat([first, second]))


def test_a_draft_that_leaves_too_much_unread_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_WAITING_BYTES", 20 * COLUMNS * 4)
    way = Way()
    way.outbox.put(PLACE, torch.randn(20, COLUMNS))
    with pytest.raises(EndOfStream, match="does not read"):
        way.outbox.put(PLACE, torch.randn(7, COLUMNS))


def test_a_part_holds_a_row_at_least_and_names_its_place() -> None:
    rows = torch.arange(5 * COLUMNS).view(5, COLUMNS)
    for most, counts in ((1, [1] * 5), (2 * 8 * COLUMNS, [2, 2, 1]), (1 << 20, [5])):
        parts = list(split_feature_rows(PLACE, rows, most))
        assert [some.shape[0] for _, some in parts] == counts
        assert [message.base for message, _ in parts] == [
            10 + sum(counts[:index]) for index in range(len(counts))
        ]
        assert {(message.session_id, message.epoch, message.target_id) for message, _ in parts} == {
            (7, 1, "t")
        }
