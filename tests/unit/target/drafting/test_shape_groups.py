"""The groups of a round, and their sizes."""

from __future__ import annotations

import torch
from support.engine.slot_sequences import seated_sequence

from outrider.services.target.drafting.shape_groups import shape_groups
from outrider.services.target.model.packed_batch import Entry
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.resident import GroupSize
from outrider.shared.spec.tree import DraftShape

TREE, CHAIN = DraftShape(3, 2, 7), DraftShape(1, 1, 2)


def test_sequences_with_one_shape_form_a_group_in_the_order_of_the_round() -> None:
    pool = KVPool(256, 4, 1, 1, 2, torch.float32, "cpu")
    sequences = [seated_sequence(pool, index, index) for index in range(4)]
    sequences[3].fresh_columns = 6  # it has drafted with a deeper shape
    shapes = [TREE, CHAIN, TREE, CHAIN]
    entries = [Entry(one, one.residence, shape) for one, shape in zip(sequences, shapes, strict=True)]
    drafting = [*entries, Entry(seated_sequence(pool, 4, 4), 1, TREE)]
    chains, trees = shape_groups(drafting, [1, 2, 4])
    assert (trees.shape, trees.session_ids, trees.size) == (TREE, [0, 2, 4], GroupSize(4, 4, 7))
    assert (chains.shape, chains.session_ids, chains.size) == (CHAIN, [1, 3], GroupSize(2, 6, 2))
    assert shape_groups(drafting[1:], [1, 2, 4])[0].shape == CHAIN, "the order depends on the shapes alone"
    assert chains.committed_upper == [one.committed_upper for one in (sequences[1], sequences[3])]
