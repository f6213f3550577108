"""Trees of a remote draft as one batch: every field of every node, padded rows, masks of more than one word."""

from __future__ import annotations

import pytest
import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.trees import check_tree, pad_trees, root_tree
from outrider.shared.spec.tree import DraftShape, mask_words


@pytest.mark.parametrize("nodes", [2, 9, 32, 33, 70])
def test_padded_trees_hold_every_field(nodes: int) -> None:
    parents = [(index - 1) // 2 for index in range(1, nodes)]
    logprobs = [-index / 8 for index in range(1, nodes)]
    sent = draft_pb2.Tree(token_ids=range(100, 99 + nodes), parents=parents, logprobs=logprobs)
    tree = check_tree(sent, 7, DraftShape(16, 2, nodes), 1000)
    batch = pad_trees([root_tree(3), tree], torch.device("cpu"), 2.5)
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
