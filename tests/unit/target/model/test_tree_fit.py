"""Trees that are fitted to a form: no forbidden node, and likely tokens in the free rows."""

from __future__ import annotations

import random

import pytest
from support.grammars.toy_grammar import ToyGrammar, drawn_tree

from outrider.services.target.grammar.form import OutputForm
from outrider.services.target.model.tree_fit import MOST_CHOICES, MOST_SEARCHED, fitted
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.spec.trees import HostTree

VOCAB, ENDS = 48, (5, 9)
ANY = Constraint(ConstraintKind.GRAMMAR, "x")


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
        assert len(grammar.allowed(state)) <= MOST_CHOICES, "only forced tokens and tokens of few are added"


def test_forced_text_fills_the_free_rows_up_to_the_depth() -> None:
    forms = (OutputForm(ToyGrammar(VOCAB, ENDS, seed), ANY) for seed in range(999))
    form, forced = next((form, forced) for form in forms if len(forced := form.forced()) >= 3)
    tree = HostTree.of_root(1)
    assert fitted(form, tree, 9, 9).tokens[1 : 1 + len(forced)] == forced
    assert fitted(form, tree, 3, 9).tokens[1:] == forced[:2]
    assert fitted(form, tree, 9, 1).tokens[1:] == forced[:1]
    tree.add(forced[0], 0, -1.0)
    again = fitted(form, tree, 9, 9).tokens[1 : 1 + len(forced)]
    assert again == forced, "a drafted node is not added again"


def test_short_lists_are_added_where_a_drafted_node_is_forbidden() -> None:
    grammar = next(one for seed in range(999) if len((one := ToyGrammar(VOCAB, (47,), seed)).allowed(0)) == 8)
    choices = grammar.allowed(0)
    tree = HostTree.of_root(1)
    assert len(fitted(OutputForm(grammar, ANY), tree, 20, 1).tokens) == 1, "nothing was forbidden"
    tree.add(next(token for token in range(VOCAB) if token not in choices), 0, -1.0)
    form = OutputForm(grammar, ANY)
    assert set(fitted(form, tree, 20, 1).tokens[1:]) == choices
    assert len(fitted(form, tree, 5, 1).tokens) == 5
    deeper = fitted(form, tree, 40, 3)
    assert paths_of(deeper) > {(token,) for token in choices}
    assert all(grammar.accepts(list(path)) for path in paths_of(deeper))


def test_a_likely_place_is_filled_before_an_unlikely_one() -> None:
    grammar = next(
        one
        for seed in range(999)
        for one in [ToyGrammar(VOCAB, (47,), seed)]
        if len(one.allowed(0)) == 2 and all(len(one.allowed(one.after(0, a))) == 1 for a in one.allowed(0))
    )
    first, second = sorted(grammar.allowed(0))
    for logprobs in ((-0.1, -2.0), (-2.0, -0.1)):
        tree = HostTree.of_root(1)
        tree.add(first, 0, logprobs[0])
        tree.add(second, 0, logprobs[1])
        (added,) = paths_of(fitted(OutputForm(grammar, ANY), tree, 4, 2)) - paths_of(tree)
        assert added[0] == (first if logprobs[0] > logprobs[1] else second)


@pytest.mark.parametrize("seed", range(20))
def test_few_masks_are_computed_and_they_are_those_of_their_nodes(seed: int) -> None:
    grammar = ToyGrammar(VOCAB, ENDS, seed)
    form, known = OutputForm(grammar, ANY), {}
    known[0] = root = form.next_mask()
    tree = fitted(form, drawn_tree(random.Random(seed), grammar, 16), 24, 8, known)
    assert len(known) <= 1 + MOST_SEARCHED
    assert known[0] is root
    for node, mask in known.items():
        path = []
        while node:
            path.append(tree.tokens[node])
            node = tree.parents[node]
        assert all(form.accept(token) for token in reversed(path))
        assert (form.next_mask() == mask).all()
        for _ in path:
            form.rollback()


def test_no_mask_is_computed_where_any_text_may_follow() -> None:
    grammar = ToyGrammar(VOCAB, (47,), 1)
    wide, narrow = (
        next(state for state in range(40) if len(grammar.allowed(state)) == count) for count in (24, 8)
    )
    letters = (min(grammar.allowed(wide) - grammar.allowed(narrow)),)
    grammar = ToyGrammar(VOCAB, (47,), 1, letters=letters)
    for state, masks in ((wide, 0), (narrow, 1)):
        tree, form, known = HostTree.of_root(1), form_in(grammar, state), {}
        tree.add(next(token for token in range(VOCAB) if token not in grammar.allowed(state)), 0, -1.0)
        fitted(form, tree, 2, 1, known)
        assert len(known) == masks


def form_in(grammar: ToyGrammar, state: int) -> OutputForm:
    """Return a form whose next token is that of a state."""
    paths = {0: []}
    while state not in paths:
        paths |= {
            grammar.after(before, token): [*path, token]
            for before, path in list(paths.items())
            for token in grammar.allowed(before)
            if grammar.after(before, token) not in paths
        }
    form = OutputForm(grammar, ANY)
    form.settle(paths[state])
    return form
