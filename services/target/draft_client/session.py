"""What the remote drafter remembers of one followed sequence."""

from __future__ import annotations

import logging

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.connection import Connection
from outrider.services.target.draft_client.fences import fence_to_proto
from outrider.shared.base.errors import ProtocolError
from outrider.shared.spec.drafter import ProposalRow
from outrider.shared.spec.fence import Fence
from outrider.shared.spec.trees import HostTree

_log = logging.getLogger("outrider.target.draft")


class DraftSession:
    """A followed sequence.

    Attributes:
        live: Open went out on the present connection and the draft has not lost it since.
        acked: The draft has taken it up, or rows cannot overtake Open; they are held until then.
        held: Rows that wait for that, by their first position.
        lost: The engine must reopen it.
        warm: The draft has answered for it since it was opened.
        in_vain: Its first answer was waited for, and did not come in time.
        base_len, token_ids, features: Commits not sent yet, joined.
        wanted: The fence and shape that an answer must match; None when none is awaited.
        tree: The answer.
        reason: Why the last proposal was empty.
        rejected_until: The draft is full and asked to be left alone until then.
    """

    __slots__ = (
        "acked",
        "base_len",
        "features",
        "fence",
        "held",
        "in_vain",
        "live",
        "lost",
        "reason",
        "rejected_until",
        "token_ids",
        "tree",
        "wanted",
        "warm",
    )

    def __init__(self, fence: Fence) -> None:
        self.fence = fence
        self.live = False
        self.acked = False
        self.held: list[tuple[int, torch.Tensor]] = []
        self.lost = False
        self.warm = False
        self.in_vain = False
        self.base_len = fence.committed_len
        self.token_ids: list[int] = []
        self.features: list[torch.Tensor] = []
        self.wanted: ProposalRow | None = None
        self.tree: HostTree | None = None
        self.reason = ""
        self.rejected_until = 0.0

    def lose(self, reason: str = "") -> None:
        """Forget everything that the draft was told; the engine reopens the sequence."""
        self.live, self.lost, self.warm, self.acked = False, True, False, False
        self.in_vain = False
        self.wanted, self.tree = None, None
        self.reason = reason or self.reason
        self.held.clear()
        self.token_ids.clear()
        self.features.clear()

    def answered(self) -> None:
        """The draft gave a tree for it, in time or not: it is worth waiting for."""
        self.warm, self.in_vain = True, False

    def can_enter(self, columns: int, feature_size: int) -> bool:
        """Whether rounds on the device may begin with what is pending: 1 to `columns` tokens, with their features if there are any."""
        rows = sum(part.shape[0] for part in self.features)
        ready = self.live and self.acked and 1 <= len(self.token_ids) <= columns
        return ready and (not feature_size or rows == len(self.token_ids))

    def take_commit(self, frame_features: list[torch.Tensor]) -> draft_pb2.Commit:
        """Return the pending commits as one message; appends their rows to the frame's."""
        commit = draft_pb2.Commit(
            fence=fence_to_proto(self.fence),
            base_len=self.base_len,
            token_ids=self.token_ids,
            feature_row=sum(rows.shape[0] for rows in frame_features),
            num_feature_rows=sum(rows.shape[0] for rows in self.features),
        )
        frame_features.extend(self.features)
        self.base_len = self.fence.committed_len
        self.token_ids = []
        self.features = []
        return commit

    def send_rows(self, connection: Connection, target_id: str, base: int, rows: torch.Tensor) -> None:
        """Send feature rows, or hold them back until the draft has taken the sequence up."""
        if not self.acked:
            self.held.append((base, rows))
            return
        place = draft_pb2.BulkRequest(
            session_id=self.fence.session_id, epoch=self.fence.epoch, base=base, target_id=target_id
        )
        connection.carrier.send_rows(place, rows)

    def opened(self, connection: Connection, target_id: str, have_len: int) -> None:
        """The draft has taken the sequence up: send the rows that were held back, without the first `have_len`, which it has kept."""
        self.acked = True
        held, self.held = self.held, []
        for base, rows in held:
            known = min(max(have_len - base, 0), rows.shape[0])
            if known < rows.shape[0]:
                self.send_rows(connection, target_id, base + known, rows[known:])

    def send_unasked(self, connection: Connection, round_number: int) -> None:
        """Send what is pending without asking for a tree."""
        features: list[torch.Tensor] = []
        commit = self.take_commit(features)
        commit.want = draft_pb2.WANT_NOTHING
        send_frame(connection, draft_pb2.TargetFrame(round=round_number, commits=[commit]), features)


def send_frame(connection: Connection, frame: draft_pb2.TargetFrame, features: list[torch.Tensor]) -> None:
    """Send a frame with the feature rows of its commits; a connection whose mailbox the draft has damaged ends instead."""
    if features:
        try:
            frame.features.CopyFrom(connection.carrier.tensors.write(features))
        except ProtocolError as error:
            _log.warning("the draft broke the protocol: %s", error.message)
            connection.close()
            return
    connection.send(draft_pb2.SessionRequest(frame=frame))
