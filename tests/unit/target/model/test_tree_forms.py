"""Masks of fitted trees."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from support.grammars.toy_grammar import ToyGrammar, drawn_tree

from outrider.services.target.grammar.fill import fill_all
from outrider.services.target.grammar.form import OutputForm
from outrider.services.target.grammar.matcher import Mask, token_mask_words
from outrider.services.target.model.tree_fit import fitted
from outrider.services.target.model.tree_forms import forms_at
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.spec.trees import HostTree

VOCAB, ENDS = 48, (5, 9)
ANY = Constraint(ConstraintKind.GRAMMAR, "x")


def fill_masks(form: OutputForm, tree: HostTree, masks: Mask, nodes: Sequence[int]) -> None:
    fill_all([(one, masks[node]) for one, node in forms_at(form, tree, nodes)])


@pytest.mark.parametrize("seed", range(5))
def test_every_node_gets_the_tokens_that_may_follow_it(seed: int) -> None:
    grammar = ToyGrammar(VOCAB, ENDS, seed)
    form = OutputForm(grammar, ANY)
    tree = fitted(form, drawn_tree(random.Random(seed), grammar, 16), 17, 8)
    masks = np.full((len(tree.tokens), token_mask_words(VOCAB)), -1, dtype=np.int32)
    fill_masks(form, tree, masks, range(len(tree.tokens)))
    states = [0]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        states.append(grammar.after(states[parent], token))
    bits = (masks.view(np.uint32)[:, :, None] >> np.arange(32) & 1).reshape(len(masks), -1)
    assert [set(np.flatnonzero(row).tolist()) for row in bits] == [grammar.allowed(state) for state in states]


@pytest.mark.parametrize("seed", range(5))
def test_masks_of_a_tree_that_was_not_fitted(seed: int) -> None:
    """Nodes that cannot be reached, and nodes after which nothing is kept, are left as they are."""
    grammar = ToyGrammar(VOCAB, ENDS, seed)
    form = OutputForm(grammar, ANY)
    tree = drawn_tree(random.Random(seed), grammar, 16)
    tree.add(ENDS[0], 0, -1.0)
    masks = np.full((len(tree.tokens), token_mask_words(VOCAB)), -1, dtype=np.int32)
    fill_masks(form, tree, masks, range(len(tree.tokens)))
    paths: list[list[int]] = [[]]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append([*paths[parent], token])
    for path, mask in zip(paths, masks, strict=True):
        if grammar.accepts(path) and not set(path) & set(ENDS):
            state = 0
            for token in path:
                state = grammar.after(state, token)
            bits = np.flatnonzero(mask.view(np.uint32)[:, None] >> np.arange(32) & 1)
            assert set(bits.tolist()) == grammar.allowed(state)
        else:
            assert (mask == -1).all()
    assert form.accept(sorted(grammar.allowed(0))[0]), "the form is where it was"


@pytest.mark.parametrize("seed", range(5))
def test_parts_of_a_tree_get_the_masks_of_the_whole(seed: int) -> None:
    grammar = ToyGrammar(VOCAB, ENDS, seed)
    form = OutputForm(grammar, ANY)
    tree = fitted(form, drawn_tree(random.Random(seed), grammar, 16), 17, 8)
    nodes = range(len(tree.tokens))
    whole, parts = (np.full((len(nodes), token_mask_words(VOCAB)), -1, dtype=np.int32) for _ in range(2))
    fill_masks(form, tree, whole, nodes)
    for first in range(3):
        wanted, before = nodes[first::3], parts.copy()
        fill_masks(form, tree, parts, wanted)
        assert (np.delete(parts, wanted, axis=0) == np.delete(before, wanted, axis=0)).all()
    assert (parts == whole).all()
