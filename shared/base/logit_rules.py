"""Options that change the logits before a token is sampled, and options for the logprobs of a request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.shared.base.errors import InvalidRequestError

MAX_BIASES = 1024
MAX_ALLOWED_TOKENS = 65536
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_BAD_WORDS_TOKENS = 2048
MAX_TOP_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_REQUESTED_IDS = 256


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Rules that change the logits of the next token. The defaults change nothing.

    The rules are applied in this order: bias, repetition penalty, frequency and presence penalty, forbidden
    tokens. "Output" means the tokens that were generated before the next token. In a draft tree, these
    include the tokens on the path from the root to the parent of the next token.

    Attributes:
        presence_penalty: Number that is subtracted from the logit of each token that the output contains.
        frequency_penalty: Number that is subtracted from a token's logit for each occurrence of the token in
            the output.
        repetition_penalty: Positive number, applied to the logits of all tokens in the prompt or the output.
            Positive logits are divided by this number, and negative logits are multiplied by it.
        logit_bias: Pairs of a token id and the number that is added to its logit. A token id occurs at most
            once.
        min_tokens: Smallest number of output tokens. Before this number is reached, tokens that end the text
            are forbidden.
        allowed_token_ids: The only tokens that may be chosen. If None, all tokens are allowed.
        bad_words: Token sequences that the output must not contain.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(math.isfinite(value) and -2 <= value <= 2, name, f"between -2 and 2, not {value}")
        _check(
            math.isfinite(self.repetition_penalty) and 0 < self.repetition_penalty <= 1e6,
            "repetition_penalty",
            f"above 0 and at most 1000000, not {self.repetition_penalty}",
        )
        _check(0 <= self.min_tokens < 1 << 31, "min_tokens", f"at least 0, not {self.min_tokens}")
        self._check_tokens()

    def _check_tokens(self) -> None:
        _check(
            len(self.logit_bias) <= MAX_BIASES,
            "logit_bias",
            f"an object of at most {MAX_BIASES} tokens, not {len(self.logit_bias)}",
        )
        for _, value in self.logit_bias:
            _check(
                math.isfinite(value) and abs(value) <= MAX_BIAS,
                "logit_bias",
                f"an object of numbers between -{MAX_BIAS:g} and {MAX_BIAS:g}, not {value}",
            )
        _check(
            len({token for token, _ in self.logit_bias}) == len(self.logit_bias),
            "logit_bias",
            "an object that names each token once",
        )
        if self.allowed_token_ids is not None:
            _check(
                1 <= len(self.allowed_token_ids) <= MAX_ALLOWED_TOKENS,
                "allowed_token_ids",
                f"a list of 1 to {MAX_ALLOWED_TOKENS} tokens, not {len(self.allowed_token_ids)}",
            )
        _check(
            len(self.bad_words) <= MAX_BAD_WORDS,
            "bad_words",
            f"a list of at most {MAX_BAD_WORDS} token sequences, not {len(self.bad_words)}. A word can take "
            "two sequences, one with and one without a space before it",
        )
        for word in self.bad_words:
            _check(
                1 <= len(word) <= MAX_BAD_WORD_TOKENS,
                "bad_words",
                f"a list of words of 1 to {MAX_BAD_WORD_TOKENS} tokens, not {len(word)}",
            )
        total = sum(len(word) for word in self.bad_words)
        _check(
            total <= MAX_BAD_WORDS_TOKENS,
            "bad_words",
            f"a list of words of at most {MAX_BAD_WORDS_TOKENS} tokens in total, not {total}",
        )

    @property
    def neutral(self) -> bool:
        """True if the rules change nothing."""
        return self == NO_RULES

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that all token ids are below `vocab_size`.

        Raises:
            InvalidRequestError: The error names the field.
        """
        bad_words = [token for word in self.bad_words for token in word]
        for name, tokens in (
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", bad_words),
        ):
            if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
                wrong = next(token for token in tokens if not 0 <= token < vocab_size)
                raise InvalidRequestError(
                    f"{name} contains the token id {wrong}, but the vocabulary has {vocab_size} entries.",
                    field=name,
                )


def _check(valid: bool, field: str, allowed: str) -> None:
    if not valid:
        raise InvalidRequestError(f"{field} must be {allowed}.", field=field)


NO_RULES = LogitRules()


@dataclass(frozen=True, slots=True)
class LogprobParams:
    """The log-probabilities that a client requests, under the model's own distribution.

    This distribution is the softmax of the logits before any rule, temperature or filter is applied.

    Attributes:
        top: Number of most likely tokens to report for each output token, in addition to the token itself.
            With None, no logprobs of output tokens are reported.
        prompt_top: As `top`, but for prompt tokens.
        prompt_start: Index of the first prompt token to report. Token 0 has no logprob.
        token_ids: Tokens whose logprobs are also reported at each reported position.
    """

    top: int | None = None
    prompt_top: int | None = None
    prompt_start: int = 0
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("top", "prompt_top"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
                raise InvalidRequestError(
                    f"logprobs must be between 0 and {MAX_TOP_LOGPROBS}, not {value}.", field="logprobs"
                )
        if self.prompt_start < 0:
            raise InvalidRequestError(
                f"prompt_start must be at least 0, not {self.prompt_start}.", field="prompt_start"
            )
        if len(self.token_ids) > MAX_REQUESTED_IDS:
            raise InvalidRequestError(
                f"token_ids_logprob accepts at most {MAX_REQUESTED_IDS} tokens, not {len(self.token_ids)}.",
                field="token_ids_logprob",
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that all requested token ids are below `vocab_size`.

        Raises:
            InvalidRequestError: The error names the field.
        """
        for token in self.token_ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(
                    f"token_ids_logprob contains the token id {token}, but the vocabulary has {vocab_size} "
                    "entries.",
                    field="token_ids_logprob",
                )

    @property
    def wanted(self) -> bool:
        """True if any logprobs are wanted."""
        return self.top is not None or self.prompt_top is not None


NO_LOGPROBS = LogprobParams()


@dataclass(slots=True)
class TokenLogprob:
    """The log-probability of one token, and the most likely tokens at the same position.

    The record is not frozen, because creating a frozen record takes about three times as long, and each token
    needs one.

    Attributes:
        logprob: The natural logarithm of the token's probability.
        top_ids: The most likely tokens, the most likely first. Tokens of equal probability are in the order
            of their ids.
        top_logprobs: The logprobs of `top_ids`.
        requested: The logprobs of `LogprobParams.token_ids`, in the order of the request.
    """

    logprob: float
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()
    requested: Sequence[float] = ()

    @property
    def top(self) -> list[tuple[int, float]]:
        """The most likely tokens, each with its logprob. Ids and logprobs without a partner are left out."""
        return list(zip(self.top_ids, self.top_logprobs, strict=False))
