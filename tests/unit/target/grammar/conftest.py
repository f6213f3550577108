"""The embedded tokenizer and its vocabulary."""

from __future__ import annotations

import pytest
from support.grammars.grammar_rig import ENDS, FILE, SIZE
from tokenizers import Tokenizer

from outrider.services.target.grammar.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(FILE, SIZE, ENDS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FILE))
