"""A resident source over the slots of a small model, with a drafter that notes its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from outrider.kernels.packed_round import GroupRows
from outrider.services.target.drafting.draft_source import PreparedDrafts
from outrider.services.target.drafting.resident_source import ResidentSource
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.scheduling.sequence import Sequence as EngineSequence
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.device_drafter import DeviceDrafter
from outrider.shared.spec.tree import DraftBatch, DraftShape
from support.engine.slot_rig import PROMPTS, SlotRig
from support.engine.target_harness import trees_to_batch
from support.suite.compute_device import DEVICE


@dataclass
class Seat:
    """A group that a test drafter seats. Its trees are chains with the true continuations."""

    drafter: Seats
    sessions: Sequence[int]
    upper: Sequence[int]
    shape: DraftShape
    size: int
    columns: int
    refused: Sequence[int]
    key: str = "seats"
    loaded: int = 0
    counts: list[list[int]] = field(default_factory=list)

    def load(self) -> None:
        self.loaded += 1

    def draft(self, rows: GroupRows) -> DraftBatch:
        assert rows.tokens.shape == (self.size, self.columns)
        self.counts.append(rows.counts.tolist())
        trees = []
        for row in range(self.size):
            count, committed = int(rows.counts[row]), int(rows.committed_lens[row])
            root = int(rows.tokens[row, count - 1]) if count else 0
            answer = self.drafter.answers[self.sessions[row]] if count else []
            guesses = answer[committed : committed + self.shape.depth]
            trees.append((root, [(token, index) for index, token in enumerate(guesses)]))
        batch = trees_to_batch(trees)
        return DraftBatch(
            *(
                part.to(DEVICE)
                for part in (batch.tokens, batch.parents, batch.depths, batch.num_nodes, batch.ancestors)
            )
        )


class Seats(DeviceDrafter):
    """A `DeviceDrafter` that notes its calls.

    Attributes:
        log: The calls in order, each with its sessions.
        needed: For each session, the first feature row that it lacks. Unknown sessions have no entry.
        refuse: Sessions that are refused.
    """

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers = answers
        self.log: list[tuple[str, list[int]]] = []
        self.needed: dict[int, range] = {}
        self.refuse: set[int] = set()
        self.given: list[tuple[int, int, torch.Tensor]] = []
        self.seated: list[Seat] = []
        self.heard: list[tuple[int, list[int], bool]] = []

    def lacking(self, session_id: int) -> range | None:
        return self.needed.get(session_id)

    def features(self, session_id: int, base: int, rows: torch.Tensor) -> None:
        self.log.append(("features", [session_id]))
        self.given.append((session_id, base, rows))

    def catch_up(self, session_ids: Sequence[int]) -> None:
        if session_ids:
            self.log.append(("catch up", list(session_ids)))

    def seat(
        self,
        session_ids: Sequence[int],
        committed_upper: Sequence[int],
        shape: DraftShape,
        batch_size: int,
        columns: int,
    ) -> Seat:
        self.log.append(("seat", list(session_ids)))
        refused = [row for row, session_id in enumerate(session_ids) if session_id in self.refuse]
        seat = Seat(self, session_ids, committed_upper, shape, batch_size, columns, refused)
        self.seated.append(seat)
        return seat

    def committed(self, session_id: int, tokens: Sequence[int], *, drafted: bool) -> None:
        self.heard.append((session_id, list(tokens), drafted))


class Bench:
    """A resident source over the slots of a small model."""

    def __init__(
        self, decoder: Decoder, plain: list[list[int]], graphs: GraphCache | None = None, **options: bool
    ) -> None:
        self.rig = SlotRig(decoder, graphs, **options)  # type: ignore[arg-type]
        self.drafter = Seats([prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)])
        self.fell_back: list[tuple[int, str]] = []
        self.expected = True
        planner: Any = SimpleNamespace(
            fell_back=lambda sequence, reason: self.fell_back.append((sequence.session_id, reason)),
            expects_drafts=lambda sequence: self.expected,
        )
        self.source = ResidentSource(
            self.drafter,
            self.rig.runner,
            self.rig.step_runner,
            planner,
        )
        for sequence in self.rig.sequences:
            sequence.drafted = True
            self.drafter.needed[sequence.session_id] = range(0)

    @property
    def sequences(self) -> list[EngineSequence]:
        return self.rig.sequences

    def prepare(self, *shapes: DraftShape | None) -> PreparedDrafts:
        """Prepare a round of the sequences whose shape is not None."""
        return self.source.prepare(
            [
                Entry(sequence, sequence.residence, shape)
                for sequence, shape in zip(self.sequences, shapes, strict=True)
                if shape is not None
            ]
        )

    def run(self, *shapes: DraftShape | None) -> list[Outcome | None]:
        """Run a round as the decode loop does."""
        prepared = self.prepare(*shapes)
        for entry in prepared.entries:
            self.rig.step_runner.table.hold(entry.sequence)
        outcomes = self.rig.read(self.rig.step_runner.launch(prepared.entries, prepared.enqueue))
        for entry in prepared.entries:
            entry.sequence.fresh_columns = entry.columns
        return outcomes
