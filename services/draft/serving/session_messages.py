"""Converts protobuf messages to and from the draft engine's types; checks Hello messages and feature tensors.

Only the gRPC servicer, the unix-socket server and `protocol` handle protobuf messages; the engine does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.peers.replies import (
    EntryReply,
    ExchangeEnded,
    NeedResync,
    Opened,
    Pong,
    Rejected,
    Reply,
    SlotReady,
    SlotsOpened,
    StateTaken,
    TreeFrame,
    TreesReply,
)
from outrider.services.draft.sessions.session import Ask
from outrider.services.draft.sessions.session_table import SessionLimits
from outrider.services.draft.strategies.base import StrategyInfo
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.fence_messages import fence_from_proto, fence_to_proto
from outrider.shared.rpc.ipc.doorbells import Side
from outrider.shared.rpc.tensors import TensorReader, wire_dtype
from outrider.shared.rpc.version import MAX_VERSION, VersionOffer
from outrider.shared.spec.drafter import Commit, FeatureSpec, SequenceOpen
from outrider.shared.spec.tree import DraftShape

WANTS_TREE = (draft_pb2.WANT_DRAFT, draft_pb2.WANT_BOTH)


MAX_SALT_CHARS = 128
"""Longest accepted salt. Targets send digests."""


@dataclass(frozen=True, slots=True)
class CommitMessage:
    """One commit of a frame, and the shape of the requested tree. The shape is None without a request."""

    commit: Commit
    ask: Ask | None


def target_info(hello: draft_pb2.Hello) -> TargetInfo:
    """Check a Hello message and return the target's properties.

    Raises:
        ProtocolError: The target id is missing.
    """
    if not hello.target_id:
        raise ProtocolError("Hello must contain a target_id.", field="target_id")
    sizes = (hello.vocab_size, hello.hidden_size, hello.num_layers)
    return TargetInfo(
        hello.target_id, hello.target_fingerprint, *sizes, hello.model_type, hello.tokenizer_fingerprint
    )


def hello_ack(
    info: StrategyInfo,
    spec: FeatureSpec | None,
    missing: Sequence[str],
    feature_dtype: int,
    limits: SessionLimits,
    uptime_s: float,
    version: int = MAX_VERSION,
) -> draft_pb2.HelloAck:
    """Return a HelloAck message, which describes the draft to a target.

    Before the target has sent its Hello, `spec` is None. The reply then contains neither the layers that the
    target captures nor the projector. Its `version` is the highest version that the draft supports.
    `uptime_s` is the number of seconds since the draft's process began to load.
    """
    ack = draft_pb2.HelloAck(
        head_fingerprint=info.fingerprint,
        algorithm=info.algorithm,
        model_id=info.model_id,
        feature_size=info.feature_size,
        feature_dtype=feature_dtype or wire_dtype(torch.float32),  # type: ignore[arg-type]
        max_sessions=limits.max_sessions,
        max_steps=limits.max_shape.depth,
        max_topk=limits.max_shape.topk,
        max_nodes=limits.max_shape.max_nodes,
        missing_tensors=missing,
        uptime_s=uptime_s,
    )
    VersionOffer.ours(Side.DRAFT).write(ack, version)
    if spec is not None:
        ack.aux_layer_ids.extend(spec.aux_layer_ids)
        ack.projector_tensors.extend(spec.projector)
        ack.projector_norm_eps = spec.norm_eps
        ack.projector_fingerprint = spec.fingerprint
    return ack


def opening_from(message: draft_pb2.Open, target_id: str) -> SequenceOpen:
    """Convert an Open message. Sequences of different targets share nothing, so their salts differ.

    Raises:
        ProtocolError: The salt is too long.
    """
    if len(message.cache_salt) > MAX_SALT_CHARS:
        raise ProtocolError(
            f"open.cache_salt must have at most {MAX_SALT_CHARS} characters.", field="open.cache_salt"
        )
    return SequenceOpen(
        fence_from_proto(message.fence),
        list(message.token_ids),
        message.seed,
        message.temperature,
        message.choice_index,
        message.traceparent,
        f"{target_id} {message.cache_salt}" if message.HasField("cache_salt") else None,
        message.stored_len,
    )


def commits_from(
    frame: draft_pb2.TargetFrame, feature_size: int, received_s: float, tensors: TensorReader
) -> Iterator[CommitMessage]:
    """Convert the commits of a frame to the draft engine's type.

    The feature rows of all commits are views of one tensor.

    Args:
        frame: The frame, as received from the target.
        feature_size: Width of a feature row.
        received_s: Arrival time of the frame, monotonic seconds.
        tensors: Reader of the tensors that this transport carries.

    Raises:
        ProtocolError: The feature tensor is malformed, or a commit refers to rows outside the tensor.
    """
    rows = None
    if frame.HasField("features"):
        rows = tensors.read(frame.features, "frame.features", feature_size)
    for message in frame.commits:
        features = None
        if message.num_feature_rows:
            stop = message.feature_row + message.num_feature_rows
            if rows is None or stop > rows.shape[0]:
                held = 0 if rows is None else rows.shape[0]
                raise ProtocolError(
                    f"The commit of session {message.fence.session_id} refers to feature rows up to {stop}, "
                    f"but the frame has {held}.",
                    field="commit.feature_row",
                )
            features = rows[message.feature_row : stop]
        commit = Commit(fence_from_proto(message.fence), message.base_len, list(message.token_ids), features)
        ask = None
        if message.want in WANTS_TREE:
            shape = DraftShape(message.shape.depth, message.shape.topk, message.shape.max_nodes)
            deadline_s = received_s + message.deadline_us / 1e6 if message.deadline_us else None
            ask = Ask(frame.round, shape, received_s, deadline_s)
        yield CommitMessage(commit, ask)


def reply_to(reply: Reply) -> draft_pb2.SessionReply:
    """Convert a reply to protobuf."""
    match reply:
        case Opened():
            ack = draft_pb2.OpenAck(session_id=reply.session_id, epoch=reply.epoch, have_len=reply.have_len)
            return draft_pb2.SessionReply(open=ack)
        case NeedResync():
            resync = draft_pb2.NeedResync(session_id=reply.session_id, epoch=reply.epoch, reason=reply.reason)
            return draft_pb2.SessionReply(need_resync=resync)
        case Rejected():
            reject = draft_pb2.Reject(
                session_id=reply.session_id, reason=reply.reason, retry_after_ms=reply.retry_after_ms
            )
            return draft_pb2.SessionReply(reject=reject)
        case Pong():
            return draft_pb2.SessionReply(pong=draft_pb2.Pong(nonce=reply.nonce, load=reply.load))
        case EntryReply():
            entered = draft_pb2.RoundsEntered(
                rounds=reply.series, accepted=not reply.reason, reason=reply.reason
            )
            return draft_pb2.SessionReply(rounds_entered=entered)
        case SlotsOpened():
            opened = draft_pb2.SlotsOpened(accepted=not reply.reason, reason=reply.reason)
            return draft_pb2.SessionReply(slots_opened=opened)
        case SlotReady():
            ready = draft_pb2.SlotReady(session_id=reply.session_id, epoch=reply.epoch)
            return draft_pb2.SessionReply(slot_ready=ready)
        case ExchangeEnded():
            return draft_pb2.SessionReply(
                rounds_ended=draft_pb2.RoundsEnded(rounds=reply.series, reason=reply.reason)
            )
        case TreesReply():
            return draft_pb2.SessionReply(
                round_trees=draft_pb2.RoundTrees(rounds=reply.series, number=reply.number, trees=reply.trees)
            )
        case StateTaken():
            return draft_pb2.SessionReply(round_taken=draft_pb2.RoundTaken())
        case TreeFrame():
            trees = [
                draft_pb2.Tree(
                    fence=fence_to_proto(tree.fence),
                    token_ids=tree.token_ids,
                    parents=tree.parents,
                    logprobs=tree.logprobs,
                )
                for tree in reply.trees
            ]
            return draft_pb2.SessionReply(
                frame=draft_pb2.DraftFrame(round=reply.round, draft_ms=reply.draft_ms, trees=trees)
            )
