"""The embedded tokenizer's vocabulary, and checks of allowed tokens and of refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from outrider.services.target.grammar.matcher import Matcher, token_mask_words
from outrider.shared.base.constraint import Constraint
from outrider.shared.base.errors import InvalidRequestError
from support.services.stack import DEMO_TARGET

FILE = DEMO_TARGET / "tokenizer.json"
SIZE, ENDS = 4099, (0, 2)
"""Size of a model's vocabulary, larger than the tokenizer's, and the ids of the tokens that end a text."""


def allows(matcher: Matcher, token: int) -> bool:
    """Return True if a matcher over `SIZE` tokens allows this token next."""
    mask = np.zeros(token_mask_words(SIZE), dtype=np.int32)
    matcher.fill(mask)
    return bool(mask.view(np.uint32)[token // 32] >> token % 32 & 1)


def check_refusal(compile_it: Callable[[Constraint], Any], constraint: Constraint, part: str) -> None:
    """Check that a constraint is refused with an error that names its field and contains a text."""
    with pytest.raises(InvalidRequestError, match=part) as caught:
        compile_it(constraint)
    assert caught.value.field == constraint.field
    assert caught.value.message.startswith(constraint.field)
    assert len(caught.value.message) < 600
