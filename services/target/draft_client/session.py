"""The target's record of a sequence that a remote draft follows: pending commits, rows, awaited tree."""

from __future__ import annotations

import hashlib
import logging

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.connection import Connection
from outrider.services.target.draft_client.trees import check_tree
from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.fence_messages import fence_from_proto, fence_to_proto
from outrider.shared.rpc.version import Feature
from outrider.shared.spec.drafter import AWAITED, WARMING, Commit, ProposalRow, SequenceOpen
from outrider.shared.spec.fence import Fence
from outrider.shared.spec.trees import HostTree

FIRST_EPOCH = 1

_log = logging.getLogger("outrider.target.draft")


class DraftSession:
    """The target's record of one session: a sequence whose state the draft service keeps.

    Attributes:
        fence: Identifies the latest committed state of the sequence.
        live: True if the Open message was sent over the current connection, and the draft has not lost the
            session since then.
        acked: True if feature rows may be sent. This requires that the draft has opened the session, or that
            feature rows cannot overtake the Open message.
        held: Tensors of feature rows that wait until `acked` is True, each with the position of its first
            row.
        ready: True if the draft has sent SlotReady for the session. The draft then has all feature rows with
            which the session was opened.
        joining: True if the session's sequence is in mode `on` and waits until `ready` is True.
        lost: True if the engine must open the session again.
        warm: True if the draft has answered a request since the session was last opened.
        have_len: Number of leading positions whose feature rows the draft does not need.
        misled: True if the session was lost after the draft had reported `have_len`. The reported number may
            then be wrong.
        doubts: True if this session replaces a session whose `misled` was True. The `have_len` that the draft
            reports is then ignored.
        opened_len: Number of committed tokens with which the session was opened.
        in_vain: True if a wait for the session's first answer has timed out.
        base_len: Number of committed tokens before the first pending commit. A commit is pending until it is
            sent.
        token_ids: Tokens of the pending commits.
        features: Feature rows of the pending commits.
        wanted: The request whose fence and shape an answer must match. None if no answer is awaited.
        asked_s: Time of the last request for a tree, from `time.monotonic()`.
        owes: True if the target stopped waiting for the last requested tree before the tree arrived.
        tree: The tree that answers `wanted`. None before the tree arrives.
        reason: The reason why the draft's last proposal contained no drafts for this session.
        rejected_until: Time until which the session is not opened again, after the draft has refused it.
    """

    __slots__ = (
        "acked",
        "asked_s",
        "base_len",
        "doubts",
        "features",
        "fence",
        "have_len",
        "held",
        "in_vain",
        "joining",
        "live",
        "lost",
        "misled",
        "opened_len",
        "owes",
        "ready",
        "reason",
        "rejected_until",
        "token_ids",
        "tree",
        "wanted",
        "warm",
    )

    def __init__(self, fence: Fence, former: DraftSession | None = None) -> None:
        self.fence = fence
        self.live = False
        self.acked = False
        self.have_len = 0
        self.misled: bool = False
        self.doubts = former is not None and former.misled
        self.held: list[tuple[int, torch.Tensor]] = []
        self.ready = False
        self.joining = False
        self.lost = False
        self.warm = False
        self.in_vain = False
        self.base_len = self.opened_len = fence.committed_len
        self.token_ids: list[int] = []
        self.features: list[torch.Tensor] = []
        self.wanted: ProposalRow | None = None
        self.asked_s = 0.0
        self.owes = False
        self.tree: HostTree | None = None
        self.reason = ""
        self.rejected_until = 0.0

    def lose(self, reason: str = "") -> None:
        """Discard all pending data. The engine reopens the session."""
        self.live, self.lost, self.warm, self.acked = False, True, False, False
        self.in_vain = self.owes = self.ready = self.joining = False
        self.misled, self.have_len = self.have_len > 0, 0
        self.wanted, self.tree = None, None
        self.reason = reason or ("resync" if self.reason == AWAITED else self.reason)
        self.held.clear()
        self.token_ids.clear()
        self.features.clear()

    def answered(self) -> None:
        """Record that the draft has sent a tree. Even a late tree shows that waiting is useful."""
        self.warm, self.in_vain, self.owes = True, False, False

    def give_up(self) -> None:
        """Stop to wait for the requested tree."""
        self.reason = "late" if self.warm else WARMING
        self.wanted = None
        self.in_vain, self.owes = not self.warm, True

    def take_tree(self, tree: draft_pb2.Tree, vocab_size: int) -> bool:
        """Keep a tree that answers the current request. Return False if the tree answers another request.

        Raises:
            ProtocolError: The tree is invalid.
        """
        self.answered()
        row = self.wanted
        if row is None or fence_from_proto(tree.fence) != row.fence:
            return False
        try:
            self.tree = check_tree(tree, row.root_token, row.shape, vocab_size)
        except ProtocolError:
            self.wanted = None
            self.reason = "bad_tree"
            raise
        self.reason = "" if len(self.tree.tokens) > 1 else "empty_tree"
        return True

    def reject(self, reason: str, until: float) -> None:
        """Treat the session as lost, because the draft has refused it. Do not offer it before `until`."""
        self.lose(reason or "rejected")
        self.rejected_until = until

    def add(self, commit: Commit) -> None:
        """Append a commit to the pending ones."""
        if not self.token_ids:
            # After rounds on the device, a commit repeats the tokens whose rows the draft lacks.
            self.base_len = commit.base_len
        self.fence = commit.fence
        self.token_ids.extend(commit.token_ids)
        if commit.features is not None:
            self.features.append(commit.features)

    def take_commit(self, frame_features: list[torch.Tensor]) -> draft_pb2.Commit:
        """Return the pending commits as one message, and append their feature rows to `frame_features`."""
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

    def take_request(
        self, row: ProposalRow, deadline_us: int, frame_features: list[torch.Tensor], now: float
    ) -> draft_pb2.Commit:
        """Return the message of `take_commit` with a request for a tree. The session then awaits the tree."""
        self.wanted, self.asked_s, self.owes = row, now, False
        self.joining = False
        commit = self.take_commit(frame_features)
        shape = draft_pb2.Shape(depth=row.shape.depth, topk=row.shape.topk, max_nodes=row.shape.max_nodes)
        commit.shape.CopyFrom(shape)
        commit.deadline_us = deadline_us
        commit.want = draft_pb2.WANT_DRAFT
        return commit

    def send_rows(self, connection: Connection, target_id: str, base: int, rows: torch.Tensor) -> None:
        """Send the feature rows that the draft lacks, or keep rows until the draft has opened the session."""
        if not self.acked:
            self.held.append((base, rows))
            return
        known = min(max(self.have_len - base, 0), rows.shape[0])
        base, rows = base + known, rows[known:]
        if not rows.shape[0]:
            return
        place = draft_pb2.BulkRequest(
            session_id=self.fence.session_id, epoch=self.fence.epoch, base=base, target_id=target_id
        )
        connection.carrier.send_rows(place, rows)

    def begin(self, connection: Connection, sequence: SequenceOpen) -> None:
        """Open the session at the draft."""
        connection.send(open_message(sequence))
        self.live = True
        # OpenAck says how many rows the draft has kept, of this sequence or of earlier ones.
        reuses = sequence.fence.epoch > FIRST_EPOCH or (
            sequence.stored_len > 0 and connection.has(Feature.STORED_ROWS)
        )
        self.acked = connection.carrier.rows_follow_open and not reuses

    def is_opened_by(self, ack: draft_pb2.OpenAck) -> bool:
        """Return True if the session waits for this answer to Open."""
        return self.live and not self.acked and self.fence.epoch == ack.epoch

    def opened(self, connection: Connection, target_id: str, have_len: int) -> None:
        """Record that the draft has opened the session, and send the feature rows in `held`.

        Args:
            connection: The current connection to the draft.
            target_id: Identifier of this target.
            have_len: Number of leading positions whose feature rows the draft already has. These rows are not
                sent.
        """
        self.acked = True
        # The last row is always sent, so that a draft that lacks earlier rows notices the gap.
        if have_len > max(0, self.opened_len - 2):
            _log.warning("the draft reported %d rows of %d tokens; ignored", have_len, self.opened_len)
        elif not self.doubts:
            self.have_len = have_len
        held, self.held = self.held, []
        for base, rows in held:
            self.send_rows(connection, target_id, base, rows)

    def send_unasked(self, connection: Connection, round_number: int) -> None:
        """Send the pending commits without a request for a tree."""
        features: list[torch.Tensor] = []
        commit = self.take_commit(features)
        commit.want = draft_pb2.WANT_NOTHING
        send_frame(connection, draft_pb2.TargetFrame(round=round_number, commits=[commit]), features)


