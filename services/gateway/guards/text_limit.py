"""Refuses texts that cannot fit in the model's context, before these texts are tokenized."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer

from outrider.shared.base.errors import InvalidRequestError


class TextLimit:
    """A check that refuses texts that cannot fit in the model's context.

    The limit, in characters, is the context's length in tokens times the length of the vocabulary's longest
    token. Longer texts are refused before tokenization, because tokenizing 1 MiB occupies a core for seconds.

    Attributes:
        longest_token: Length of the longest token of the vocabulary, in characters.
        context: Function that returns the length of the model's context, in tokens. If it returns None, there
            is no limit.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.longest_token = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self.context: Callable[[], int] | None = None

    def check(self, num_chars: int, field: str | None = None) -> None:
        """Check that a text can fit in the model's context.

        Args:
            num_chars: Length of the text in characters.
            field: Field of the request that contains the text.

        Raises:
            InvalidRequestError: If the text cannot fit.
        """
        if self.context is None:
            return
        context = self.context()
        if num_chars > context * self.longest_token:
            raise InvalidRequestError(
                f"The prompt is too long: {num_chars} characters cannot fit. This model's maximum context "
                f"length is {context} tokens of at most {self.longest_token} characters.",
                field=field,
                reason="context_length_exceeded",
            )

    def check_ids(self, num_ids: int, field: str) -> None:
        """Check the number of token ids in a request that converts token ids to text.

        Raises:
            InvalidRequestError: If the request has more token ids than fit in the model's context.
        """
        if self.context is not None and num_ids > (context := self.context()):
            raise InvalidRequestError(
                f"{field} has {num_ids} token ids, but the model's context has {context} tokens.",
                field=field,
                reason="context_length_exceeded",
            )
