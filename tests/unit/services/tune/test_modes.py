"""The limits of mode `auto`, from predicted speeds, and the noise of measured speeds."""

from __future__ import annotations

from outrider.services.tune.candidates import AutoLimits
from outrider.services.tune.modes import choose_limits, faster, shapes_within
from outrider.shared.spec.tree import DraftShape

ONE, THREE, FIVE = DraftShape(1, 1, 2), DraftShape(3, 1, 4), DraftShape(5, 1, 6)
TREE, WIDE = DraftShape(5, 4, 16), DraftShape(5, 8, 64)


def test_limits_allow_the_best_shape_of_every_batch_size() -> None:
    predicted = {
        1: {ONE: 1.2, THREE: 1.8, FIVE: 2.0, TREE: 2.4, WIDE: 1.9},
        8: {ONE: 1.1, THREE: 1.3, FIVE: 1.1, TREE: 0.8, WIDE: 0.4},
    }
    assert choose_limits(predicted) == AutoLimits(5, 4, 16)
    assert THREE in shapes_within(TREE, 8)


def test_shapes_that_never_pay_are_outside_the_limits() -> None:
    predicted = {
        1: {ONE: 1.5, THREE: 1.51, FIVE: 0.9, TREE: 0.8, WIDE: 0.5},
        8: {ONE: 1.1, THREE: 1.1, FIVE: 0.7, TREE: 0.6, WIDE: 0.2},
    }
    assert choose_limits(predicted) == AutoLimits(1, 1, 2), "a difference of 0.7 % is worth no further shape"
    assert choose_limits({1: predicted[1] | {THREE: 1.7}}) == AutoLimits(3, 1, 4)


def test_if_no_shape_pays_the_limits_are_the_smallest_ones() -> None:
    assert choose_limits({4: {ONE: 0.9, THREE: 0.8, TREE: 0.5}}) == AutoLimits(1, 1, 2)


def test_the_noise_is_exceeded_only_in_the_same_direction_in_every_pass() -> None:
    assert faster([1.03, 1.05, 1.04])
    assert not faster([1.03, 1.05, 0.99])
    assert not faster([1.01, 1.015, 1.01])
    assert not faster([])
    assert not faster([1.5]), "one pass may be disturbed"
