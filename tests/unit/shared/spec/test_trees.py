"""Draft trees as tensors: validating a remote draft's trees, padding batches, copying into larger batches."""

from __future__ import annotations

import pytest
import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.trees import check_tree
from outrider.shared.spec.tree import DraftShape, mask_words
from outrider.shared.spec.trees import HostTree, pad_trees, scatter_trees


@pytest.mark.parametrize("nodes", [2, 9, 32, 33, 70])
def test_padded_trees_hold_every_field(nodes: int) -> None:
    parents = [(index - 1) // 2 for index in range(1, nodes)]
    logprobs = [-index / 8 for index in range(1, nodes)]
    sent = draft_pb2.Tree(token_ids=range(100, 99 + nodes), parents=parents, logprobs=logprobs)
    tree = check_tree(sent, 7, DraftShape(16, 2, nodes), 1000)
    batch = pad_trees([HostTree.of_root(3), tree], torch.device("cpu"), 2.5)
    words = mask_words(nodes)
    assert batch.num_nodes.tolist() == [1, nodes]
    assert batch.tokens.tolist() == [[3] + [0] * (nodes - 1), [7, *range(100, 99 + nodes)]]
    assert batch.parents.tolist() == [[-1] * nodes, [-1, *parents]]
    assert batch.depths[1].tolist() == [(index + 1).bit_length() - 1 for index in range(nodes)]
    assert batch.logprobs is not None
    assert batch.logprobs.tolist() == [[0.0] * nodes, [0.0, *logprobs]]
    assert batch.ancestors.shape == (2, nodes, words)
    for index in range(nodes):
        ancestors, node = {index}, index
        while node:
            node = (node - 1) // 2
            ancestors.add(node)
        bits = {
            32 * word + bit
            for word in range(words)
            for bit in range(32)
            if int(batch.ancestors[1, index, word]) >> bit & 1
        }
        assert bits == ancestors
    assert batch.ancestors[0, 1:].abs().sum() == 0
    assert batch.draft_ms == 2.5


def test_scattered_trees_take_their_rows_and_others_keep_their_root() -> None:
    wide, narrow = HostTree.of_root(1), HostTree.of_root(2)
    wide.add(11, 0, -0.5)
    wide.add(12, 1, -0.75)
    narrow.add(21, 0, -1.0)
    cpu = torch.device("cpu")
    batch = scatter_trees(
        [(pad_trees([wide], cpu, 1.5), [2]), (pad_trees([narrow], cpu, 0.5), [0])], [2, 7, 1]
    )
    assert batch.tokens.tolist() == [[2, 21, 0], [7, 0, 0], [1, 11, 12]]
    assert batch.parents.tolist() == [[-1, 0, -1], [-1, -1, -1], [-1, 0, 1]]
    assert batch.depths.tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 2]]
    assert batch.num_nodes.tolist() == [2, 1, 3]
    assert batch.ancestors[:, :, 0].tolist() == [[1, 3, 0], [1, 0, 0], [1, 3, 7]]
    assert batch.logprobs is not None
    assert batch.logprobs.tolist() == [[0, -1.0, 0], [0, 0, 0], [0, -0.5, -0.75]]
    assert batch.draft_ms == 1.5


def test_a_part_that_takes_all_rows_in_order_is_not_copied() -> None:
    part = pad_trees([HostTree.of_root(1), HostTree.of_root(2)], torch.device("cpu"))
    assert scatter_trees([(part, [0, 1])], [1, 2]) is part
    assert scatter_trees([(part, [1, 0])], [2, 1]).tokens.tolist() == [[2], [1]]
