"""The embedded tokenizer's vocabulary, and a check of refusals, for tests of grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outrider.shared.base.constraint import Constraint
from outrider.shared.base.errors import InvalidRequestError
from support.services.stack import DEMO_TARGET

FILE = DEMO_TARGET / "tokenizer.json"
SIZE, ENDS = 4099, (0, 2)
"""Size of a model's vocabulary, larger than the tokenizer's, and the ids of the tokens that end a text."""


def check_refusal(compile_it: Callable[[Constraint], Any], constraint: Constraint, part: str) -> None:
    """Check that a constraint is refused with an error that names its field and contains a text."""
    with pytest.raises(InvalidRequestError, match=part) as caught:
        compile_it(constraint)
    assert caught.value.field == constraint.field
    assert caught.value.message.startswith(constraint.field)
    assert len(caught.value.message) < 600
