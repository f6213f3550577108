"""Rounds over packed rows on a small model: launched ahead, drafted, traced, and recorded with idle rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.engine.played_graphs import BoundedGraphs
from support.engine.slot_rig import PROMPTS, SlotRig, produced
from support.engine.slot_sequences import TREE, seated_sequence
from support.engine.target_harness import generate_plain, hidden_of, next_logits

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.packed_batch import Entry, SamplingMode
from outrider.services.target.model.rounds import unpack_outcomes
from outrider.services.target.model.verify_pass import PassSize
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.generation import SamplingParams, TraceNode
from outrider.shared.base.logit_rules import LogprobParams
from outrider.shared.base.token_states import StateParams
from outrider.shared.engine.graphs import RECORD_AFTER
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

torch.set_num_threads(1)
VOCAB, NEW_TOKENS = 64, 12


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> list[list[int]]:
    return [generate_plain(decoder, NoDrafter(), prompt, NEW_TOKENS) for prompt in PROMPTS]


def test_results_are_decoded_into_outcomes() -> None:
    assert unpack_outcomes([]) == []
    rows = [
        [2, 5, 0, 1, 4, 10, 11, 12],
        [0, 1, 0, -1, -1, 7, -1, -1],
        [-1, 1, -1, -1, -1, -1, -1, -1],
    ]
    assert unpack_outcomes(rows) == [Outcome(5, [1, 4], [10, 11, 12]), Outcome(1, [], [7]), None]


def test_plain_rounds_of_all_slots_yield_the_plain_tokens(decoder: Decoder, plain: list[list[int]]) -> None:
    rig = SlotRig(decoder)
    for _ in range(4):
        rig.read(rig.launch())
    for sequence, answer in zip(rig.sequences, plain, strict=True):
        assert produced(sequence) == answer[:5]


def test_rounds_may_be_launched_before_earlier_ones_are_read(
    decoder: Decoder, plain: list[list[int]]
) -> None:
    rig = SlotRig(decoder)
    flight = [rig.launch(), rig.launch()]
    for _ in range(4):
        rig.read(flight.pop(0))
        flight.append(rig.launch())
    assert [one.number for one in flight] == [5, 6]
    for sequence, answer in zip(rig.sequences, plain, strict=True):
        assert produced(sequence) == answer[:5]


def test_a_sequence_that_sits_out_a_round_is_unchanged(decoder: Decoder, plain: list[list[int]]) -> None:
    rig = SlotRig(decoder)
    rig.read(rig.launch(count=1))
    rig.read(rig.launch(count=2))
    rig.read(rig.launch())
    for sequence, answer, count in zip(rig.sequences, plain, (4, 3, 2), strict=True):
        assert produced(sequence) == answer[:count]


def test_a_right_draft_is_accepted_beside_plain_rows(decoder: Decoder, plain: list[list[int]]) -> None:
    rig = SlotRig(decoder)
    right, answer = plain[1][1:4], plain[1]
    wrong = (right[0] + 1) % VOCAB
    nodes = [(wrong, 0), (right[0], 0), (right[1], 2), (wrong, 2), (right[2], 3)]
    launched = rig.launch(NO_DRAFT, DraftShape(3, 2, 6), NO_DRAFT, draft=rig.drafting(1, nodes))
    assert list(launched.starts) == [0, 1, 7]
    outcomes = rig.read(launched)
    assert [outcome and outcome.num_nodes for outcome in outcomes] == [1, 6, 1]
    assert outcomes[1] is not None
    assert outcomes[1].accepted == [2, 3, 5]
    assert outcomes[1].emitted == answer[1:5]
    rig.read(rig.launch())
    for sequence, expected, count in zip(rig.sequences, plain, (3, 6, 3), strict=True):
        assert produced(sequence) == expected[:count], "the K/V of accepted nodes must be in place"


def test_an_answer_with_fewer_nodes_than_rows_leaves_rows_unused(
    decoder: Decoder, plain: list[list[int]]
) -> None:
    rig = SlotRig(decoder)
    launched = rig.launch(DraftShape(3, 2, 7), NO_DRAFT, NO_DRAFT, draft=rig.drafting(0, [(plain[0][1], 0)]))
    outcome = rig.read(launched)[0]
    assert outcome is not None
    assert (outcome.num_nodes, outcome.accepted) == (2, [1])
    rig.read(rig.launch())
    assert produced(rig.sequences[0]) == plain[0][:4]
    assert produced(rig.sequences[2]) == plain[2][:3]


def test_a_trace_has_the_trees_of_each_entry(decoder: Decoder, plain: list[list[int]]) -> None:
    rig = SlotRig(decoder, trace=True)
    nodes = [(plain[1][1], 0), (7, 1)]
    roots = [sequence.tokens[-1] for sequence in rig.sequences]
    launched = rig.launch(NO_DRAFT, DraftShape(2, 1, 3), NO_DRAFT, draft=rig.drafting(1, nodes))
    rig.read(launched)
    assert launched.trace_of(0, 1) == [TraceNode(roots[0], -1, 0, 0.0)]
    _root, *drafted = launched.trace_of(1, 3)
    assert drafted == [TraceNode(plain[1][1], 0, 1, -0.5), TraceNode(7, 1, 2, -1.0)]
    assert launched.trace_of(2, 1) == [TraceNode(roots[2], -1, 0, 0.0)]
    rig.read(rig.launch())
    assert launched.trace_of(1, 3)[1:] == drafted, "later rounds must not overwrite a trace that is not read"


def test_without_a_wish_for_a_trace_nothing_is_posted(decoder: Decoder) -> None:
    launched = SlotRig(decoder).launch()
    assert launched.nodes is None
    with pytest.raises(AssertionError, match="without a trace"):
        launched.trace_of(0, 1)


def test_the_size_of_a_pass_depends_on_rows_widest_tree_mode_and_features(decoder: Decoder) -> None:
    rig = SlotRig(decoder, features=True)
    first, second, third = rig.sequences

    def size(*planned: tuple[Sequence, DraftShape]) -> PassSize:
        return rig.step_runner.size_of([Entry(one, one.residence, shape) for one, shape in planned])

    assert size((first, NO_DRAFT)) == PassSize(1, 1, SamplingMode.GREEDY, True)
    assert size((first, NO_DRAFT), (second, NO_DRAFT), (third, NO_DRAFT)).rows == 4
    assert size((first, TREE), (second, NO_DRAFT)) == PassSize(8, 8, SamplingMode.GREEDY, True)
    for sequence in rig.sequences:
        sequence.feature_len = 0
    assert not size((first, TREE)).capture
    assert not SlotRig(decoder).step_runner.size_of([Entry(first, 1, TREE)]).capture


def test_features_of_accepted_tokens_are_stored_in_pool_and_slot(
    decoder: Decoder, plain: list[list[int]]
) -> None:
    """A round stores the rows that a prefill of the same tokens stores."""
    rig = SlotRig(decoder, features=True)
    nodes = [(plain[0][1], 0), (plain[0][2], 1)]
    rig.read(rig.launch(DraftShape(2, 1, 3), NO_DRAFT, NO_DRAFT, draft=rig.drafting(0, nodes)))
    sequence = rig.sequences[0]
    start, stop = sequence.prompt_len, sequence.committed_len - 1
    assert stop - start == 3
    found = rig.runner.read_features(sequence, start, stop)
    in_slot = rig.step_runner.table.features[sequence.slot, :3].clone()
    other = SlotRig(decoder, features=True)
    other.sequences = [
        seated_sequence(other.runner.pool, 9, 0, prompt=sequence.tokens[:-1], room=8),
    ]
    other.prefill()
    expected = other.runner.read_features(other.sequences[0], start, stop)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(in_slot, expected, rtol=1e-4, atol=1e-5)


def held(rig: SlotRig) -> list[torch.Tensor]:
    state, table = rig.step_runner.table.state, rig.step_runner.table
    return [
        tensor.clone()
        for tensor in (
            state.committed_lens,
            state.tokens,
            state.counts,
            table.features,
            table.page_table,
            *rig.runner.pool.planes(),
        )
    ]


@pytest.mark.parametrize(("rows", "width"), [(4, 1), (16, 8)])
@pytest.mark.parametrize("capture", [False, True])
def test_a_recording_with_idle_rows_leaves_slots_and_pool_untouched(
    decoder: Decoder, plain: list[list[int]], rows: int, width: int, capture: bool
) -> None:
    rig = SlotRig(decoder, BoundedGraphs(8), features=True)
    launched = rig.launch()
    before = held(rig)
    rig.step_runner.capture(PassSize(rows, width, SamplingMode.NOISE, capture))
    for found, expected in zip(held(rig), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    rig.read(launched)
    rig.read(rig.launch())
    for sequence, answer in zip(rig.sequences, plain, strict=True):
        assert produced(sequence) == answer[:3], "results in flight must survive a recording"


def test_one_graph_serves_every_mixture_of_the_same_size(decoder: Decoder, plain: list[list[int]]) -> None:
    graphs = BoundedGraphs(8)
    rig = SlotRig(decoder, graphs)
    rig.read(rig.launch(DraftShape(2, 1, 3), NO_DRAFT, NO_DRAFT, draft=rig.drafting(0, [(1, 0)])))
    rig.read(rig.launch(NO_DRAFT, NO_DRAFT, DraftShape(2, 2, 5), draft=rig.drafting(2, [(1, 0)])))
    keys = [key for key in graphs.keys if isinstance(key, GraphKey)]
    assert keys == [GraphKey("verify", 8, width=8, mode=SamplingMode.GREEDY)]
    rig.read(rig.launch())
    assert len(graphs.keys) == 2
    for sequence, answer in zip(rig.sequences, plain, strict=True):
        assert produced(sequence) == answer[: len(produced(sequence))]


def test_a_round_without_a_graph_is_padded_to_a_recorded_one(
    decoder: Decoder, plain: list[list[int]]
) -> None:
    graphs = BoundedGraphs(8)
    rig = SlotRig(decoder, graphs)
    with graphs.keeping():
        rig.step_runner.capture(PassSize(8, 1, SamplingMode.GREEDY, False))
        rig.step_runner.capture(PassSize(24, 8, SamplingMode.GREEDY, False))
    first = rig.launch()
    assert not first.provisional
    rig.read(first)
    launched = rig.launch(count=1)
    assert launched.provisional, "8 rows are too many for 1"
    rig.read(launched)
    rig.read(rig.launch(TREE, NO_DRAFT, NO_DRAFT, draft=rig.drafting(0, [(1, 0)])))
    assert len(graphs.captured) == 2
    for _ in range(RECORD_AFTER):
        rig.read(rig.launch())
    assert GraphKey("verify", 4, mode=SamplingMode.GREEDY) in graphs.captured, (
        "a size that is used often gets a graph of its own"
    )
    for sequence, answer in zip(rig.sequences, plain, strict=True):
        assert produced(sequence)[:NEW_TOKENS] == answer[: len(produced(sequence))]


@pytest.mark.parametrize(("shape", "width"), [(NO_DRAFT, 1), (TREE, 8)])
def test_a_client_that_wants_states_does_not_take_a_round_off_its_graph(
    decoder: Decoder, shape: DraftShape, width: int
) -> None:
    graphs = BoundedGraphs(8)
    wanted, named = StateParams(hidden_states=True), LogprobParams(top=0, token_ids=(9, 40))
    rig = SlotRig(decoder, graphs, states=wanted, logprobs=named)
    with graphs.keeping():
        rig.step_runner.capture(PassSize(4 if width == 1 else 16, width, SamplingMode.FULL, False))
    sequence = rig.sequences[0]
    tokens = list(sequence.tokens)
    launched = rig.launch(NO_DRAFT, shape, NO_DRAFT, draft=rig.drafting(1, [(7, 0)]) if width > 1 else None)
    assert rig.step_runner.replays(launched.entries)
    assert (len(graphs.captured), len(graphs.observer.replayed), launched.provisional) == (1, 1, False)
    rig.read(launched)
    states = launched.states_of(0, len(tokens) - 1, 1)
    assert states is not None
    found = np.frombuffer(states.hidden_states, "<f4")
    np.testing.assert_allclose(found, hidden_of(decoder, tokens)[-1].cpu(), rtol=1e-4, atol=1e-5)
    raw = next_logits(decoder, tokens)[-1].log_softmax(-1)[[9, 40]]
    torch.testing.assert_close(
        torch.tensor(launched.logprobs_of(0, 1)[0].requested), raw, rtol=1e-4, atol=1e-5
    )


def test_rounds_above_the_recorded_size_run_without_a_graph(decoder: Decoder, plain: list[list[int]]) -> None:
    graphs = BoundedGraphs(8)
    rig = SlotRig(decoder, graphs, recorded_entries=2)
    rig.read(rig.launch())
    assert not graphs.captured
    rig.read(rig.launch(count=2))
    assert len(graphs.captured) == 1
    assert produced(rig.sequences[0]) == plain[0][:3]


def test_a_slot_at_its_length_limit_is_idle_in_a_round_ahead(decoder: Decoder) -> None:
    rig = SlotRig(decoder)
    short = rig.sequences[1]
    rig.step_runner.table.hold(short)
    rig.step_runner.table.flush()
    rig.step_runner.table.state.limits[short.slot] = short.committed_len + 1
    first, second = rig.launch(), rig.launch()
    outcome = rig.read(first)[1]
    assert outcome is not None
    assert rig.read(second)[1] is None


def test_sampled_rows_depend_on_their_own_parameters_only(decoder: Decoder) -> None:
    """A sampled row beside greedy rows yields the tokens that it yields alone."""
    sampling = SamplingParams(0.9, seed=12, choice_index=1)

    def tokens(alone: bool) -> list[int]:
        rig = SlotRig(decoder)
        pool = rig.runner.pool
        for sequence in rig.sequences:
            assert sequence.lease is not None
            sequence.lease.release()
        sampled = seated_sequence(pool, 10, 2, prompt=PROMPTS[0], room=24, sampling=sampling)
        greedy = seated_sequence(pool, 11, 0, prompt=PROMPTS[1], room=24)
        rig.sequences = [sampled] if alone else [greedy, sampled]
        rig.prefill()
        for _ in range(6):
            rig.read(rig.launch())
        return produced(sampled)

    assert tokens(alone=True) == tokens(alone=False)


def test_drafting_begins_before_the_drafts_are_prepared(decoder: Decoder) -> None:
    rig = SlotRig(decoder)
    entries = [Entry(one, one.residence, NO_DRAFT) for one in rig.sequences]
    rig.step_runner.begin()
    begun = rig.step_runner._begun
    for sequence in rig.sequences:
        rig.step_runner.table.hold(sequence)
    drafted = rig.step_runner.launch(entries, lambda: None)
    assert drafted.marks.begun is begun
    rig.step_runner.begin()
    plain = rig.step_runner.launch(entries, None)
    assert plain.marks.begun is plain.marks.drafted, "a plain round begins with its verify pass"
