"""A drafter for tests of the decode loop. It drafts on the device, and it is given the expected answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.packed_round import GroupRows
from outrider.shared.spec.device_drafter import DeviceDrafter
from outrider.shared.spec.drafter import Commits, FeatureSpec, ProposalRequest, ProposalRow, SequenceOpen
from outrider.shared.spec.tree import DraftBatch, DraftShape, mask_words
from support.engine.target_harness import FakeDrafter, Node
from support.suite.compute_device import DEVICE

LONGEST = 1024


@dataclass(frozen=True, slots=True)
class Template:
    """The form of all trees of one shape: each level has `topk` children of one node, up to `max_nodes`."""

    parents: list[int]
    depths: list[int]
    siblings: list[int]

    @classmethod
    def of(cls, shape: DraftShape) -> Template:
        parents, depths, siblings = [-1], [0], [0]
        parent = 0
        for depth in range(1, shape.depth + 1):
            first = len(parents)
            for sibling in range(shape.topk):
                if len(parents) < shape.max_nodes:
                    parents.append(parent)
                    depths.append(depth)
                    siblings.append(sibling)
            if len(parents) == first:
                break
            parent = min(first + main_sibling(depth, shape.topk), len(parents) - 1)
        return cls(parents, depths, siblings)


@dataclass(frozen=True, slots=True)
class StaticTrees:
    """Input tensors of `AnswerGroup.draft`, at fixed addresses. `nodes` is the number of nodes of a tree."""

    nodes: int
    truth: torch.Tensor
    depths: torch.Tensor
    parents: torch.Tensor
    siblings: torch.Tensor
    mains: torch.Tensor
    ancestors: torch.Tensor

    @classmethod
    def make(cls, bs: int, shape: DraftShape, device: torch.device) -> StaticTrees:
        template = Template.of(shape)
        nodes = len(template.parents)
        for part in (template.parents, template.depths, template.siblings):
            part += [0] * (shape.max_nodes - nodes)
        words = mask_words(shape.max_nodes)
        masks = [[0] * words for _ in template.parents]
        for node, parent in enumerate(template.parents):
            if parent >= 0:
                masks[node] = list(masks[parent])
            masks[node][node // 32] |= 1 << node % 32
        signed = [[word - (1 << 32) if word >> 31 else word for word in mask] for mask in masks]
        return cls(
            nodes=nodes,
            truth=torch.zeros((bs, LONGEST), dtype=torch.int64, device=device),
            depths=torch.tensor([template.depths] * bs, dtype=torch.int32, device=device),
            parents=torch.tensor([template.parents] * bs, dtype=torch.int32, device=device),
            siblings=torch.tensor(template.siblings, dtype=torch.int64, device=device),
            mains=torch.tensor(
                [main_sibling(depth, shape.topk) for depth in template.depths],
                dtype=torch.int64,
                device=device,
            ),
            ancestors=torch.tensor([signed] * bs, dtype=torch.int32, device=device),
        )


def main_sibling(depth: int, topk: int) -> int:
    """Return the sibling that carries a level's guess. It is not always the first, so that K/V must move."""
    return depth * 7 % topk


