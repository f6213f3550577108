"""Trees that are fitted to a form: no forbidden node, forced text in free rows, and masks of all nodes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.toy_grammar import ToyGrammar

from outrider.services.target.grammar.form import OutputForm
from outrider.services.target.grammar.matcher import words_of
from outrider.services.target.model.tree_forms import fill_masks, fitted
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.spec.trees import HostTree

VOCAB, ENDS = 48, (5, 9)
ANY = Constraint(ConstraintKind.GRAMMAR, "x")


def drawn_tree(rng: random.Random, grammar: ToyGrammar, nodes: int) -> HostTree:
    """Draw a tree in which about half of the nodes are allowed."""
    tree, states = HostTree.of_root(1), [0]
    for _ in range(nodes):
        parent = rng.randrange(len(tree.tokens))
        inner = sorted(grammar.allowed(states[parent])) if states[parent] >= 0 else []
        token = rng.choice(inner) if inner and rng.random() < 0.5 else rng.randrange(VOCAB)
        tree.add(token, parent, -rng.random())
        states.append(grammar.after(states[parent], token) if token in inner else -1)
    return tree


def paths_of(tree: HostTree) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths)


@pytest.mark.parametrize("seed", range(20))
def test_exactly_the_allowed_nodes_stay(seed: int) -> None:
    rng = random.Random(seed)
    grammar = ToyGrammar(VOCAB, ENDS, seed)
    tree = drawn_tree(rng, grammar, 20)
    found = fitted(OutputForm(grammar, ANY), tree, len(tree.tokens), 8)
    allowed = {path for path in paths_of(tree) if grammar.accepts(list(path)) and not set(path) & set(ENDS)}
    grafted = paths_of(found) - allowed
    assert allowed <= paths_of(found)
    assert len(found.tokens) <= len(tree.tokens)
    assert all(grammar.accepts(list(path)) and len(path) <= 8 for path in grafted)
    for path in grafted:
        state = 0
        for token in path[:-1]:
            state = grammar.after(state, token)
        assert grammar.allowed(state) == {path[-1]}, "only forced tokens are added"


def test_forced_text_fills_the_free_rows_up_to_the_depth() -> None:
    forms = (OutputForm(ToyGrammar(VOCAB, ENDS, seed), ANY) for seed in range(999))
    form, forced = next((form, forced) for form in forms if len(forced := form.forced()) >= 3)
    tree = HostTree.of_root(1)
    assert fitted(form, tree, 9, 9).tokens[1:] == forced
    assert fitted(form, tree, 3, 9).tokens[1:] == forced[:2]
    assert fitted(form, tree, 9, 1).tokens[1:] == forced[:1]
    tree.add(forced[0], 0, -1.0)
    assert fitted(form, tree, 9, 9).tokens[1:] == forced, "a drafted node is not added again"


@pytest.mark.parametrize("seed", range(5))
def test_every_node_gets_the_tokens_that_may_follow_it(seed: int) -> None:
    grammar = ToyGrammar(VOCAB, ENDS, seed)
    form = OutputForm(grammar, ANY)
    tree = fitted(form, drawn_tree(random.Random(seed), grammar, 16), 17, 8)
    masks = np.full((len(tree.tokens), words_of(VOCAB)), -1, dtype=np.int32)
    fill_masks(form, tree, masks)
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
    masks = np.full((len(tree.tokens), words_of(VOCAB)), -1, dtype=np.int32)
    fill_masks(form, tree, masks)
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
