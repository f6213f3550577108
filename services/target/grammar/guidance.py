"""Grammars of the library llguidance: compiles constraints and follows outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from outrider.services.target.grammar.matcher import Grammar, Mask, Matcher
from outrider.shared.base.constraint import JSON_STYLE, Constraint, ConstraintKind, choices_of
from outrider.shared.base.errors import InvalidRequestError

MAX_ERROR_CHARS = 400
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIMES = {"time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
_DATA = ("const", "default", "enum", "examples")
"""Keywords whose values are no schemas."""
LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000)
"""With these limits, one grammar needs less than about 100 MB, and one token less than about 15 ms."""


class Vocabulary:
    """The tokens of a model, in the form that llguidance needs.

    Args:
        file: The model's ``tokenizer.json``.
        vocab_size: Number of logits, which may exceed the number of tokens.
        ends: The tokens that end an output, at least one.

    Raises:
        ValueError: The file cannot be read.
    """

    def __init__(self, file: Path, vocab_size: int, ends: tuple[int, ...]) -> None:
        text = file.read_text(encoding="utf-8")
        self.tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(ends))
        self.ends = ends
        self.vocab_size = vocab_size
        self.special = {one["content"]: one["id"] for one in json.loads(text).get("added_tokens") or []}


def source_of(constraint: Constraint) -> str:
    """Return a constraint in the library's own format.

    Raises:
        InvalidRequestError: The source is malformed.
    """
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            try:
                schema = without_leap_seconds(json.loads(constraint.source))
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


def without_leap_seconds(schema: Any) -> Any:
    """Return a schema whose times have at most 59 seconds.

    The library allows second 60 in every minute, but a time with second 60 is valid only at midnight UTC.
    """
    if isinstance(schema, list):
        return [without_leap_seconds(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: value if name in _DATA else without_leap_seconds(value) for name, value in schema.items()}
    form = made.get("format")
    if isinstance(form, str) and form in _TIMES and made.get("type") == "string" and "pattern" not in made:
        del made["format"]
        made["pattern"] = _TIMES[form]
    return made


def compile_grammar(constraint: Constraint, vocabulary: Vocabulary) -> GuidanceGrammar:
    """Compile a constraint.

    Raises:
        InvalidRequestError: The constraint is malformed, or uses a feature that the library cannot enforce.
    """
    source = source_of(constraint)
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


class GuidanceGrammar(Grammar):
    """A compiled grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self._vocabulary.vocab_size

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of the output."""
        return GuidanceMatcher(self._matcher.deep_copy(), self._vocabulary.ends)

    def text_of(self, token: int) -> bytes:
        """Return the bytes of a token, including those of special tokens."""
        return self._vocabulary.tokenizer.decode_bytes([token])

    def ends(self) -> tuple[int, ...]:
        """Return the tokens that end an output."""
        return self._vocabulary.ends

    def token_of(self, text: str) -> int | None:
        """Return the added token with exactly this text, or None."""
        return self._vocabulary.special.get(text)


class GuidanceMatcher(Matcher):
    """Follows one output. After the token that ends the output, no token is allowed.

    If a token exceeds `LIMITS`, no further token is allowed, so that only this request fails.
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

    def fill(self, mask: Mask) -> None:
        """Write the allowed next tokens."""
        if self._ended or (self._matcher.is_error()):
            mask.fill(0)
        else:
            mask[:] = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: len(mask)]

    def forced(self) -> list[int]:
        """Return tokens for the text that the grammar forces next."""
        if self._ended or self._matcher.is_error() or self._matcher.is_stopped():
            return []
        return self._matcher.compute_ff_tokens()


def _invalid(message: str, constraint: Constraint) -> InvalidRequestError:
    # The library adds its internal state, and names options of its own.
    text = " ".join(message.split("<state>")[0].split(" Enable ")[0].split())[:MAX_ERROR_CHARS]
    return InvalidRequestError(
        f"{constraint.field} cannot be enforced: {text.rstrip('.')}.", field=constraint.field
    )
