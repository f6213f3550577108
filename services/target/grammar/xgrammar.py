"""Grammars of the library xgrammar: compiles constraints and follows outputs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import takewhile
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xgrammar

from outrider.services.target.grammar import ebnf
from outrider.services.target.grammar.matcher import Mask, Matcher, token_mask_words
from outrider.services.target.grammar.vocabulary import Vocabulary, VocabularyGrammar
from outrider.shared.base.constraint import Constraint, ConstraintKind, choices_of
from outrider.shared.base.errors import InvalidRequestError

MAX_ERROR_CHARS = 400
MASK_CPU_S = 0.1
"""Largest time for the mask of one token. Usual masks take less than 0.01 s, even with a large vocabulary."""
_compilers: WeakKeyDictionary[Vocabulary, xgrammar.GrammarCompiler] = WeakKeyDictionary()


def compile_xgrammar(constraint: Constraint, vocabulary: Vocabulary) -> XGrammar:
    """Compile a constraint.

    Raises:
        InvalidRequestError: The constraint is malformed, or xgrammar cannot enforce it exactly.
    """
    compiler = _compiler_of(vocabulary)
    try:
        match constraint.kind:
            case ConstraintKind.JSON_SCHEMA:
                compiled = compiler.compile_grammar(ebnf.of_schema(constraint.source))
            case ConstraintKind.REGEX:
                compiled = compiler.compile_grammar(ebnf.of_regex(constraint.source))
            case ConstraintKind.GRAMMAR:
                compiled = compiler.compile_grammar(constraint.source)
            case ConstraintKind.CHOICE:
                compiled = compiler.compile_grammar(ebnf.of_choices(choices_of(constraint)))
    except (ebnf.UnsupportedError, RuntimeError) as error:
        raise _invalid(str(error), constraint) from None
    grammar = XGrammar(compiled, vocabulary)
    mask = np.zeros(token_mask_words(vocabulary.vocab_size), dtype=np.int32)
    grammar.matcher().fill(mask)
    if not mask.any():
        raise _invalid("it allows no text", constraint)
    return grammar


class XGrammar(VocabularyGrammar):
    """A compiled grammar of xgrammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._compiled = compiled

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of the output."""
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._vocabulary)


class XGrammarMatcher(Matcher):
    """Follows one output with xgrammar. After the token that ends the output, no token is allowed.

    If the computation of a mask of allowed tokens takes longer than `MASK_CPU_S`, no further token is
    allowed. The request then fails, and other requests go on.
    """

    def __init__(self, matcher: xgrammar.GrammarMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._slow = False

    def accept(self, token: int) -> bool:
        """Append a token if the grammar allows it."""
        if self._matcher.is_terminated() or not self._known(token):
            return False
        return self._matcher.accept_token(token)

    def rollback(self, count: int) -> None:
        """Remove the last tokens."""
        if count:
            self._matcher.rollback(count)

    def allows(self, tokens: Sequence[int]) -> bool:
        """Return whether the grammar allows these tokens one after another."""
        accepted = sum(1 for _ in takewhile(self.accept, tokens))
        self.rollback(accepted)
        return accepted == len(tokens)

    def fill(self, mask: Mask) -> None:
        """Write the allowed next tokens."""
        mask.fill(0)
        if self._slow or self._matcher.is_terminated():
            return
        began = time.thread_time()
        self._matcher.fill_next_token_bitmask(torch.from_numpy(mask).view(1, -1))
        if time.thread_time() - began > MASK_CPU_S:
            self._slow = True
            mask.fill(0)

    def forced(self) -> list[int]:
        """Return tokens for the text that the grammar forces next."""
        if self._matcher.is_terminated():
            return []
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # the last token ended inside a character
            return []
        return self._vocabulary.tokenizer.tokenize_str(text)

    def fork(self) -> XGrammarMatcher:
        """Return an independent matcher in the same state."""
        forked = XGrammarMatcher(self._matcher.fork(), self._vocabulary)
        forked._slow = self._slow
        return forked

    def _known(self, token: int) -> bool:
        """Return whether the token has a text or ends the output. The library logs all other tokens."""
        vocabulary = self._vocabulary
        return token in vocabulary.ends or (
            0 <= token < vocabulary.vocab_size and bool(vocabulary.texts[token])
        )


def _compiler_of(vocabulary: Vocabulary) -> xgrammar.GrammarCompiler:
    """Return the compiler of a vocabulary. A vocabulary has one compiler, because it takes time to make."""
    if vocabulary not in _compilers:
        info = xgrammar.TokenizerInfo(
            vocabulary.texts,
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.vocab_size,
            stop_token_ids=list(vocabulary.ends),
        )
        _compilers[vocabulary] = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return _compilers[vocabulary]


def _invalid(message: str, constraint: Constraint) -> InvalidRequestError:
    # The library adds the time, and the line of its source.
    text = " ".join(message.partition("] ")[2].partition(": ")[2].split() or message.split())
    return InvalidRequestError(
        f"{constraint.field} cannot be enforced: {text[:MAX_ERROR_CHARS].rstrip('.')}.",
        field=constraint.field,
    )
