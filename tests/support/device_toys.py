"""A drafter for tests of the device loop. Its rounds stay on the device, and it knows the right answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.shared.spec.drafter import FeatureSpec, ProposalRequest, ProposalRow, SequenceOpen
from outrider.shared.spec.resident import RoundState
from outrider.shared.spec.tree import DraftBatch, DraftShape, mask_words
from support.compute_device import DEVICE
from support.target_harness import FakeDrafter, Node

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
    """Input tensors of `AnswerRounds.draft`, at fixed addresses."""

    truth: torch.Tensor
    depths: torch.Tensor
    parents: torch.Tensor
    siblings: torch.Tensor
    mains: torch.Tensor
    ancestors: torch.Tensor

    @classmethod
    def make(cls, bs: int, shape: DraftShape, device: torch.device) -> StaticTrees:
        template = Template.of(shape)
        assert len(template.parents) == shape.max_nodes, (
            "tests must request shapes that depth and topk can fill"
        )
        words = mask_words(shape.max_nodes)
        masks = [[0] * words for _ in template.parents]
        for node, parent in enumerate(template.parents):
            if parent >= 0:
                masks[node] = list(masks[parent])
            masks[node][node // 32] |= 1 << node % 32
        signed = [[word - (1 << 32) if word >> 31 else word for word in mask] for mask in masks]
        return cls(
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
    """Guesses the known continuation of each sequence.

    A guess is right where ``(7 * index + 3 * depth) % 10 < 10 * accuracy``.

    In every round, the drafter checks the engine's state and stores the feature rows, unless `checked` is
    False. Rounds that are recorded into a graph run no Python and cannot be checked.
    """

    device_resident = True

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
        self.static: dict[tuple[int, DraftShape], StaticTrees] = {}
        self.entered = 0
        self.refuse_every = 0
        self.reservations = 0
        self.fail_reserve_at = -1
        self.moves = 0
        self.fail_move_at = -1

    def open(self, sequences: Sequence[SequenceOpen]) -> None:
        super().open(sequences)
        for sequence in sequences:
            self.consumed[sequence.fence.session_id] = len(sequence.token_ids)

    def propose(self, request: ProposalRequest) -> DraftBatch:
        for row in request.rows:
            self.consumed[row.fence.session_id] = len(self.sequences[row.fence.session_id])
        drafts = super().propose(request)
        moved = {
            field: getattr(drafts, field).to(self.device)
            for field in ("tokens", "parents", "depths", "num_nodes", "ancestors")
        }
        return DraftBatch(**moved)

    def close(self, session_ids: Sequence[int]) -> None:
        super().close(session_ids)
        for session_id in session_ids:
            del self.consumed[session_id]

    def enter(self, session_ids: Sequence[int], shape: DraftShape, state: RoundState) -> AnswerRounds | None:
        self.entered += 1
        if self.refuse_every and self.entered % self.refuse_every == 0:
            return None
        assert not state.counts.any(), "every row must be idle at first"
        pending = [len(self.sequences[session_id]) - self.consumed[session_id] for session_id in session_ids]
        assert all(count >= 0 for count in pending)
        if any(not 1 <= count <= state.columns for count in pending):
            return None
        for row, (session_id, count) in enumerate(zip(session_ids, pending, strict=True)):
            tokens = self.sequences[session_id]
            assert int(state.committed_lens[row]) == len(tokens)
            state.tokens[row, :count] = torch.tensor(tokens[-count:], dtype=torch.int32)
            state.counts[row] = count
            if self.spec.feature_size:
                rows = self.rows[session_id]
                assert len(rows) == len(tokens) - 1, "the last token must not have a feature yet"
                state.features[row, :count] = torch.stack(rows[-count:]).to(state.features)
        return AnswerRounds(self, session_ids, shape, state)

    def rounds_for_capture(self, shape: DraftShape, state: RoundState) -> AnswerRounds:
        return AnswerRounds(self, (), shape, state)

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


class AnswerRounds:
    """The rounds of an `AnswerDrafter` on the device."""

    def __init__(
        self, drafter: AnswerDrafter, session_ids: Sequence[int], shape: DraftShape, state: RoundState
    ) -> None:
        self.drafter = drafter
        self.key = "answers"
        self.shape = shape
        self.state = state
        self.sessions: list[int | None] = list(session_ids)
        self.upper = [0] * len(session_ids)
        self.told = [len(drafter.sequences[one]) - drafter.consumed[one] for one in session_ids]
        self.checked = drafter.checked
        self.left = False
        self.static = self._fill_static()

    def _fill_static(self) -> StaticTrees:
        """Return the static tensors of this batch size and shape, filled with the answers of the sessions.

        Each size and shape has one set of tensors, because graphs keep the addresses.
        """
        drafter, key = self.drafter, (self.state.bs, self.shape)
        if key not in drafter.static:
            drafter.static[key] = StaticTrees.make(*key, self.state.tokens.device)
        rows = torch.zeros((self.state.bs, LONGEST), dtype=torch.int64)
        for row, session_id in enumerate(self.sessions):
            assert session_id is not None, "sessions that enter or move must be live"
            answer = drafter.truth(drafter.sequences[session_id])
            rows[row, : len(answer)] = torch.tensor(answer)
        drafter.static[key].truth.copy_(rows)
        return drafter.static[key]

    def reserve(self, committed_upper: Sequence[int]) -> bool:
        assert len(committed_upper) == len(self.sessions)
        for row, session_id in enumerate(self.sessions):
            assert (committed_upper[row] == 0) == (session_id is None)
            assert session_id is None or committed_upper[row] >= self.upper[row], "bounds must not shrink"
        self.upper = list(committed_upper)
        self.drafter.reservations += 1
        return self.drafter.reservations != self.drafter.fail_reserve_at

    def draft(self, state: RoundState) -> DraftBatch:
        if self.checked:
            self._check(state)
        static = self.static
        committed = state.committed_lens.to(torch.int64)[:, None]
        depths = static.depths.to(torch.int64)
        truth = static.truth.gather(1, (committed + depths - 1).clamp(0, LONGEST - 1))
        right = (static.siblings == static.mains) & (
            (7 * committed + 3 * depths) % 10 < 10 * self.drafter.accuracy
        )
        tokens = torch.where(right, truth, (truth + 1 + static.siblings) % self.drafter.vocab_size).to(
            torch.int32
        )
        tokens[:, 0] = state.roots()
        num_nodes = torch.where(state.counts > 0, tokens.shape[1], 1).to(torch.int32)
        return DraftBatch(tokens, static.parents, static.depths, num_nodes, static.ancestors)

    def _check(self, state: RoundState) -> None:
        drafter = self.drafter
        for row, session_id in enumerate(self.sessions):
            count, committed = int(state.counts[row]), int(state.committed_lens[row])
            if session_id is None:
                assert count == 0, "a retired row must be idle"
                continue
            if count == 0:
                continue  # the sequence ended or failed, which the host has not read yet
            assert committed <= self.upper[row], "committed_upper must be an upper bound"
            assert committed - count == drafter.consumed[session_id], "rounds must be gapless"
            known = drafter.sequences[session_id][committed - count : committed]
            assert state.tokens[row, : len(known)].tolist()[:count] == known[:count]
            drafter.consumed[session_id] = committed
            if drafter.spec.feature_size:
                rows = drafter.rows[session_id]
                del rows[committed - 1 - count :]
                rows.extend(state.features[row, :count].clone())
        for row in range(len(self.sessions), state.bs):
            assert int(state.counts[row]) == 0, "padding must be idle"

    def committed(self, tokens_per_row: Sequence[Sequence[int]]) -> None:
        for row, (session_id, tokens) in enumerate(zip(self.sessions, tokens_per_row, strict=True)):
            if session_id is None:
                assert not tokens
            else:
                assert 1 <= len(tokens) <= self.state.columns
                self.drafter.sequences[session_id].extend(tokens)
                self.told[row] = len(tokens)

    def retire(self, rows: Sequence[int]) -> None:
        for row in rows:
            assert self.sessions[row] is not None
            self.sessions[row] = None

    def move(self, rows: Sequence[int], state: RoundState) -> bool:
        self.drafter.moves += 1
        if self.drafter.moves == self.drafter.fail_move_at:
            return False
        assert state.bs < self.state.bs
        assert {row for row, session_id in enumerate(self.sessions) if session_id is not None} == set(rows), (
            "all live sessions must move"
        )
        self.sessions, self.upper, self.told = (
            [field[row] for row in rows] for field in (self.sessions, self.upper, self.told)
        )
        self.state = state
        self.static = self._fill_static()
        return True

    def leave(self) -> None:
        assert not self.left
        self.left = True
        if not self.checked:
            for row, session_id in enumerate(self.sessions):
                if session_id is not None:
                    self.drafter.consumed[session_id] = (
                        len(self.drafter.sequences[session_id]) - self.told[row]
                    )
            return
        for row, session_id in enumerate(self.sessions):
            if session_id is None:
                continue
            tokens = self.drafter.sequences[session_id]
            count = int(self.state.counts[row])
            assert int(self.state.committed_lens[row]) == len(tokens)
            assert self.state.tokens[row, :count].tolist() == tokens[-count:]
            assert self.drafter.consumed[session_id] == len(tokens) - count
            if self.drafter.spec.feature_size:
                rows = self.drafter.rows[session_id]
                del rows[len(tokens) - 1 - count :]
                rows.extend(self.state.features[row, :count].clone())
