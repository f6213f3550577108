"""The tokens of a model, as both grammar libraries need them."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

import llguidance

from outrider.services.target.grammar.matcher import Grammar

LETTERS = "qJx"
"""Letters that hardly any value of an enum begins with, so that they are probably free text."""


class Vocabulary:
    """The tokens of a model, for the grammar libraries.

    Args:
        file: Path of the model's ``tokenizer.json``.
        vocab_size: Number of logits of the model, which may exceed the number of tokens.
        ends: The tokens that end an output, at least one.

    Attributes:
        tokenizer: The tokenizer in llguidance's form.
        special: Maps the texts of added tokens to their ids.

    Raises:
        ValueError: The file cannot be read.
    """

    def __init__(self, file: Path, vocab_size: int, ends: tuple[int, ...]) -> None:
        text = file.read_text(encoding="utf-8")
        self.tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(ends))
        self.ends = ends
        self.vocab_size = vocab_size
        self.special: dict[str, int] = {
            one["content"]: one["id"] for one in json.loads(text).get("added_tokens") or []
        }

    @cached_property
    def letters(self) -> tuple[int, ...]:
        """The tokens of `LETTERS`, without letters that need several tokens."""
        found = [self.tokenizer.tokenize_str(letter) for letter in LETTERS]
        return tuple(tokens[0] for tokens in found if len(tokens) == 1)

    @cached_property
    def texts(self) -> list[bytes]:
        """The bytes of each token. Empty for special tokens, and for ids without a token."""
        tokenizer = self.tokenizer
        return [
            b""
            if token in self.ends or tokenizer.is_special_token(token)
            else tokenizer.decode_bytes([token])
            for token in range(self.vocab_size)
        ]


class VocabularyGrammar(Grammar):
    """The part of a compiled grammar that depends on the vocabulary only."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self._vocabulary.vocab_size

    def text_of(self, token: int) -> bytes:
        """Return the bytes of a token, including those of special tokens."""
        return self._vocabulary.tokenizer.decode_bytes([token])

    def ends(self) -> tuple[int, ...]:
        """Return the tokens that end an output."""
        return self._vocabulary.ends

    def token_of(self, text: str) -> int | None:
        """Return the added token with exactly this text, or None."""
        return self._vocabulary.special.get(text)

    def letters(self) -> tuple[int, ...]:
        """Return the tokens of unrelated letters."""
        return self._vocabulary.letters
