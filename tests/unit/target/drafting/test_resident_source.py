"""Drafts on the target's device: missing feature rows, groups by shape, refused rows, and recordings."""

from __future__ import annotations

import pytest
import torch
from support.engine.played_graphs import BoundedGraphs
from support.engine.resident_bench import Bench
from support.engine.slot_rig import PROMPTS, produced
from support.engine.target_harness import generate_plain

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.drafting.resident_source import TOLD_TOGETHER
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

torch.set_num_threads(1)
VOCAB, NEW_TOKENS = 64, 12
CHAIN, TREE = DraftShape(2, 1, 3), DraftShape(3, 2, 7)


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> list[list[int]]:
    return [generate_plain(decoder, NoDrafter(), prompt, NEW_TOKENS) for prompt in PROMPTS]


def test_entries_are_grouped_by_shape_and_their_trees_packed(
    decoder: Decoder, plain: list[list[int]]
) -> None:
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
    assert not bench.source.requested


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
    assert (first.shape, first.columns) == (CHAIN, 4), "the sequence's last round may have chosen four tokens"
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
        bench.expected = False
    elif why == "not drafted":
        sequence.drafted = False
    else:
        sequence.tokens += [1] * (sequence.remaining - 1)
    bench.drafter.needed[2] = range(3)
    bench.source.prefilled(PrefillChunk(sequence, 0, sequence.prompt_len))
    assert bench.drafter.log == []


def test_a_long_catch_up_is_reported(decoder: Decoder, plain: list[list[int]]) -> None:
    bench = Bench(decoder, plain, features=True)
    columns = bench.rig.step_runner.table.columns
    bench.sequences[0].feature_len = bench.sequences[0].cached_len
    bench.drafter.needed[0] = range(2)
    assert not bench.prepare(CHAIN, NO_DRAFT, NO_DRAFT).catches_up
    bench.source.ended(bench.sequences[0])
    bench.source._step_runner.table.columns = 1
    assert bench.prepare(CHAIN, NO_DRAFT, NO_DRAFT).catches_up
    bench.source._step_runner.table.columns = columns


def test_tokens_of_entries_without_drafts_are_told_together(decoder: Decoder, plain: list[list[int]]) -> None:
    bench = Bench(decoder, plain)
    first = bench.sequences[0]
    bench.source.first_token(first, 0)
    for token in range(1, TOLD_TOGETHER - 1):
        bench.source.committed(Entry(first, 1, NO_DRAFT), [token], Outcome(1, [], [token]))
    assert not bench.drafter.heard
    bench.source.committed(Entry(first, 1, NO_DRAFT), [63], Outcome(1, [], [63]))
    assert bench.drafter.heard == [(0, list(range(TOLD_TOGETHER)), False)]
    bench.source.committed(Entry(first, 1, NO_DRAFT), [7], Outcome(1, [], [7]))
    bench.prepare(CHAIN, NO_DRAFT, NO_DRAFT)
    assert bench.drafter.heard[1:] == [(0, [7], False)], "before the sequence drafts"
    bench.source.ended(first)
    bench.source.committed(Entry(first, 1, NO_DRAFT), [8], Outcome(1, [], [8]))
    bench.source.ended(first)
    bench.prepare(CHAIN, NO_DRAFT, NO_DRAFT)
    assert len(bench.drafter.heard) == 2, "a session that was opened again has all tokens"


def test_the_drafter_hears_of_every_token(decoder: Decoder, plain: list[list[int]]) -> None:
    bench = Bench(decoder, plain)
    first, second, _ = bench.sequences
    bench.source.first_token(first, 9)
    bench.prepare(CHAIN, NO_DRAFT, NO_DRAFT)
    outcome = Outcome(1, [], [4])
    bench.source.committed(Entry(first, 1, CHAIN), [4, 5], outcome)
    bench.source.committed(Entry(second, 1, NO_DRAFT), [6], outcome)
    bench.source.read(set(), 0.0)
    assert bench.drafter.heard == [(0, [9], False), (0, [4, 5], True)]
    bench.prepare(CHAIN, CHAIN, NO_DRAFT)
    assert bench.drafter.heard[2:] == [(1, [6], False)]
    assert bench.source.take_wait() is None


def test_a_session_that_was_reopened_has_not_drafted_in_the_round_in_flight(
    decoder: Decoder, plain: list[list[int]]
) -> None:
    bench = Bench(decoder, plain)
    first = bench.sequences[0]
    entry = Entry(first, 1, CHAIN, first.epoch)
    first.epoch += 1
    bench.source.committed(entry, [4, 5], Outcome(1, [], [4]))
    bench.prepare(CHAIN, NO_DRAFT, NO_DRAFT)
    assert bench.drafter.heard == [(0, [4, 5], False)]


def test_a_draft_is_recorded_with_idle_rows(decoder: Decoder, plain: list[list[int]]) -> None:
    graphs = BoundedGraphs(8)
    bench = Bench(decoder, plain, graphs)
    before = bench.rig.step_runner.table.state.tokens.clone()
    bench.source.recording(2, CHAIN)()
    (seat,) = bench.drafter.seated
    assert (list(seat.sessions), seat.size, seat.columns) == ([], 2, 3)
    assert seat.counts == [[0, 0]]
    assert torch.equal(bench.rig.step_runner.table.state.tokens, before)
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
