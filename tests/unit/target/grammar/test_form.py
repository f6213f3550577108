"""OutputForm: the free part up to a marker, the optional opening, and paths that are followed and left."""

from __future__ import annotations

import numpy as np
import pytest
from support.grammars.toy_grammar import ToyGrammar

from outrider.services.target.grammar.form import OutputForm
from outrider.services.target.grammar.matcher import token_mask_words
from outrider.shared.base.constraint import Constraint, ConstraintKind

VOCAB, ENDS = 70, (5, 9)
GRAMMAR = ToyGrammar(VOCAB, ENDS, 3)
START = GRAMMAR.allowed(0)


def form_of(marker: str = "", opening: str = "", prompt: tuple[int, ...] = ()) -> OutputForm:
    return OutputForm(GRAMMAR, Constraint(ConstraintKind.GRAMMAR, "x", marker, opening), prompt)


def allowed(form: OutputForm) -> set[int]:
    mask = np.zeros(token_mask_words(VOCAB), dtype=np.int32)
    form.fill(mask)
    return {
        token
        for token in range(token_mask_words(VOCAB) * 32)
        if mask.view(np.uint32)[token // 32] >> token % 32 & 1
    }


def test_the_form_begins_at_once_without_a_marker() -> None:
    assert allowed(form_of()) == START


def test_everything_but_the_end_is_free_before_the_marker() -> None:
    form = form_of("<3><4>")
    assert allowed(form) == set(range(VOCAB)) - set(ENDS)
    assert form.forced() == []
    form.settle([1, 3])
    form.settle([1, 3, 3])
    assert allowed(form) == set(range(VOCAB)) - set(ENDS)
    form.settle([1, 3, 3, 4])
    assert allowed(form) == START


def test_the_opening_may_replace_the_start_of_the_form() -> None:
    other = next(token for token in range(10, VOCAB) if token not in START)
    form = form_of("<4>", f"<{other}>")
    assert allowed(form) == START | {other}
    assert form.accept(other)
    assert allowed(form) == set(range(VOCAB)) - set(ENDS)
    assert form.accept(4)
    assert allowed(form) == START
    form.rollback()
    form.rollback()
    assert allowed(form) == START | {other}
    first = min(START)
    form.settle([first])
    assert allowed(form) == GRAMMAR.allowed(GRAMMAR.after(0, first))


def test_a_prompt_that_ends_with_the_opening_begins_the_free_part() -> None:
    assert allowed(form_of("<4>", "<20>", (1, 20))) == set(range(VOCAB)) - set(ENDS)
    assert allowed(form_of("<4>", "<20>", (20, 1))) == START | {20}


@pytest.mark.parametrize("seed", range(5))
def test_leaving_a_path_restores_every_state(seed: int) -> None:
    rng = np.random.default_rng(seed)
    form = form_of("<7>") if seed % 2 else form_of()
    before = [allowed(form)]
    for _ in range(12):
        token = int(rng.choice(sorted(before[-1])))
        assert form.accept(token)
        if token in ENDS:
            form.rollback()
            break
        before.append(allowed(form))
    while len(before) > 1:
        assert allowed(form) == before.pop()
        form.rollback()
    assert allowed(form) == before[0]


def test_an_output_that_the_form_forbids_allows_nothing_more() -> None:
    form = form_of()
    form.settle([next(token for token in range(VOCAB) if token not in START)])
    assert form.dead
    assert allowed(form) == set()
    assert form.forced() == []
