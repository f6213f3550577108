"""Drafts on the target's device: missing feature rows, groups by shape, refused rows, and recordings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from support.compute_device import DEVICE
from support.played_graphs import BoundedGraphs
from support.slot_rig import PROMPTS, SlotRig, produced
from support.target_harness import generate_plain, load_toy, trees_to_batch
from support.toys import make_toy_target

from outrider.kernels.packed_round import GroupRows
from outrider.services.target.drafting.draft_source import PreparedDrafts
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.drafting.resident_source import ResidentSource
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence as EngineSequence
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.tree import NO_DRAFT, DraftBatch, DraftShape

torch.set_num_threads(1)
VOCAB, NEW_TOKENS = 64, 12
CHAIN, TREE = DraftShape(2, 1, 3), DraftShape(3, 2, 7)


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


class Seats:
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
        self.source = ResidentSource(
            self.drafter,  # type: ignore[arg-type]
            self.rig.runner,
            self.rig.rounds,
            lambda sequence, reason: self.fell_back.append((sequence.session_id, reason)),
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
            self.rig.rounds.table.hold(entry.sequence)
        outcomes = self.rig.read(self.rig.rounds.launch(prepared.entries, prepared.enqueue))
        for entry in prepared.entries:
            entry.sequence.fresh_columns = entry.columns
        return outcomes


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_toy(make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=3))


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> list[list[int]]:
    return [generate_plain(decoder, NoDrafter(), prompt, NEW_TOKENS) for prompt in PROMPTS]


def test_rows_are_grouped_by_shape_and_their_trees_packed(decoder: Decoder, plain: list[list[int]]) -> None:
    bench = Bench(decoder, plain)
    outcomes = bench.run(CHAIN, TREE, CHAIN)
    assert [(list(seat.sessions), seat.shape, seat.size) for seat in bench.drafter.seated] == [
        ([0, 2], CHAIN, 2),
        ([1], TREE, 1),
    ]
    assert [outcome and len(outcome.accepted) for outcome in outcomes] == [2, 3, 2]
    assert [seat.loaded for seat in bench.drafter.seated] == [1, 1]
    for sequence, answer in zip(bench.sequences, plain, strict=True):
        assert produced(sequence) == answer[: len(produced(sequence))]
    assert not bench.fell_back


def test_groups_are_padded_with_idle_rows(decoder: Decoder, plain: list[list[int]]) -> None:
    bench = Bench(decoder, plain)
    bench.source._batch_sizes = (1, 4)
    bench.run(CHAIN, CHAIN, CHAIN)
    (seat,) = bench.drafter.seated
    assert (seat.size, seat.counts) == (4, [[1, 1, 1, 0]])


def test_a_round_without_drafts_seats_nobody(decoder: Decoder, plain: list[list[int]]) -> None:
    bench = Bench(decoder, plain)
    prepared = bench.prepare(NO_DRAFT, NO_DRAFT, NO_DRAFT)
    assert prepared.enqueue is None
    assert prepared.may_run_ahead
    assert bench.drafter.log == []
    assert not bench.source.waits_for_host(prepared.entries)
    assert bench.source.planned(bench.sequences) == [None, None, None]


def test_the_bound_of_a_seat_covers_the_passes_in_flight(decoder: Decoder, plain: list[list[int]]) -> None:
    bench = Bench(decoder, plain)
    bench.sequences[1].tokens_ahead = 3
    bench.prepare(CHAIN, CHAIN, CHAIN)
    (seat,) = bench.drafter.seated
    assert seat.upper == [
        one.committed_len + ahead for one, ahead in zip(bench.sequences, (0, 3, 0), strict=True)
    ]


def test_columns_cover_the_tokens_of_the_last_round(decoder: Decoder, plain: list[list[int]]) -> None:
    bench = Bench(decoder, plain)
    bench.run(TREE, CHAIN, NO_DRAFT)
    bench.drafter.seated.clear()
    bench.run(CHAIN, TREE, NO_DRAFT)
    first, second = bench.drafter.seated
    assert (first.shape, first.columns) == (CHAIN, 4), "the row's last round may have chosen four tokens"
    assert (second.shape, second.columns) == (TREE, 4)
    assert first.counts == [[4]]
    assert second.counts == [[3]]


def test_a_session_is_supplied_only_when_it_did_not_draft_last(
    decoder: Decoder, plain: list[list[int]]
) -> None:
    bench = Bench(decoder, plain, features=True)
    first = bench.sequences[0]
    stop = first.committed_len - 1
    bench.drafter.needed[0] = range(2, stop)
    bench.run(CHAIN, NO_DRAFT, NO_DRAFT)
    assert bench.drafter.log == [("features", [0]), ("catch up", [0]), ("seat", [0])]
    ((session_id, base, rows),) = bench.drafter.given
    assert (session_id, base) == (0, 2)
    torch.testing.assert_close(rows, bench.rig.runner.read_features(first, 2, stop), rtol=0, atol=0)
    bench.drafter.log.clear()
    bench.drafter.needed[0] = range(stop, first.committed_len - 1)
    bench.run(CHAIN, NO_DRAFT, NO_DRAFT)
    assert bench.drafter.log == [("seat", [0])], "the state in the slot has everything that is missing"
    bench.drafter.log.clear()
    bench.run(NO_DRAFT, NO_DRAFT, NO_DRAFT)
    bench.run(CHAIN, NO_DRAFT, NO_DRAFT)
    assert bench.drafter.log == [("features", [0]), ("catch up", [0]), ("seat", [0])]


def test_a_session_that_sits_out_a_round_lacks_nothing(decoder: Decoder, plain: list[list[int]]) -> None:
    bench = Bench(decoder, plain)
    bench.run(CHAIN, CHAIN, CHAIN)
    bench.run(CHAIN, None, CHAIN)
    bench.drafter.log.clear()
    bench.run(CHAIN, CHAIN, CHAIN)
    assert bench.drafter.log == [("seat", [0, 1, 2])]
    assert produced(bench.sequences[1]) == plain[1][:7]


@pytest.mark.parametrize("forget", ["ended", "abandon"])
def test_a_session_that_is_opened_again_is_supplied_again(
    decoder: Decoder, plain: list[list[int]], forget: str
) -> None:
    bench = Bench(decoder, plain)
    bench.run(CHAIN, NO_DRAFT, NO_DRAFT)
    if forget == "ended":
        bench.source.ended(bench.sequences[0])
    else:
        bench.source.abandon()
    bench.drafter.log.clear()
    bench.prepare(CHAIN, NO_DRAFT, NO_DRAFT)
    assert bench.drafter.log == [("catch up", [0]), ("seat", [0])]


def test_a_refused_session_verifies_its_root_alone(decoder: Decoder, plain: list[list[int]]) -> None:
    bench = Bench(decoder, plain)
    bench.drafter.refuse = {1}
    outcomes = bench.run(CHAIN, CHAIN, CHAIN)
    assert [outcome and outcome.num_nodes for outcome in outcomes] == [3, 1, 3]
    assert bench.fell_back == [(1, "kv_full")]
    assert bench.drafter.seated[0].counts == [[1, 0, 1]]
    bench.drafter.refuse = set()
    bench.drafter.log.clear()
    bench.run(CHAIN, CHAIN, CHAIN)
    assert bench.drafter.log == [("catch up", [1]), ("seat", [0, 1, 2])], "it lacks the rows of a round"
    for sequence, answer, count in zip(bench.sequences, plain, (7, 5, 7), strict=True):
        assert produced(sequence) == answer[:count]


def test_an_unknown_session_is_not_seated(decoder: Decoder, plain: list[list[int]]) -> None:
    bench = Bench(decoder, plain)
    del bench.drafter.needed[2]
    outcomes = bench.run(CHAIN, NO_DRAFT, CHAIN)
    assert [outcome and outcome.num_nodes for outcome in outcomes] == [3, 1, 1]
    assert bench.fell_back == [(2, "not_followed")]
    assert bench.drafter.log == [("catch up", [0]), ("seat", [0])]


@pytest.mark.parametrize("prompt", ["whole", "first part"])
def test_a_prompt_is_fed_as_it_is_prefilled_without_its_last_row(
    decoder: Decoder, plain: list[list[int]], prompt: str
) -> None:
    bench = Bench(decoder, plain, features=True)
    sequence = bench.sequences[2]
    del sequence.tokens[-1]  # the first token has not been read yet
    stop = sequence.prompt_len if prompt == "whole" else 4
    bench.drafter.needed[2] = range(1, sequence.prompt_len - 1)
    bench.source.prefilled(PrefillChunk(sequence, 0, stop))
    ((session_id, base, rows),) = bench.drafter.given
    assert (session_id, base, base + len(rows)) == (2, 1, min(stop, sequence.prompt_len - 1))
    assert bench.drafter.log == [("features", [2]), ("catch up", [2])]


@pytest.mark.parametrize("why", ["auto", "not drafted", "one token"])
def test_a_prompt_is_not_fed_if_its_sequence_will_hardly_draft(
    decoder: Decoder, plain: list[list[int]], why: str
) -> None:
    bench = Bench(decoder, plain, features=True)
    sequence = bench.sequences[2]
    if why == "auto":
        sequence.controller_row = object()  # type: ignore[assignment]
    elif why == "not drafted":
        sequence.drafted = False
    else:
        sequence.tokens += [1] * (sequence.remaining - 1)
    bench.drafter.needed[2] = range(3)
    bench.source.prefilled(PrefillChunk(sequence, 0, sequence.prompt_len))
    assert bench.drafter.log == []
    if why == "auto":
        bench.run(CHAIN, NO_DRAFT, None)
        bench.drafter.log.clear()
        bench.source.prefilled(PrefillChunk(sequence, 0, sequence.prompt_len))
        assert bench.drafter.log == [("features", [2]), ("catch up", [2])], (
            "others draft, so it probably will"
        )


def test_the_drafter_hears_of_every_token(decoder: Decoder, plain: list[list[int]]) -> None:
    bench = Bench(decoder, plain)
    first, second, _ = bench.sequences
    bench.source.first_token(first, 9)
    bench.prepare(CHAIN, NO_DRAFT, NO_DRAFT)
    outcome = Outcome(1, [], [4])
    bench.source.committed(Entry(first, 1, CHAIN), [4, 5], outcome)
    bench.source.committed(Entry(second, 1, NO_DRAFT), [6], outcome)
    bench.source.read(set())
    assert bench.drafter.heard == [(0, [9], False), (0, [4, 5], True), (1, [6], False)]
    assert bench.source.take_wait() is None


def test_a_session_that_was_reopened_has_not_drafted_in_the_round_in_flight(
    decoder: Decoder, plain: list[list[int]]
) -> None:
    bench = Bench(decoder, plain)
    first = bench.sequences[0]
    entry = Entry(first, 1, CHAIN, first.epoch)
    first.epoch += 1
    bench.source.committed(entry, [4, 5], Outcome(1, [], [4]))
    assert bench.drafter.heard == [(0, [4, 5], False)]


def test_a_draft_is_recorded_with_idle_rows(decoder: Decoder, plain: list[list[int]]) -> None:
    graphs = BoundedGraphs(8)
    bench = Bench(decoder, plain, graphs)
    before = bench.rig.rounds.table.state.tokens.clone()
    bench.source.capture(2, CHAIN)
    (seat,) = bench.drafter.seated
    assert (list(seat.sessions), seat.size, seat.columns) == ([], 2, 3)
    assert seat.counts == [[0, 0]]
    assert torch.equal(bench.rig.rounds.table.state.tokens, before)
    assert graphs.keys == (GraphKey("draft", 2, width=3, shape=CHAIN, drafter="seats", draft_dependent=True),)


def test_a_late_recording_runs_with_idle_rows_before_the_draft(
    decoder: Decoder, plain: list[list[int]]
) -> None:
    graphs = BoundedGraphs(8)
    bench = Bench(decoder, plain, graphs)
    for _ in range(2):
        bench.run(CHAIN, NO_DRAFT, NO_DRAFT)
    assert [seat.counts for seat in bench.drafter.seated] == [[[0], [1]], [[3]]]
    assert produced(bench.sequences[0]) == plain[0][:7]
    kinds = [key.kind for key in graphs.keys if isinstance(key, GraphKey)]
    assert sorted(kinds) == ["draft", "verify"]