class AnswerDrafter(FakeDrafter):
    """Guesses the known continuation of each sequence, through the host or on the device.

    A guess is right where ``(7 * index + 3 * depth) % 10 < 10 * accuracy``.

    In every round on the device, the drafter checks the slots' state and stores the feature rows, unless
    `checked` is False. Rounds that are recorded into a graph run no Python and cannot be checked.

    Attributes:
        consumed: For each session, the number of tokens up to which the drafter has processed all rows.
        arrived: For each session, the number of feature rows that certainly have arrived.
        caught_up: Sessions that were caught up since they last drafted on the device.
        seats: Number of groups that were seated.
        drafted_rows: Number of sessions in those groups that were not refused.
        refuse_every: Refuse every n-th session that is seated; 0 refuses none.
    """

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        vocab_size: int,
        accuracy: float = 0.8,
        spec: FeatureSpec | None = None,
        device: torch.device | str = DEVICE,
        *,
        checked: bool = True,
    ) -> None:
        super().__init__(self._host_tree, spec)
        self.answers = [list(answer) for answer in answers]
        self.vocab_size = vocab_size
        self.accuracy = accuracy
        self.device = torch.device(device)
        self.checked = checked
        self.consumed: dict[int, int] = {}
        self.arrived: dict[int, int] = {}
        self.caught_up: set[int] = set()
        self.drafts: dict[int, deque[int]] = {}
        self.chosen: dict[int, dict[int, int]] = {}
        self.static: dict[tuple[int, DraftShape], StaticTrees] = {}
        self.seats = 0
        self.drafted_rows = 0
        self.refuse_every = 0
        self.catch_ups = 0

    @property
    def on_device(self) -> DeviceDrafter | None:
        return self

    def open(self, sequences: Sequence[SequenceOpen]) -> None:
        super().open(sequences)
        for sequence in sequences:
            session_id = sequence.fence.session_id
            self.consumed[session_id] = 1
            self.arrived[session_id] = 0
            self.caught_up.discard(session_id)
            self.drafts[session_id] = deque()
            self.chosen[session_id] = {}

    def features(self, session_id: int, base: int, rows: torch.Tensor) -> None:
        known = self.rows[session_id]
        assert base == self.arrived[session_id] <= len(known), "rows must arrive in order"
        for old, new in zip(known[base:], rows, strict=False):
            assert torch.equal(old, new), "a stored feature row must equal the one of the round"
        known[base : base + len(rows)] = [row.clone() for row in rows]
        self.arrived[session_id] = base + len(rows)

    def propose(self, request: ProposalRequest) -> DraftBatch:
        drafts = super().propose(request)
        moved = {
            field: getattr(drafts, field).to(self.device)
            for field in ("tokens", "parents", "depths", "num_nodes", "ancestors")
        }
        return DraftBatch(**moved)

    def commit(self, result: Commits) -> None:
        super().commit(result)
        for commit in result.commits:
            self.arrived[commit.fence.session_id] = len(self.rows[commit.fence.session_id])

    def close(self, session_ids: Sequence[int]) -> None:
        super().close(session_ids)
        for session_id in session_ids:
            for kept in (self.consumed, self.arrived, self.drafts, self.chosen):
                del kept[session_id]
            self.caught_up.discard(session_id)

    def lacking(self, session_id: int) -> range | None:
        if session_id not in self.sequences:
            return None
        needed = len(self.sequences[session_id]) - 1
        return range(min(self.arrived[session_id], needed), needed) if self.spec.feature_size else range(0)

    def catch_up(self, session_ids: Sequence[int]) -> None:
        for session_id in session_ids:
            known = len(self.sequences[session_id])
            if self.spec.feature_size:
                known = min(known, self.arrived[session_id] + 1)
            self.consumed[session_id] = max(self.consumed[session_id], known)
            self.caught_up.add(session_id)
            self.catch_ups += 1

    def seat(
        self,
        session_ids: Sequence[int],
        committed_upper: Sequence[int],
        shape: DraftShape,
        batch_size: int,
        columns: int,
    ) -> AnswerGroup:
        assert len(session_ids) == len(committed_upper) == len(set(session_ids))
        assert len(session_ids) <= batch_size
        refused = []
        for row, session_id in enumerate(session_ids):
            assert committed_upper[row] >= len(self.sequences[session_id])
            self.drafted_rows += 1
            if self.refuse_every and self.drafted_rows % self.refuse_every == 0:
                refused.append(row)
        self.seats += bool(session_ids)
        return AnswerGroup(self, session_ids, committed_upper, shape, batch_size, columns, refused)

    def committed(self, session_id: int, tokens: Sequence[int], *, drafted: bool) -> None:
        known = self.sequences.get(session_id)
        if known is None:
            return
        assert tokens, "every pass chooses a token"
        if self.checked:
            # Rounds report in the order in which they were drafted.
            drafts = self.drafts[session_id]
            if drafted:
                assert drafts.popleft() == len(known), "the round must have drafted from this length"
            else:
                assert not drafts or drafts[0] > len(known), "the round has drafted"
            for index, token in enumerate(tokens, len(known)):
                assert self.chosen[session_id].get(index, token) == token, "the device chose another token"
        if drafted and self.spec.feature_size:
            # The round has processed all rows before its tokens.
            self.arrived[session_id] = len(known) - 1
        known.extend(tokens)

    def truth(self, tokens: list[int]) -> list[int]:
        return next((answer for answer in self.answers if answer[: len(tokens)] == tokens), [])

    def _host_tree(self, tokens: list[int], row: ProposalRow) -> list[Node]:
        template = Template.of(row.shape)
        truth = self.truth(tokens)
        nodes: list[Node] = []
        for parent, depth, sibling in zip(
            template.parents[1:], template.depths[1:], template.siblings[1:], strict=True
        ):
            index = len(tokens) + depth - 1
            token = truth[index] if index < len(truth) else 0
            right = (
                sibling == main_sibling(depth, row.shape.topk)
                and (7 * len(tokens) + 3 * depth) % 10 < 10 * self.accuracy
            )
            nodes.append((token if right else (token + 1 + sibling) % self.vocab_size, parent))
        return nodes


