"""Logprobs in the formats of the routes, with tokens that are parts of characters."""

from __future__ import annotations

import math

import pytest
from tokenizers import Tokenizer, decoders, models

from outrider.services.gateway.logprobs import (
    LEAST_LOGPROB,
    chat_logprobs,
    completion_logprobs,
    native_logprobs,
    token_bytes_of,
)
from outrider.shared.base.logit_rules import TokenLogprob

TEXTS = {0: b"a", 1: b" b", 2: "é".encode()[:1], 3: "é".encode()[1:]}
ONE = TokenLogprob(-0.5, (0, 1), (-0.5, -1.5))
TWO = TokenLogprob(-3.0, (1,), (-0.25,))


def bytes_of(token: int) -> bytes:
    return TEXTS[token]


def test_a_chat_lists_bytes_and_alternatives() -> None:
    content = chat_logprobs([0, 2], [ONE, TWO], bytes_of)["content"]
    assert [one["token"] for one in content] == ["a", "\ufffd"]
    assert [one["bytes"] for one in content] == [[97], [0xC3]]
    assert [one["logprob"] for one in content] == [-0.5, -3.0]
    assert [[each["token"] for each in one["top_logprobs"]] for one in content] == [["a", " b"], [" b"]]
    named = chat_logprobs([0], [ONE], bytes_of, ids_as_text=True)["content"][0]
    assert (named["token"], named["top_logprobs"][1]["token"]) == ("token_id:0", "token_id:1")


def test_a_completion_has_offsets_and_its_own_token_among_the_alternatives() -> None:
    body = completion_logprobs([1, 0, 1], [None, ONE, TokenLogprob(-2.0, (0,), (-0.1,))], bytes_of, offset=3)
    assert body == {
        "tokens": [" b", "a", " b"],
        "token_logprobs": [None, -0.5, -2.0],
        "top_logprobs": [None, {"a": -0.5, " b": -1.5}, {"a": -0.1, " b": -2.0}],
        "text_offset": [3, 5, 6],
    }


def test_sglangs_lists() -> None:
    own, tops = native_logprobs([1, 0], [None, ONE], bytes_of)
    assert own == [[None, 1, " b"], [-0.5, 0, "a"]]
    assert tops == [None, [[-0.5, 0, "a"], [-1.5, 1, " b"]]]
    assert native_logprobs([0], [ONE], None)[0] == [[-0.5, 0, None]]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
def test_json_gets_numbers(logprob: float) -> None:
    assert completion_logprobs([0], [TokenLogprob(logprob)], bytes_of)["token_logprobs"] == [LEAST_LOGPROB]


def test_the_bytes_of_partial_characters_come_from_the_vocabulary() -> None:
    byte_level = Tokenizer(models.WordLevel({"Ã": 0, "©": 1, "Ġb": 2}, unk_token=None))
    byte_level.decoder = decoders.ByteLevel()
    found = token_bytes_of(byte_level)
    assert found(0) + found(1) == "é".encode()
    assert found(2) == b" b"
    fallback = Tokenizer(models.WordLevel({"<0xC3>": 0, "▁x": 1, "y": 2}, unk_token=None))
    fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)])
    assert [token_bytes_of(fallback)(token) for token in (0, 1, 2)] == [b"\xc3", b" x", b"y"]
    assert token_bytes_of(None)(7) == b""
