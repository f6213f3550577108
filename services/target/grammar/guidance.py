"""Grammars of the library llguidance: compiles constraints and follows outputs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from outrider.services.target.grammar.formats import FORMATS
from outrider.services.target.grammar.matcher import Mask, Matcher
from outrider.services.target.grammar.vocabulary import Vocabulary, VocabularyGrammar
from outrider.shared.base.constraint import JSON_STYLE, Constraint, ConstraintKind, choices_of
from outrider.shared.base.errors import InvalidRequestError

MAX_ERROR_CHARS = 400
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
_DATA = ("const", "default", "enum", "examples")
"""Keywords whose values are no schemas."""
LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000)
"""With these limits, one grammar needs less than about 100 MB, and one token less than about 15 ms."""


def guidance_source(constraint: Constraint) -> str:
    """Return a constraint in the library's own format.

    Raises:
        InvalidRequestError: The source is malformed.
    """
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            try:
                schema = with_exact_formats(json.loads(constraint.source))
                return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)  # type: ignore[arg-type]
            except (ValueError, RecursionError) as error:
                raise _invalid(str(error), constraint) from None
        case ConstraintKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(constraint.source)
        case ConstraintKind.GRAMMAR:
            try:
                return llguidance.LLMatcher.grammar_from_lark(any_to_lark(constraint.source))
            except Exception as error:
                raise _invalid(str(error), constraint) from None
        case ConstraintKind.CHOICE:
            choices = " | ".join(json.dumps(choice) for choice in choices_of(constraint))
            return llguidance.LLMatcher.grammar_from_lark(f"start: {choices}")


def with_exact_formats(schema: Any) -> Any:
    """Return a schema in which patterns replace the formats that the library does not enforce exactly."""
    if isinstance(schema, list):
        return [with_exact_formats(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: value if name in _DATA else with_exact_formats(value) for name, value in schema.items()}
    form = made.get("format")
    if isinstance(form, str) and form in FORMATS and made.get("type") == "string" and "pattern" not in made:
        del made["format"]
        made["pattern"] = f"^({FORMATS[form]})$"
    return made


def compile_guidance(constraint: Constraint, vocabulary: Vocabulary) -> GuidanceGrammar:
    """Compile a constraint.

    Raises:
        InvalidRequestError: The constraint is malformed, or uses a feature that the library cannot enforce.
    """
    source = guidance_source(constraint)
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        source, vocabulary.tokenizer, limits=LIMITS
    )
    if failed:
        raise _invalid(messages[0], constraint)
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise _invalid(matcher.get_error(), constraint)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise _invalid(matcher.get_error(), constraint)
    return GuidanceGrammar(matcher, vocabulary)


class GuidanceGrammar(VocabularyGrammar):
    """A compiled grammar of llguidance."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._matcher = matcher

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of the output."""
        return GuidanceMatcher(self._matcher.deep_copy(), self.ends())


class GuidanceMatcher(Matcher):
    """Follows one output with llguidance. After the token that ends the output, no token is allowed.

    If the work for one token exceeds llguidance's limits (`LIMITS`), no further token is allowed. The request
    then fails, and other requests go on.
    """

    def __init__(self, matcher: llguidance.LLMatcher, ends: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._ends = ends
        self._ended = 0

    def accept(self, token: int) -> bool:
        """Append a token if the grammar allows it."""
        if self._ended:
            return False
        if token in self._ends:
            if not self._matcher.is_accepting():
                return False
            self._ended = 1
            return True
        return self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        """Remove the last tokens."""
        count, self._ended = count - min(count, self._ended), self._ended - min(count, self._ended)
        if count:
            self._matcher.rollback(count)

    def allows(self, tokens: Seq[int]) -> bool:
        """Return whether the grammar allows these tokens one after another."""
        return self.is_open and self._matcher.validate_tokens(list(tokens)) == len(tokens)

    @property
    def is_open(self) -> bool:
        """True if the output has not ended, and its work has not exceeded the library's limits."""
        return not self._ended and not self._matcher.is_error()

    def fill(self, mask: Mask) -> None:
        """Write the allowed next tokens."""
        if not self.is_open:
            mask.fill(0)
        else:
            mask[:] = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: len(mask)]

    def forced(self) -> list[int]:
        """Return tokens for the text that the grammar forces next."""
        if self._ended or self._matcher.is_error() or self._matcher.is_stopped():
            return []
        return self._matcher.compute_ff_tokens()

    def fork(self) -> GuidanceMatcher:
        """Return an independent matcher in the same state."""
        forked = GuidanceMatcher(self._matcher.deep_copy(), self._ends)
        forked._ended = self._ended
        return forked


def fill_together(work: Seq[tuple[GuidanceMatcher, Mask]]) -> None:
    """Write the allowed next tokens of different matchers.

    The library finds them on several threads, without the interpreter's lock.
    """
    if len(work) < 2:
        for matcher, mask in work:
            matcher.fill(mask)
        return
    found = np.zeros((len(work), len(work[0][1])), dtype=np.int32)
    pairs = [(matcher._matcher, row) for row, (matcher, _) in enumerate(work) if matcher.is_open]
    _executor().unsafe_compute_mask_ptr(pairs, found.ctypes.data, found.strides[0], len(work))
    for row, (matcher, mask) in zip(found, work, strict=True):
        mask[:] = row if matcher.is_open else 0


@cache
def _executor() -> llguidance.LLExecutor:
    # By default, the library would use fewer threads than there are cores.
    return llguidance.LLExecutor(num_threads=max(2, len(os.sched_getaffinity(0))))


def _invalid(message: str, constraint: Constraint) -> InvalidRequestError:
    if (unknown := _UNKNOWN_KEYWORDS.search(message)) is not None:
        names = unknown[1].replace('"', "'")
        whose = "the JSON schema of a tool" if _is_choice(constraint) else "the JSON schema"
        return InvalidRequestError(
            f"{constraint.field} cannot be enforced: {whose} has keywords that are not supported: {names}.",
            field=constraint.field,
        )
    if _is_choice(constraint):
        # The grammar is the gateway's own, so its text would not help the client.
        message = message.partition("\n")[0]
    # The library adds its internal state, and names options of its own.
    text = " ".join(message.split("<state>")[0].split(" Enable ")[0].split())[:MAX_ERROR_CHARS]
    return InvalidRequestError(
        f"{constraint.field} cannot be enforced: {text.rstrip('.')}.", field=constraint.field
    )


def _is_choice(constraint: Constraint) -> bool:
    """Return whether the gateway made the grammar, for a forced tool call."""
    return constraint.field.endswith("tool_choice")
