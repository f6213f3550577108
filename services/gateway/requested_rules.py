"""Penalties, biases and forbidden tokens that a client requests, and the checks of these rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.logit_rules import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_TOP_LOGPROBS,
    NO_LOGPROBS,
    LogitRules,
    LogprobParams,
)

MAX_BAD_WORD_CHARS = 256
_MAX_TOKEN_ID_CHARS = 10

Encode = Callable[[str], tuple[int, ...]]
"""Returns the token ids of a text, without special tokens."""


@dataclass(frozen=True, slots=True)
class RequestedRules:
    """The rules of a request that change the logits, before they are checked. None marks an absent rule.

    Attributes:
        logit_bias: Biases by token id. OpenAI's API writes token ids as text.
        bad_words: Texts that the answer must not contain.
        bad_word_ids: Token ids of additional bad words. Only the gRPC API accepts this field.

    The other attributes have the same meaning as in `LogitRules`.
    """

    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    min_tokens: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    def check(self) -> None:
        """Run all checks that need neither the tokenizer nor the target.

        Raises:
            InvalidRequestError: If a value is invalid. The error names the field.
        """
        self._build(())
        if len(self.bad_words) * 2 > MAX_BAD_WORDS:
            raise InvalidRequestError(
                f"bad_words accepts at most {MAX_BAD_WORDS // 2} texts, not {len(self.bad_words)}.",
                field="bad_words",
            )
        for word in self.bad_words:
            _check_word(word)

    def build(self, encode: Encode | None, vocab_size: int) -> LogitRules:
        """Check the rules, and return them in the format that the target expects.

        Args:
            encode: Function that encodes bad words as token ids. None if the server has no tokenizer.
            vocab_size: Size of the target's vocabulary.

        Raises:
            InvalidRequestError: If a value is invalid. The error names the field.
        """
        if self.bad_words and encode is None:
            raise InvalidRequestError(
                "bad_words requires a tokenizer, and this server runs without one.",
                field="bad_words",
                reason="no_tokenizer",
            )
        words: dict[tuple[int, ...], None] = dict.fromkeys(self.bad_word_ids)
        for word in self.bad_words if encode is not None else ():
            # Inside a text, a space usually precedes a word, and this space belongs to the word's first
            # token.
            for text in (word, word if word[0].isspace() else f" {word}"):
                if ids := encode(text):  # type: ignore[misc]
                    words[ids] = None
        rules = self._build(tuple(words))
        rules.check_vocabulary(vocab_size)
        return rules

    def _build(self, words: tuple[tuple[int, ...], ...]) -> LogitRules:
        if self.logit_bias is not None and len(self.logit_bias) > MAX_BIASES:
            raise InvalidRequestError(
                f"logit_bias accepts at most {MAX_BIASES} tokens, not {len(self.logit_bias)}.",
                field="logit_bias",
            )
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) > MAX_ALLOWED_TOKENS:
            raise InvalidRequestError(
                f"allowed_token_ids accepts at most {MAX_ALLOWED_TOKENS} tokens, not "
                f"{len(self.allowed_token_ids)}.",
                field="allowed_token_ids",
            )
        biases = sorted((_token_id(token), float(bias)) for token, bias in (self.logit_bias or {}).items())
        penalty = self.repetition_penalty
        return LogitRules(
            presence_penalty=float(self.presence_penalty or 0.0),
            frequency_penalty=float(self.frequency_penalty or 0.0),
            repetition_penalty=1.0 if penalty is None else float(penalty),
            logit_bias=tuple((token, bias) for token, bias in biases if bias),
            min_tokens=self.min_tokens or 0,
            allowed_token_ids=None
            if self.allowed_token_ids is None
            else tuple(dict.fromkeys(self.allowed_token_ids)),
            bad_words=words,
        )


NO_REQUESTED_RULES = RequestedRules()


@dataclass(frozen=True, slots=True)
class RequestedLogprobs:
    """The logprobs that a client wants, and the format in which the reply contains them.

    Attributes:
        wanted: The logprobs that the target computes. `check_top` checks the numbers of alternatives.
        ids_as_text: Whether tokens are written as ``token_id:N`` instead of their text.
        echoed: Number of alternatives for each token of the echoed prompt. None if no prompt is echoed.
        prompt_list: Number of alternatives for each token in vLLM's `prompt_logprobs`. None if the client
            does not want this list.
    """

    wanted: LogprobParams = NO_LOGPROBS
    ids_as_text: bool = False
    echoed: int | None = None
    prompt_list: int | None = None


NO_REQUESTED_LOGPROBS = RequestedLogprobs()


def check_top(value: int | None, field: str) -> int | None:
    """Check and return the number of alternatives per token for which a client wants logprobs.

    Raises:
        InvalidRequestError: If the number is out of range. The error names `field`.
    """
    if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
        raise InvalidRequestError(
            f"{field} must be between 0 and {MAX_TOP_LOGPROBS}, not {value}.", field=field
        )
    return value


def _check_word(word: str) -> None:
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "bad_words contains a lone surrogate, which is not valid text.", field="bad_words"
        ) from None
    if not 1 <= len(word) <= MAX_BAD_WORD_CHARS or not word.strip():
        raise InvalidRequestError(
            f"Each text of bad_words must have 1 to {MAX_BAD_WORD_CHARS} characters, not only spaces.",
            field="bad_words",
        )


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_TOKEN_ID_CHARS):
        raise InvalidRequestError(
            f'The keys of logit_bias must be token ids, such as "42", not {text[:32]!r}.', field="logit_bias"
        )
    return int(text)
