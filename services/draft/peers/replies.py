"""What the draft says on a session stream, before it becomes messages."""

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
    """A session was taken up; `have_len` feature rows of it are held already."""

    session_id: int
    epoch: int
    have_len: int


@dataclass(frozen=True, slots=True)
class NeedResync:
    """The target must open the session again at the next epoch."""

    session_id: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """There is no room for the session now."""

    session_id: int
    reason: str
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class Pong:
    """A sign of life; `load` = sessions / most sessions."""

    nonce: int
    load: float


@dataclass(frozen=True, slots=True)
class RoundsEntered:
    """Whether rounds on the device have begun; an empty reason says so."""

    rounds: int
    reason: str


@dataclass(frozen=True, slots=True)
class RoundsEnded:
    """The target shall leave its rounds on the device."""

    rounds: int
    reason: str


@dataclass(frozen=True, slots=True)
class RoundTrees:
    """The trees of a round on the device, as a blob; empty when there are none."""

    rounds: int
    number: int
    trees: bytes
    envelope: Envelope | None = field(default=None, compare=False)
    """What surrounds the trees on the wire, where that was encoded ahead."""


@dataclass(frozen=True, slots=True)
class RoundTaken:
    """The state of a round that was announced is with the device; `then` is called once this is on its way."""

    then: Callable[[], None] = field(compare=False)


@dataclass(frozen=True, slots=True)
class SentTree:
    """The tree of one session without its root."""

    fence: Fence
    token_ids: list[int]
    parents: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class TreeFrame:
    """All trees of one round for one target."""

    round: int
    draft_ms: float
    trees: list[SentTree]


Reply = (
    Opened | NeedResync | Rejected | Pong | TreeFrame | RoundsEntered | RoundsEnded | RoundTrees | RoundTaken
)


def frames_of(proposals: Sequence[ProposedTrees], draft_ms: float) -> dict[PeerId, list[TreeFrame]]:
    """Return the frames to send, one per peer and round; the only place that waits for the device to hand over the trees."""
    frames: dict[tuple[PeerId, int], TreeFrame] = {}
    for proposal in proposals:
        counts, tokens, parents, logprobs = _on_host(proposal.trees)
        for b, asked in enumerate(proposal.asked):
            frame = frames.setdefault((asked.peer, asked.round), TreeFrame(asked.round, draft_ms, []))
            drafts = slice(1, counts[b])  # the root is not sent
            frame.trees.append(
                SentTree(asked.fence, tokens[b][drafts], parents[b][drafts], logprobs[b][drafts])
            )
    by_peer: dict[PeerId, list[TreeFrame]] = {}
    for (peer, _), frame in frames.items():
        by_peer.setdefault(peer, []).append(frame)
    return by_peer


def _on_host(trees: DraftBatch) -> tuple[list[int], list[list[int]], list[list[int]], list[list[float]]]:
    """Return num_nodes, tokens, parents and log-probs; from a GPU in one copy, as each waits for the device."""
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
