"""A target in another process, as a draft sees it: its session stream, its exchange, and its rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.peers.peer import Peer
from outrider.services.draft.peers.peer_slots import PeerSlots
from outrider.services.draft.peers.replies import NeedResync, Reply
from outrider.services.draft.sessions.session import Ask, PeerId, Session
from outrider.shared.rpc.tensors import wire_dtype
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.resident import (
    GroupSize,
    RoundState,
    StateBlob,
    TreesBlob,
    state_starts,
    trees_starts,
)
from outrider.shared.spec.tree import DraftShape

VOCAB, HIDDEN, COLUMNS = 64, 64, 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
ROWS = len(PROMPT) - 1
Tree = list[tuple[int, int]]
"""Token and parent of each node, without the root."""


def features(begin: int, end: int) -> torch.Tensor:
    rows = [torch.randn(HIDDEN, generator=torch.Generator().manual_seed(at)) for at in range(begin, end)]
    return torch.stack(rows) if rows else torch.zeros(0, HIDDEN)


class Target:
    """A target's session stream, its exchange, and the tokens that it has chosen."""

    def __init__(
        self,
        engine: DraftEngine,
        peer_slots: PeerSlots,
        number: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.engine, self.peer_slots = engine, peer_slots
        self.device = device
        self.replies: list[Reply] = []
        self.peer = Peer(PeerId(number), f"t{number}", self)
        self.broken = False
        self.arrives = True
        self.room = 1 << 30
        self.state = torch.zeros(0, dtype=torch.uint8)
        self.given: list[torch.Tensor] = []
        self.tried: list[bool] = []
        self.tokens: dict[int, list[int]] = {}

    # ---- the outlet and the exchange

    def send(self, reply: Reply) -> None:
        self.replies.append(reply)

    def end(self) -> None: ...

    def goes_ahead(self, message: draft_pb2.RoundsNext, tried: bool) -> bool:
        self.tried.append(tried)
        return True

    def receive_state(
        self, message: draft_pb2.RoundsNext, state: StateBlob, expected: torch.Tensor, limit_s: float
    ) -> None:
        expected.fill_(message.number)
        if self.arrives:
            state.packed.copy_(self.state)
            state.packed[:4].view(torch.int32).fill_(message.number)

    def send_trees(self, message: draft_pb2.RoundsNext, blob: torch.Tensor) -> None:
        self.given.append(blob.clone())

    def mend(self) -> bool:
        return not self.broken

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        return state.nbytes <= self.room

    # ---- the messages

    def open_slots(self, slots: int = 4) -> str:
        return self.peer_slots.open(
            self.peer,
            draft_pb2.SlotsOpen(slots=slots, feature_size=HIDDEN, feature_dtype=wire_dtype(torch.float32)),
        )

    def follow(self, session_id: int, *, rows: int = ROWS, epoch: int = 1) -> Session:
        self.tokens[session_id] = list(PROMPT)
        fence = self.fence(session_id, epoch=epoch)
        self.engine.open(self.peer.id, SequenceOpen(fence, PROMPT, seed=session_id, temperature=0.0))
        self.engine.add_features(self.peer.id, session_id, epoch, 0, features(0, rows).to(self.device))
        self.peer_slots.report_ready(self.peer, session_id)
        session = self.engine.sessions.get(self.peer.id, session_id)
        assert session is not None
        return session

    def fence(self, session_id: int, epoch: int = 1) -> Fence:
        tokens = self.tokens[session_id]
        return Fence(session_id, epoch, len(tokens), extend_prefix_hash(FNV_OFFSET, tokens))

    def commit(self, session_id: int, base_len: int) -> None:
        tokens = self.tokens[session_id]
        rows = features(base_len - 1, len(tokens) - 1).to(self.device)
        self.engine.commit(
            self.peer.id, Commit(self.fence(session_id), base_len, tokens[base_len:], rows), None
        )

    def choose(self, session_id: int, *tokens: int) -> None:
        self.tokens[session_id].extend(tokens)

    def round(
        self,
        number: int,
        groups: Sequence[tuple[DraftShape, dict[int, tuple[int, int]]]],
        *,
        joins: dict[int, int] | None = None,
        told: Sequence[draft_pb2.SlotTokens] = (),
        left: Sequence[int] = (),
        series: int = 1,
        batch: int = 2,
    ) -> str:
        """Run a round.

        Args:
            number: Its number.
            groups: For each group its shape and, by slot, the session and the number of its newest tokens.
            joins: Slot → session.
            told, left: As in SlotsUpdate.
            series: The number of the series.
            batch: Rows of every group.
        """
        message = draft_pb2.RoundsNext(rounds=series, number=number)
        message.update.told.extend(told)
        message.update.left.extend(left)
        for slot, session_id in (joins or {}).items():
            message.joins.add(slot=slot, session_id=session_id, epoch=1)
        sizes = [GroupSize(batch, COLUMNS, shape.max_nodes) for shape, _ in groups]
        starts = state_starts(sizes, HIDDEN, torch.float32)
        self.state = torch.zeros(starts[-1], dtype=torch.uint8)
        for (shape, members), start, stop in zip(groups, starts, starts[1:], strict=False):
            state = RoundState.of_packed(self.state[start:stop], batch, COLUMNS, HIDDEN, torch.float32)
            group = message.groups.add(
                shape=draft_pb2.Shape(depth=shape.depth, topk=shape.topk, max_nodes=shape.max_nodes),
                batch=batch,
                columns=COLUMNS,
                slots=list(members),
            )
            for row, (session_id, count) in enumerate(members.values()):
                tokens = self.tokens[session_id]
                group.committed_upper.append(len(tokens))
                state.committed_lens[row], state.counts[row] = len(tokens), count
                state.tokens[row, :count] = torch.tensor(tokens[-count:])
                state.features[row, :count] = features(len(tokens) - 1 - count, len(tokens) - 1)
        return self.peer_slots.run(self.peer, message, self)  # type: ignore[arg-type]

    def trees(self, shapes: Sequence[DraftShape], batch: int = 2) -> list[list[Tree]]:
        """Return the trees of the last round, by group and row."""
        blob, found = self.given[-1].cpu(), []
        starts = trees_starts([GroupSize(batch, COLUMNS, shape.max_nodes) for shape in shapes])
        for shape, start, stop in zip(shapes, starts, starts[1:], strict=False):
            trees = TreesBlob.of(blob[start:stop], batch, shape.max_nodes)
            nodes = trees.num_nodes.tolist()
            pairs = zip(trees.tokens.tolist(), trees.parents.tolist(), nodes, strict=True)
            found.append([list(zip(token[1:n], parent[1:n], strict=True)) for token, parent, n in pairs])
        return found


def told(slot: int, number: int, base_len: int, *tokens: int) -> draft_pb2.SlotTokens:
    return draft_pb2.SlotTokens(slot=slot, number=number, base_len=base_len, token_ids=tokens)


def host_tree(engine: DraftEngine, tokens: Sequence[int], shape: DraftShape) -> Tree:
    """Return the tree of a new session through the host."""
    peer = PeerId(99)
    fence = Fence(1, 1, len(tokens), extend_prefix_hash(FNV_OFFSET, tokens))
    engine.open(peer, SequenceOpen(fence, tokens, seed=7, temperature=0.0))
    device = engine.strategy.growth.memory.pool.device if engine.strategy.growth else "cpu"
    engine.add_features(peer, 1, 1, 0, features(0, len(tokens) - 1).to(device))
    engine.commit(peer, Commit(fence, len(tokens), (), None), Ask(1, shape, asked_s=0.0))
    (proposal,) = engine.step().proposals
    engine.close(peer, 1)
    count = int(proposal.trees.num_nodes[0])
    tokens_, parents = proposal.trees.tokens[0].tolist(), proposal.trees.parents[0].tolist()
    return list(zip(tokens_[1:count], parents[1:count], strict=True))


def check_many_rounds(engine: DraftEngine, device: torch.device, count: int) -> PeerSlots:
    """Run `count` rounds of changing groups, and compare each tree with that of a new session.

    In each round, two sessions swap shapes, or share a group, in either order.
    """
    peer_slots = PeerSlots(engine, device)
    target = Target(engine, peer_slots, device=device)
    assert target.open_slots() == ""
    for session_id in (7, 8):
        target.follow(session_id)
        target.choose(session_id, 10 + session_id)
    first, second = DraftShape(3, 2, 8), DraftShape(2, 1, 3)
    mixtures: list[list[tuple[DraftShape, list[int]]]] = [
        [(first, [7]), (second, [8])],
        [(second, [7]), (first, [8])],
        [(first, [8, 7])],
        [(second, [7, 8])],
    ]
    # The draft is told of the first tokens after the first round, as by a target that runs ahead.
    later = [told(slot, 0, len(PROMPT), 10 + session_id) for slot, session_id in ((0, 7), (1, 8))]
    news: list[draft_pb2.SlotTokens] = []
    slot_of, counts, joins = {7: 0, 8: 1}, {7: 1, 8: 1}, {0: 7, 1: 8}
    for number in range(2, 2 + count):
        mixture = mixtures[number % len(mixtures)]
        groups = [(shape, {slot_of[one]: (one, counts[one]) for one in ids}) for shape, ids in mixture]
        assert target.round(number, groups, joins=joins, told=news) == ""
        for trees, (shape, ids) in zip(target.trees([one for one, _ in mixture]), mixture, strict=True):
            for tree, session_id in zip(trees, ids, strict=False):
                assert tree == host_tree(engine, target.tokens[session_id], shape), (number, session_id)
        joins, news, later = {}, later, []
        for session_id in (7, 8):
            chosen = [(number * session_id + at) % VOCAB for at in range(1 + number % 2)]
            news.append(told(slot_of[session_id], number, len(target.tokens[session_id]), *chosen))
            target.choose(session_id, *chosen)
            counts[session_id] = len(chosen)
    assert not any(isinstance(reply, NeedResync) for reply in target.replies)
    engine.sessions.check()
    return peer_slots
