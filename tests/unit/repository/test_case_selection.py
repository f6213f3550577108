"""`every_pair` selects few cases of three parameters, and any two values occur together."""

from __future__ import annotations

from itertools import combinations

import pytest
from support.suite.cases import every_pair


def test_any_two_values_occur_together() -> None:
    parameters = [["a", "b", "c", "d"], [1, 2, 3], [True, False]]
    cases = every_pair(*parameters)
    assert len(cases) == 4 * 3
    for one, two in combinations(range(3), 2):
        assert {(case[one], case[two]) for case in cases} == {
            (first, second) for first in parameters[one] for second in parameters[two]
        }


def test_tuples_are_joined() -> None:
    assert every_pair([(1, 2), (3, 4)], ["a"], [("b", "c")]) == [(1, 2, "a", "b", "c"), (3, 4, "a", "b", "c")]


def test_too_many_values_of_the_third_parameter_are_refused() -> None:
    with pytest.raises(ValueError, match="more values"):
        every_pair([1, 2, 3], [1, 2], [1, 2, 3])
