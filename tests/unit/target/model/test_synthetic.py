"""Synthetic acceptance: accepted drafts follow the given distribution, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from support.engine.target_harness import trees_to_batch

from outrider.kernels.packed_round import PackedTrees
from outrider.kernels.verify import verify_tree
from outrider.services.target.model.synthetic_acceptance import SyntheticAcceptance, rates_of_mean
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.spec.tree import DraftBatch
from outrider.shared.spec.trees import root_trees

VOCAB = 64
CHAIN = [(10 + depth, depth) for depth in range(5)]
# Depth 1: nodes 1, 2; depth 2: 3 (under 2), 4 (under 1); depth 3: 5 (under 3).
BUSH = [(1, 0), (2, 0), (3, 2), (4, 1), (5, 3)]


def of_mean(accept_length: float) -> SyntheticAcceptance:
    return SyntheticAcceptance(rates_of_mean(accept_length), VOCAB, "cpu")


def accepted(
    synthetic: SyntheticAcceptance, drafts: DraftBatch, positions: range, seed: int = 7
) -> list[int]:
    """Walk the first tree once per position, with a target that agrees with no draft."""
    bs, width = len(positions), drafts.tokens.shape[1]
    one = (drafts.tokens, drafts.parents, drafts.depths, drafts.num_nodes, drafts.ancestors)
    tokens, parents, depths, num_nodes, ancestors = (
        field[:1].expand(bs, *field.shape[1:]).contiguous() for field in one
    )
    batch = DraftBatch(tokens, parents, depths, num_nodes, ancestors)
    chosen = torch.full((bs, width), VOCAB - 1)
    planted = synthetic(chosen, batch, torch.tensor(positions), torch.full((bs,), seed))
    walked = verify_tree(tokens, parents, num_nodes, planted)
    for row in range(bs):
        count = int(walked.num_accepted[row])
        path = walked.path[row, : count + 1].tolist()
        assert walked.emitted[row, :count].tolist() == [int(tokens[row, node]) for node in path[1:]]
        assert int(walked.emitted[row, count]) == VOCAB - 1, "the bonus token must be the model's choice"
    return [int(count) for count in walked.num_accepted]


def test_a_mean_is_met_by_its_neighbours() -> None:
    synthetic = of_mean(2.4)
    counts = accepted(synthetic, trees_to_batch([(9, CHAIN)]), range(100, 4100))
    assert set(counts) == {1, 2}
    assert 1 + sum(counts) / len(counts) == pytest.approx(2.4, abs=0.03)
    assert synthetic.mean(5) == pytest.approx(2.4)
    assert synthetic.mean(1) == pytest.approx(2.0)


def test_rates_hold_per_position() -> None:
    synthetic = SyntheticAcceptance([0.8, 0.5, 0.5], VOCAB, "cpu")
    counts = accepted(synthetic, trees_to_batch([(9, CHAIN)]), range(4000))
    share = [sum(count >= depth for count in counts) / len(counts) for depth in (1, 2, 3, 4)]
    assert share[:3] == pytest.approx([0.8, 0.4, 0.2], abs=0.03)
    assert share[3] == 0
    assert synthetic.mean(3) == pytest.approx(2.4)


def test_a_tree_is_walked_to_its_depth_and_no_deeper() -> None:
    drafts = trees_to_batch([(9, BUSH)])
    assert set(accepted(of_mean(4.0), drafts, range(50))) == {3}
    assert set(accepted(of_mean(9.0), drafts, range(50))) == {3}
    assert set(accepted(of_mean(1.0), drafts, range(50))) == {0}


def test_it_repeats_itself_and_depends_on_seed_and_position() -> None:
    synthetic, drafts = of_mean(2.5), trees_to_batch([(9, CHAIN)])
    first = accepted(synthetic, drafts, range(64))
    assert accepted(synthetic, drafts, range(64)) == first
    assert accepted(synthetic, drafts, range(64), seed=8) != first
    assert len(set(first)) == 2


def test_the_bonus_token_dodges_the_children() -> None:
    # No draft may be accepted, but the model chose 63 after the root, which is one of the root's children.
    # The next candidate, 0, is a child as well.
    drafts = trees_to_batch([(9, [(63, 0), (0, 0)])])
    chosen = torch.full((1, 3), 63)
    planted = of_mean(1.0)(chosen, drafts, torch.tensor([5]), torch.tensor([1]))
    assert planted.tolist() == [[1, 63, 63]]
    assert chosen.tolist() == [[63, 63, 63]], "the argument must not change"


def test_rounds_without_drafts_are_left_alone() -> None:
    drafts = root_trees([3, 4], torch.device("cpu"))
    chosen = torch.tensor([[5], [6]])
    assert of_mean(3.0)(chosen, drafts, torch.tensor([1, 2]), torch.tensor([0, 0])) is chosen


def test_it_says_what_it_is_and_refuses_nonsense() -> None:
    assert of_mean(2.4).describe() == "synthetic, per-position rates 1, 0.4"
    for wrong in ([], [1.5], [-0.1]):
        with pytest.raises(ConfigurationError, match="between 0 and 1"):
            SyntheticAcceptance(wrong, VOCAB, "cpu")
    for length in (0.5, 18.0, float("nan")):
        with pytest.raises(ConfigurationError, match="between 1 and 17"):
            of_mean(length)


def test_a_change_of_rates_keeps_the_tensor() -> None:
    synthetic, drafts = of_mean(1.0), trees_to_batch([(9, CHAIN)])
    address = synthetic._thresholds.data_ptr()
    synthetic.set_rates(rates_of_mean(3.0))
    assert set(accepted(synthetic, drafts, range(20))) == {2}
    synthetic.set_rates([1.0])
    assert set(accepted(synthetic, drafts, range(20))) == {1}
    assert synthetic._thresholds.data_ptr() == address


def test_packed_trees_accept_as_many_drafts_as_padded_trees() -> None:
    synthetic = of_mean(2.4)
    drafts = trees_to_batch([(9, BUSH), (8, []), (7, CHAIN)])
    counts = drafts.num_nodes.tolist()
    chosen = torch.full(drafts.tokens.shape, VOCAB - 1)
    positions, seeds = torch.tensor([40, 41, 42]), torch.tensor([5, 6, 7])
    want = synthetic(chosen, drafts, positions, seeds)
    real = torch.arange(chosen.shape[1]) < drafts.num_nodes[:, None]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    trees = PackedTrees(
        tokens=drafts.tokens[real],
        parents=drafts.parents[real],
        depths=drafts.depths[real],
        ancestors=drafts.ancestors[real],
        logprobs=torch.zeros(sum(counts)),
        num_nodes=drafts.num_nodes,
    )
    of_rows = (tensor.repeat_interleave(drafts.num_nodes) for tensor in (positions, seeds))
    planted = synthetic.packed(chosen[real], trees, starts, *of_rows)
    assert torch.equal(planted, want[real])
    assert int(planted[counts[0]]) == VOCAB - 1
    assert not torch.equal(planted, chosen[real])
