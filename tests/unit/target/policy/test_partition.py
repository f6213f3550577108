"""How entries are divided among shapes, with costs and expectations that the tests set."""

from __future__ import annotations

from outrider.services.target.policy.cost_model import DraftPath, StepCosts
from outrider.services.target.policy.partition import MOST_OFFERED, EntryClass, Others, Partition, Partitions
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

CHAIN, TREE = DraftShape(3, 1, 4), DraftShape(5, 8, 32)
NOBODY = Others({}, 0.0)


def costs(batch_size: int, row_s: float = 2e-6) -> StepCosts:
    made = StepCosts()
    made.observe_verify(batch_size, batch_size, 0.004)
    made.observe_verify(batch_size, 512, 0.004 + row_s * (512 - batch_size))
    made.observe_drafts({CHAIN: 4}, DraftPath.DEVICE, 0.0009)
    made.observe_drafts({TREE: 4}, DraftPath.DEVICE, 0.0016)
    return made


def entries(chain: float, tree: float, count: int = 1) -> EntryClass:
    return EntryClass({CHAIN: chain, TREE: tree}, count)


def best(classes: list[EntryClass], others: Others = NOBODY) -> Partition:
    size = sum(one.count for one in classes) + others.count
    return Partitions(classes, others, costs(size), DraftPath.DEVICE).best((), 1.0)


def test_entries_that_are_alike_get_the_best_shape() -> None:
    assert best([entries(2.5, 2.9, 4)]).counts == {CHAIN: 4}
    assert best([entries(2.5, 5.0, 4)]).counts == {TREE: 4}
    assert best([entries(1.1, 1.1, 4)]).counts == {}


def test_entries_of_one_batch_get_different_shapes_or_none() -> None:
    found = best([entries(1.02, 1.03, 10), entries(3.5, 3.6, 12), entries(2.0, 6.0, 10)])
    assert found.counts == {CHAIN: 12, TREE: 10}
    assert found.shape_for({CHAIN: 1.02, TREE: 1.03}) == NO_DRAFT
    assert found.shape_for({CHAIN: 3.5, TREE: 3.6}) == CHAIN


def test_a_second_shape_must_pay_for_its_own_draft() -> None:
    found = best([entries(3.5, 3.6, 30), entries(2.0, 4.0, 1)])
    assert found.counts == {CHAIN: 31}


def test_one_good_entry_must_pay_for_the_time_of_the_others() -> None:
    good = entries(4.0, 4.0)
    assert best([good]).counts
    assert not best([good], Others({NO_DRAFT: 31}, 31.0)).counts


def test_a_shape_that_others_draft_anyway_is_cheap() -> None:
    found = best([entries(1.6, 1.7)], Others({CHAIN: 31}, 80.0))
    assert found.counts == {CHAIN: 1}


def test_the_shapes_in_use_win_near_ties() -> None:
    of = Partitions([entries(2.5, 2.9, 4)], NOBODY, costs(4), DraftPath.DEVICE)
    chains, trees = of.priced((CHAIN,), of.plain.rate), of.priced((TREE,), of.plain.rate)
    lead = chains.rate / trees.rate
    assert lead > 1
    assert of.best((TREE,), lead * 1.01).shapes == (TREE,)
    assert of.best((TREE,), lead * 0.99).shapes == (CHAIN,)


def test_a_round_has_at_most_twice_the_rows_of_the_largest_measured_round() -> None:
    made = StepCosts()
    made.observe_verify(32, 32, 0.004)
    made.observe_drafts({CHAIN: 4}, DraftPath.DEVICE, 0.0001)
    of = Partitions([entries(3.9, 3.9, 32)], NOBODY, made, DraftPath.DEVICE)
    assert of.best((), 1.0).counts == {CHAIN: 10}, "32 rows and 3 more for each of 10 sequences"
    made.observe_verify(32, 40, 0.0041)
    of = Partitions([entries(3.9, 3.9, 32)], NOBODY, made, DraftPath.DEVICE)
    assert of.best((), 1.0).counts == {CHAIN: 16}


def test_many_different_bounds_do_not_prolong_a_decision() -> None:
    usual = entries(3.5, 3.6, 8)
    odd = [EntryClass({DraftShape(depth, topk, 20): 1.5}, 1) for depth in range(2, 8) for topk in range(2, 8)]
    of = Partitions([*odd, usual], NOBODY, costs(44), DraftPath.DEVICE)
    assert len(of.offered) == MOST_OFFERED
    assert set(of.best((), 1.0).counts) == {CHAIN}
