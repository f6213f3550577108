"""Sends prompts' feature rows to a draft: splits them into messages and queues them for mailbox slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from outrider.draft.v1 import draft_pb2
from outrider.shared.rpc.ipc.frames import EndOfStream
from outrider.shared.rpc.ipc.mailbox import SlotTensorWriter

ON_DEVICE_BYTES = 64 * 1024 * 1024
"""Total size in bytes up to which rows always wait on the device."""
SHARE_OF_FREE = 4
"""Free device memory that is required for rows to wait on the device, as a multiple of these rows' size.

With less free memory, the rows are copied to the host synchronously. Up to `ON_DEVICE_BYTES` of rows may
always wait on the device.
"""
MAX_WAITING_BYTES = 1 << 30
"""Limit in bytes for rows that the draft has not read. Above this limit, the draft counts as disconnected."""


def split_feature_rows(
    message: draft_pb2.BulkRequest, rows: torch.Tensor, most_bytes: int
) -> Iterator[tuple[draft_pb2.BulkRequest, torch.Tensor]]:
    """Split feature rows into messages of at most `most_bytes`. Each message has at least one row.

    Args:
        message: Names the session and the position of the first row.
        rows: The feature rows, ``[rows, feature_size]``.
        most_bytes: Limit in bytes for the rows of one message.

    Yields:
        Pairs of a message and the rows that belong to it. The message does not contain the rows yet.
    """
    per_part = max(1, most_bytes // max(1, rows.shape[1] * rows.element_size()))
    for start in range(0, rows.shape[0], per_part):
        part = draft_pb2.BulkRequest()
        part.CopyFrom(message)
        part.base = message.base + start
        yield part, rows[start : start + per_part]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Rows that have not been sent yet.

    The event `made` is recorded after the device work that computes the rows.
    """

    message: draft_pb2.BulkRequest
    rows: torch.Tensor
    made: torch.cuda.Event | None


class RowsOutbox:
    """Queue that sends feature rows in order and in parts, each as soon as a mailbox slot is free.

    Not thread-safe. Call `pump` regularly while `waiting` is True.

    Args:
        tensors: Writes feature rows into the mailbox.
        send: Function that sends a message on the session stream.
    """

    def __init__(self, tensors: SlotTensorWriter, send: Callable[[draft_pb2.SessionRequest], None]) -> None:
        self._tensors = tensors
        self._send = send
        self._parts: deque[_Waiting] = deque()
        self._waiting_bytes = 0

    @property
    def waiting(self) -> bool:
        """True if rows wait for a mailbox slot, or for the device work that computes the rows."""
        return bool(self._parts)

    def put(self, message: draft_pb2.BulkRequest, rows: torch.Tensor) -> None:
        """Send rows now or later. The caller must not change the rows.

        Raises:
            EndOfStream: The draft has stopped reading.
        """
        made = None
        self._waiting_bytes += rows.nbytes
        if rows.is_cuda and not _may_wait_there(rows.device, self._waiting_bytes):
            rows = rows.cpu()
        elif rows.is_cuda:
            made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            made.record(torch.cuda.current_stream(rows.device))
        if self._waiting_bytes > MAX_WAITING_BYTES:
            raise EndOfStream("the draft does not read its feature rows")
        self._parts.extend(
            _Waiting(part, some, made)
            for part, some in split_feature_rows(message, rows, self._tensors.slot_bytes)
        )
        self.pump()

    def pump(self) -> None:
        """Send the rows that are computed and for which a slot is free. Do not wait."""
        while self._parts:
            first = self._parts[0]
            if first.made is not None and not first.made.query():  # type: ignore[no-untyped-call]
                return
            data = self._tensors.offer(first.rows)
            if data is None:
                return
            self._parts.popleft()
            self._waiting_bytes -= first.rows.nbytes
            first.message.features.CopyFrom(data)
            self._send(draft_pb2.SessionRequest(rows=first.message))


def _may_wait_there(device: torch.device, num_bytes: int) -> bool:
    if num_bytes <= ON_DEVICE_BYTES:
        return True
    free, _total = torch.cuda.mem_get_info(device)
    return free >= SHARE_OF_FREE * num_bytes
