"""Reads a corpus file for n-gram drafting (``ngram_corpus``), and finds matches by pairs of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import numpy as np

from outrider.services.draft.strategies.ngram.match import SEPARATOR, Match, TokenArray, rank_matches
from outrider.shared.base.errors import ConfigurationError

TOKENIZER_FILE = "tokenizer.json"
MIN_CORPUS_MATCH = 2
"""Minimum number of tokens of a match in the corpus. One common token predicts nothing in another text."""
MAX_CORPUS_ENDS = 1024
PAIR_SHIFT = 32


class Corpus:
    """Texts as token ids, indexed by pairs of adjacent tokens.

    Args:
        texts: Token ids of each document.
    """

    def __init__(self, texts: list[list[int]]) -> None:
        flat = [token for text in texts for token in (*text, SEPARATOR)]
        self.tokens: TokenArray = np.array(flat or [SEPARATOR], dtype=np.int32)
        keys = _pairs(self.tokens)
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    @property
    def max_token(self) -> int:
        """The highest token id."""
        return int(self.tokens.max())

    def find(self, suffix: TokenArray, min_match: int, max_match: int) -> list[Match]:
        """Return occurrences of the last tokens of `suffix`, longest match first."""
        if len(suffix) < MIN_CORPUS_MATCH or max_match < MIN_CORPUS_MATCH:
            return []
        key = _pairs(suffix[-2:])[0]
        first, stop = np.searchsorted(self._keys, key, "left"), np.searchsorted(self._keys, key, "right")
        ends = np.sort(self._order[max(first, stop - MAX_CORPUS_ENDS) : stop]) + 1
        return rank_matches(
            self.tokens, ends, suffix, max(min_match, MIN_CORPUS_MATCH), max_match, repeats=False
        )

    @classmethod
    def read(cls, path: Path, tokenizer_dir: Path | None) -> Corpus:
        """Read a corpus file for n-gram drafting.

        Args:
            path: ``.json`` (one list of documents) or ``.jsonl`` (one document per line). A document is a
                list of token ids, a string, or an object with the key ``text``. In a file with any other
                suffix, each line is one text.
            tokenizer_dir: Folder with the target's ``tokenizer.json``. The tokenizer is needed if documents
                are texts. None if there is no such folder.

        Raises:
            ConfigurationError: The file cannot be read, has another format, or contains texts although there
                is no tokenizer.
        """
        documents = list(_documents(path))
        if any(isinstance(document, str) for document in documents):
            documents = _encode(documents, path, tokenizer_dir)
        return cls([document for document in documents if isinstance(document, list)])


def _pairs(tokens: TokenArray) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    wide = tokens.astype(np.int64)
    pairs: np.ndarray[tuple[int], np.dtype[np.int64]] = (wide[:-1] << PAIR_SHIFT) + wide[1:]
    return pairs


def _documents(path: Path) -> Iterator[list[int] | str]:
    try:
        content = path.read_text(encoding="utf-8")
        lines = [line for line in content.splitlines() if line.strip()]
        if path.suffix == ".json":
            values = json.loads(content)
        elif path.suffix == ".jsonl":
            values = [json.loads(line) for line in lines]
        else:
            values = lines
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigurationError(
            f"ngram_corpus: {path} cannot be read ({error}). Give a readable text, JSON or JSONL file.",
            field="ngram_corpus",
        ) from None
    if not isinstance(values, list):
        raise ConfigurationError(
            f"ngram_corpus: {path} must contain a list of documents.", field="ngram_corpus"
        )
    for number, value in enumerate(values, 1):
        document: object = value.get("text") if isinstance(value, dict) else value
        if isinstance(document, str) or _is_token_ids(document):
            yield document
        else:
            raise ConfigurationError(
                f"ngram_corpus: document {number} of {path} must be a list of token ids, a text, or "
                'an object {"text": …}.',
                field="ngram_corpus",
            )


def _is_token_ids(document: object) -> TypeGuard[list[int]]:
    return isinstance(document, list) and all(
        isinstance(token, int) and 0 <= token < 1 << 31 for token in document
    )


def _encode(
    documents: list[list[int] | str], path: Path, tokenizer_dir: Path | None
) -> list[list[int] | str]:
    file = tokenizer_dir / TOKENIZER_FILE if tokenizer_dir is not None else None
    if file is None or not file.is_file():
        where = (
            f"{tokenizer_dir} has no such file"
            if tokenizer_dir is not None
            else "give the target's folder by --target-weights"
        )
        raise ConfigurationError(
            f"ngram_corpus: {path} contains texts, which need the target's {TOKENIZER_FILE}: {where}.",
            field="ngram_corpus",
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return [
        tokenizer.encode(document, add_special_tokens=False).ids if isinstance(document, str) else document
        for document in documents
    ]
