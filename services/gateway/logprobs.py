"""Formats logprobs as in OpenAI's chat and text completions, in vLLM's `prompt_logprobs` and in SGLang."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from outrider.shared.base.logit_rules import TokenLogprob

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express. OpenAI uses this number too."""

BytesOf = Callable[[int], bytes]
"""Returns the bytes of a token's text."""


def token_bytes_of(tokenizer: Tokenizer | None) -> BytesOf:
    """Return a function that maps a single token to its bytes. The bytes need not be valid UTF-8.

    Args:
        tokenizer: Decodes the tokens. With None, the bytes of every token are empty.
    """
    if tokenizer is None:
        return lambda token: b""
    letters = _byte_letters()

    @cache
    def bytes_of(token: int) -> bytes:
        written = tokenizer.id_to_token(token) or ""
        if "\u2581" in written:
            return written.replace("\u2581", " ").encode()  # decoded alone, the token would lose its space
        text = str(tokenizer.decode([token], skip_special_tokens=False))
        if "\ufffd" not in text:
            return text.encode()
        # The token is a part of a character. Byte-level tokenizers write each byte as a letter, and other
        # tokenizers write it as <0xNN>.
        if len(written) == 6 and written.startswith("<0x") and written.endswith(">"):
            return bytes([int(written[3:5], 16)])
        if all(letter in letters for letter in written):
            return bytes(letters[letter] for letter in written)
        return text.encode()

    return bytes_of


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], bytes_of: BytesOf, ids_as_text: bool = False
) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice, or of a chunk of a chat choice."""

    def one_of(token: int, logprob: float) -> dict[str, Any]:
        raw = bytes_of(token)
        return {
            "token": _name(token, raw, ids_as_text),
            "logprob": _finite(logprob),
            "bytes": list(raw),
        }

    content = [
        one_of(token, one.logprob) | {"top_logprobs": [one_of(*pair) for pair in one.top]}
        for token, one in zip(token_ids, logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    bytes_of: BytesOf,
    ids_as_text: bool = False,
    offset: int = 0,
) -> dict[str, Any]:
    """Return the `logprobs` object of a text completion, or of a chunk of a text completion.

    Args:
        token_ids: The tokens. If the reply repeats the prompt, the prompt's tokens come first.
        logprobs: One entry for each token. The entry of the first token of a prompt is None.
        bytes_of: Function that returns the bytes of a token.
        ids_as_text: Whether to write tokens as ``token_id:N``.
        offset: Number of characters before the first token.
    """
    tokens, offsets, tops = [], [], []
    for token, one in zip(token_ids, logprobs, strict=False):
        raw = bytes_of(token)
        tokens.append(_name(token, raw, ids_as_text))
        offsets.append(offset)
        offset += len(raw.decode("utf-8", "replace"))
        tops.append(None if one is None else _top_object(token, one, bytes_of, ids_as_text))
    return {
        "tokens": tokens,
        "token_logprobs": [None if one is None else _finite(one.logprob) for one in logprobs[: len(tokens)]],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def prompt_logprobs_list(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], top: int, bytes_of: BytesOf
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: null for the first token, and one object for each other token.

    Each object maps token ids to logprobs. It contains the alternatives and the prompt's own token. If the
    prompt's own token is not among the alternatives, its rank is unknown and is written as null.

    Args:
        token_ids: The tokens of the prompt.
        logprobs: The logprobs of all tokens but the first.
        top: Number of alternatives.
        bytes_of: Function that returns the bytes of a token.
    """

    def one_of(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = bytes_of(token).decode("utf-8", "replace")
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    listed: list[dict[str, Any] | None] = [None]
    for token, one in zip(token_ids[1:], logprobs, strict=False):
        ranks = {other: rank for rank, (other, _) in enumerate(one.top, 1)}
        found = {str(token): one_of(token, one.logprob, ranks.get(token))}
        for other, logprob in one.top[:top]:
            found.setdefault(str(other), one_of(other, logprob, ranks[other]))
        listed.append(found)
    return listed


def native_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    bytes_of: BytesOf | None,
) -> tuple[list[list[Any]], list[list[list[Any]] | None]]:
    """Return SGLang's two lists of logprobs: one for a sequence's tokens, one for their alternatives.

    A token or an alternative is written as [logprob, id, text].

    Args:
        token_ids: The tokens of the sequence.
        logprobs: One entry for each token. None marks a token without logprob.
        bytes_of: Function that returns the bytes of a token. With None, the text is left out.
    """

    def one_of(token: int, logprob: float | None) -> list[Any]:
        text = None if bytes_of is None else bytes_of(token).decode("utf-8", "replace")
        return [None if logprob is None else _finite(logprob), token, text]

    pairs = list(zip(token_ids, logprobs, strict=False))
    own = [one_of(token, None if one is None else one.logprob) for token, one in pairs]
    tops = [[one_of(*pair) for pair in one.top] if one is not None and one.top else None for _, one in pairs]
    return own, tops


def token_ids_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], bytes_of: BytesOf | None
) -> list[list[list[Any]] | None]:
    """Return the logprobs that the client wants for certain token ids, in SGLang's format.

    The result has one list for each token of the sequence. Each list contains one [logprob, id, text] for
    each requested token id.

    Args:
        token_ids: The token ids that the client has requested.
        logprobs: One entry for each token of the sequence. None marks a token without logprob.
        bytes_of: Function that returns the bytes of a token. With None, the text is left out.
    """
    named = [
        (token, None if bytes_of is None else bytes_of(token).decode("utf-8", "replace"))
        for token in token_ids
    ]
    return [
        None
        if one is None
        else [[_finite(logprob), *names] for logprob, names in zip(one.requested, named, strict=False)]
        for one in logprobs
    ]


def _top_object(token: int, one: TokenLogprob, bytes_of: BytesOf, ids_as_text: bool) -> Mapping[str, float]:
    """Return the logprobs of the alternatives and of the token itself, by name.

    If two names are equal, the first one counts.
    """
    found: dict[str, float] = {}
    for other, logprob in (*one.top, (token, one.logprob)):
        found.setdefault(_name(other, bytes_of(other), ids_as_text), _finite(logprob))
    return found


def _name(token: int, raw: bytes, ids_as_text: bool) -> str:
    return f"token_id:{token}" if ids_as_text else raw.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # also replaces nan


@cache
def _byte_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level tokenizer represents.

    Printable bytes of Latin-1 are written as the characters with the same code. The other bytes are written
    as the letters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }
