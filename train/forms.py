"""Makes the target's answers follow random JSON schemas, so that a head also learns from such answers.

At each position of such an answer, the target chooses among the tokens that the schema allows, as in the
services. The head learns to predict these choices.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Self

import llguidance
import numpy as np
import numpy.typing as npt
import torch
from llguidance.numpy import fill_next_token_bitmask_par
from torch import Tensor

from outrider.shared.base.constraint import JSON_STYLE
from outrider.train.corpus.schemas import Schema, random_schema
from outrider.train.tokenizer import END_ID

WORD_BITS = 32
FORBIDDEN = -1e4
"""Logit of a forbidden token. It is finite, because all tokens of the draft vocabulary may be forbidden."""


class TokenSets:
    """The different sets of allowed tokens that occur in a corpus, with a number for each.

    Set 0 contains all tokens.

    Args:
        vocab_size: Number of logits of the target.
        device: Device of `table`.

    Attributes:
        table: ``[sets, words] int32``, one bit per token.
    """

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.words = -(-vocab_size // WORD_BITS)
        every = np.full(self.words, -1, dtype=np.int32)
        self._numbers = {every.tobytes(): 0}
        self.table = torch.from_numpy(every)[None].to(device)

    def numbers_of(self, masks: npt.NDArray[np.int32]) -> list[int]:
        """Return the numbers of sets ``[n, words] int32``. New sets are added to the table."""
        fresh: list[npt.NDArray[np.int32]] = []
        numbers = []
        for mask in masks:
            key = mask.tobytes()
            number = self._numbers.setdefault(key, len(self._numbers))
            if number == len(self.table) + len(fresh):
                fresh.append(mask)
            numbers.append(number)
        if fresh:
            self.table = torch.cat((self.table, torch.from_numpy(np.stack(fresh)).to(self.table.device)))
        return numbers


class Forms:
    """Schemas, compiled for one tokenizer.

    Args:
        matchers: A matcher of each schema, at the beginning of an answer.
    """

    def __init__(self, matchers: Sequence[llguidance.LLMatcher]) -> None:
        self._matchers = matchers

    @classmethod
    def of(cls, tokenizer: Path, vocab_size: int, schemas: Iterable[Schema]) -> Self:
        """Compile schemas.

        Args:
            tokenizer: Path of tokenizer.json.
            vocab_size: Number of logits of the target.
            schemas: The schemas.
        """
        text = tokenizer.read_text(encoding="utf-8")
        known = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=[END_ID])
        matchers = []
        for schema in schemas:
            source = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)  # type: ignore[arg-type]
            matchers.append(llguidance.LLMatcher(known, source, log_level=0))
            if matchers[-1].is_error():
                raise ValueError(f"{schema}: {matchers[-1].get_error()}")
        return cls(matchers)

    @classmethod
    def random(cls, tokenizer: Path, vocab_size: int, count: int, seed: int) -> Self:
        """Compile `count` random schemas; see `of`."""
        rng = Random(seed)
        return cls.of(tokenizer, vocab_size, (random_schema(rng) for _ in range(count)))

    def matcher(self, index: int) -> llguidance.LLMatcher:
        """Return a matcher of a schema at the beginning of an answer. Indices wrap around."""
        return self._matchers[index % len(self._matchers)].deep_copy()


class FormedAnswers:
    """Follows the answers of a batch of conversations. Every answer of a conversation follows one schema.

    The first answer begins after the kept tokens of its conversation. A further answer begins wherever the
    model has written the header of the assistant's next turn.

    Args:
        forms: The schemas.
        sets: The sets of tokens, to which new ones are added.
        first: Index of the first conversation's schema. The next conversations have the next schemas.
        cuts: Number of kept tokens of each conversation.
        header: Tokens of the header of the assistant's turns.
    """

    def __init__(
        self, forms: Forms, sets: TokenSets, first: int, cuts: Sequence[int], header: Sequence[int]
    ) -> None:
        self._forms, self.sets, self._first, self._cuts = forms, sets, first, cuts
        self._header = list(header)
        self._matchers: list[llguidance.LLMatcher | None] = [None] * len(cuts)
        self._recent: list[list[int]] = [[] for _ in cuts]
        self._executor = llguidance.LLExecutor()

    def follow(self, position: int, tokens: Sequence[int]) -> list[int]:
        """Follow the token of each conversation at a position.

        Returns:
            For each conversation, the number of the set of tokens that are allowed at the next position.
        """
        taken: list[tuple[llguidance.LLMatcher, int]] = []
        for row, (token, cut) in enumerate(zip(tokens, self._cuts, strict=True)):
            matcher = self._matchers[row]
            if position + 1 == cut:
                self._matchers[row] = self._forms.matcher(self._first + row)
            elif matcher is not None and token == END_ID:
                self._matchers[row], self._recent[row] = None, []
            elif matcher is not None:
                taken.append((matcher, token))
            elif position >= cut:
                self._recent[row] = [*self._recent[row], token][-len(self._header) :]
                if self._recent[row] == self._header:
                    self._matchers[row] = self._forms.matcher(self._first + row)
        if taken:
            self._executor.consume_token_par(taken)
        asked = [matcher for matcher in self._matchers if matcher is not None]
        masks = np.zeros((len(asked), self.sets.words), dtype=np.int32)
        if asked:
            fill_next_token_bitmask_par(self._executor, [(m, i) for i, m in enumerate(asked)], masks)
        numbers = iter(self.sets.numbers_of(masks))
        return [0 if matcher is None else next(numbers) for matcher in self._matchers]


def restricted(logits: Tensor, allowed: Tensor, table: Tensor) -> Tensor:
    """Return logits in fp32 in which forbidden tokens have the logit `FORBIDDEN`.

    Args:
        logits: ``[..., vocab]``.
        allowed: ``[...]`` integers, the number of the set of allowed tokens for each row.
        table: ``[sets, words] int32``, the sets.
    """
    places = torch.arange(WORD_BITS, device=table.device, dtype=torch.int32)
    bits = (table[allowed.long()][..., None] >> places) & 1
    return logits.float().masked_fill(bits.flatten(-2)[..., : logits.shape[-1]] == 0, FORBIDDEN)