class AnswerGroup:
    """Sessions of an `AnswerDrafter` that draft together in one round on the device."""

    def __init__(
        self,
        drafter: AnswerDrafter,
        session_ids: Sequence[int],
        committed_upper: Sequence[int],
        shape: DraftShape,
        batch_size: int,
        columns: int,
        refused: Sequence[int],
    ) -> None:
        self.drafter = drafter
        self.key = "answers"
        self.refused = refused
        self.upper = committed_upper
        self.size = batch_size, columns
        self.sessions = [None if row in refused else session_id for row, session_id in enumerate(session_ids)]
        # Each size and shape has one set of tensors, because graphs keep the addresses.
        key = batch_size, shape
        if key not in drafter.static:
            drafter.static[key] = StaticTrees.make(*key, drafter.device)
        self.static = drafter.static[key]
        self.loaded = False

    def load(self) -> None:
        drafter = self.drafter
        rows = torch.zeros((self.size[0], LONGEST), dtype=torch.int64)
        for row, session_id in enumerate(self.sessions):
            if session_id is not None:
                answer = drafter.truth(drafter.sequences[session_id])
                rows[row, : len(answer)] = torch.tensor(answer)
        self.static.truth.copy_(rows)
        self.loaded = True

    def draft(self, rows: GroupRows) -> DraftBatch:
        assert rows.tokens.shape == self.size
        if self.drafter.checked:
            self._check(rows)
        static = self.static
        committed = rows.committed_lens.to(torch.int64)[:, None]
        depths = static.depths.to(torch.int64)
        truth = static.truth.gather(1, (committed + depths - 1).clamp(0, LONGEST - 1))
        right = (static.siblings == static.mains) & (
            (7 * committed + 3 * depths) % 10 < 10 * self.drafter.accuracy
        )
        tokens = torch.where(right, truth, (truth + 1 + static.siblings) % self.drafter.vocab_size).to(
            torch.int32
        )
        last = (rows.counts.to(torch.int64) - 1).clamp(min=0)
        tokens[:, 0] = rows.tokens.gather(1, last[:, None])[:, 0]
        num_nodes = torch.where(rows.counts > 0, static.nodes, 1).to(torch.int32)
        return DraftBatch(tokens, static.parents, static.depths, num_nodes, static.ancestors)

    def _check(self, rows: GroupRows) -> None:
        drafter = self.drafter
        sessions = [*self.sessions, *[None] * (self.size[0] - len(self.sessions))]
        for row, session_id in enumerate(sessions):
            count, committed = int(rows.counts[row]), int(rows.committed_lens[row])
            if session_id is None:
                assert count == 0, "padding and refused rows must be idle"
                continue
            assert self.loaded, "the group must be loaded before its sessions draft"
            if count == 0:
                continue  # the sequence ended or failed, which the host has not read yet
            assert committed <= self.upper[row], "committed_upper must be an upper bound"
            first = committed - count
            known = drafter.sequences[session_id]
            if session_id in drafter.caught_up:
                assert first <= drafter.consumed[session_id] <= committed, "rounds must be gapless"
            else:
                assert first == drafter.consumed[session_id], "rounds must be gapless"
            assert len(known) >= first, "the host is at most one round late"
            fresh = rows.tokens[row, :count].tolist()
            assert fresh[: len(known) - first] == known[first:committed]
            drafter.chosen[session_id].update(enumerate(fresh, first))
            drafter.caught_up.discard(session_id)
            drafter.consumed[session_id] = committed
            drafter.drafts[session_id].append(committed)
            if drafter.spec.feature_size:
                kept = drafter.rows[session_id]
                assert len(kept) >= first - 1, "rows must be gapless"
                for old, new in zip(kept[first - 1 :], rows.features[row, :count], strict=False):
                    assert torch.equal(old, new), "a round's feature row must equal the stored one"
                kept[first - 1 :] = rows.features[row, :count].clone()
