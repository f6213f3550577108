"""Defines the draft's replies on a session stream, before their conversion to protobuf.

`frames_of` copies finished trees to the host. It groups them into one frame per target and round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from outrider.services.draft.engine import ProposedTrees
from outrider.services.draft.sessions.session import PeerId
from outrider.shared.rpc.envelopes import Envelope
from outrider.shared.spec.fence import Fence
from outrider.shared.spec.tree import DraftBatch


@dataclass(frozen=True, slots=True)
class Opened:
    """A session was opened; `have_len` of its feature rows are already stored."""

    session_id: int
    epoch: int
    have_len: int


@dataclass(frozen=True, slots=True)
class NeedResync:
    """The target must open the session again, at the next epoch."""

    session_id: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """The session was refused or dropped; the target may retry after a delay."""

    session_id: int
    reason: str
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class Pong:
    """The reply to a ping; `load` is the number of sessions divided by the maximum."""

    nonce: int
    load: float


@dataclass(frozen=True, slots=True)
class EntryReply:
    """The reply to RoundsEnter, which only targets of version 2 send. Their rounds run through the host."""

    series: int
    reason: str


@dataclass(frozen=True, slots=True)
class SlotsOpened:
    """The reply to SlotsOpen. An empty reason means that rounds on the device may begin."""

    reason: str


@dataclass(frozen=True, slots=True)
class SlotReady:
    """Reports that a session may join a slot."""

    session_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class ExchangeEnded:
    """Asks the target to leave its rounds on the device."""

    series: int
    reason: str


@dataclass(frozen=True, slots=True)
class TreesReply:
    """The trees of a round that ran on the device, as a blob. The blob is empty if the round has no trees."""

    series: int
    number: int
    trees: bytes
    envelope: Envelope | None = field(default=None, compare=False)
    """The encoded message around the trees, if it was prepared in advance."""


@dataclass(frozen=True, slots=True)
class StateTaken:
    """Reports that an announced state has reached the device. `then` is called when the reply is sent."""

    then: Callable[[], None] = field(compare=False)


@dataclass(frozen=True, slots=True)
class SentTree:
    """The tree of one session, without its root."""

    fence: Fence
    token_ids: list[int]
    parents: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class TreeFrame:
    """The trees of one round for one target."""

    round: int
    draft_ms: float
    trees: list[SentTree]


Reply = (
    Opened
    | NeedResync
    | Rejected
    | Pong
    | TreeFrame
    | EntryReply
    | ExchangeEnded
    | TreesReply
    | StateTaken
    | SlotsOpened
    | SlotReady
)


def frames_of(proposals: Sequence[ProposedTrees], draft_ms: float) -> dict[PeerId, list[TreeFrame]]:
    """Return the frames to send, one per peer and round. Blocks until the device has finished the trees."""
    frames: dict[tuple[PeerId, int], TreeFrame] = {}
    for proposal in proposals:
        counts, tokens, parents, logprobs = _on_host(proposal.trees)
        for b, origin in enumerate(proposal.origins):
            frame = frames.setdefault((origin.peer, origin.round), TreeFrame(origin.round, draft_ms, []))
            drafts = slice(1, counts[b])  # the root is not sent
            frame.trees.append(
                SentTree(origin.fence, tokens[b][drafts], parents[b][drafts], logprobs[b][drafts])
            )
    by_peer: dict[PeerId, list[TreeFrame]] = {}
    for (peer, _), frame in frames.items():
        by_peer.setdefault(peer, []).append(frame)
    return by_peer


def _on_host(trees: DraftBatch) -> tuple[list[int], list[list[int]], list[list[int]], list[list[float]]]:
    """Return num_nodes, tokens, parents and log-probs, copied from a GPU in one blocking copy."""
    parts = [trees.num_nodes[:, None], trees.tokens, trees.parents]
    if trees.logprobs is not None:
        parts.append(trees.logprobs.view(torch.int32))
    if trees.tokens.is_cuda:
        parts = list(torch.cat(parts, 1).cpu().split_with_sizes([part.shape[1] for part in parts], 1))
    num_nodes, tokens, parents, *logprobs = parts
    counts: list[int] = num_nodes[:, 0].tolist()
    return (
        counts,
        tokens.tolist(),
        parents.tolist(),
        logprobs[0].view(torch.float32).tolist() if logprobs else [[] for _ in counts],
    )