def open_message(sequence: SequenceOpen) -> draft_pb2.SessionRequest:
    """Return the message that opens a sequence's session at the draft."""
    return draft_pb2.SessionRequest(
        open=draft_pb2.Open(
            fence=fence_to_proto(sequence.fence),
            token_ids=sequence.token_ids,
            seed=sequence.seed,
            temperature=sequence.temperature,
            choice_index=sequence.choice_index,
            cache_salt=None if sequence.cache_salt is None else _hidden(sequence.cache_salt),
            stored_len=sequence.stored_len,
            traceparent=sequence.traceparent,
        )
    )


def _hidden(salt: str) -> str:
    """Return a text of fixed length for a salt, from which the salt cannot be read."""
    return hashlib.sha256(salt.encode()).hexdigest() if salt else ""


def send_frame(connection: Connection, frame: draft_pb2.TargetFrame, features: list[torch.Tensor]) -> None:
    """Send a frame with the feature rows of its commits. Disconnect if the draft has damaged the mailbox."""
    if features:
        try:
            frame.features.CopyFrom(connection.carrier.tensors.write(features))
        except ProtocolError as error:
            _log.warning("the draft violated the protocol: %s", error.message)
            connection.close()
            return
    connection.send(draft_pb2.SessionRequest(frame=frame))
