"""Malformed and oversized requests must cost little: few errors per body, no tokenizing of hopeless texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.models.toy_text import make_tokenizer
from tokenizers import Tokenizer

from outrider.services.gateway.guards.text_limit import TextLimit
from outrider.services.gateway.schemas.base import MAX_IGNORED_NAMES, StrictModel
from outrider.services.gateway.schemas.chat import ChatRequest
from outrider.services.gateway.schemas.completions import CompletionRequest
from outrider.services.gateway.schemas.native import DetokenizeRequest, NativeRequest
from outrider.services.gateway.schemas.option_fields.speculation import SpeculationOptions
from outrider.services.gateway.tokenizer import TextCodec
from outrider.shared.base.errors import InvalidRequestError

ITEMS = 5000
FEW = 16


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": [1.5] * ITEMS}),
        (CompletionRequest, {"prompt": [[None]] * ITEMS}),
        (CompletionRequest, {"prompt": [["x"] * ITEMS]}),
        (ChatRequest, {"messages": [1] * ITEMS}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * ITEMS}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}] * ITEMS}),
        (NativeRequest, {"input_ids": [None] * ITEMS}),
        (NativeRequest, {"text": [None] * ITEMS}),
        (DetokenizeRequest, {"tokens": ["x"] * ITEMS}),
    ],
)
def test_a_malformed_body_causes_few_errors(model: type[StrictModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= FEW


def test_thousands_of_forbidden_fields_cause_one_error() -> None:
    with pytest.raises(ValidationError) as caught:
        SpeculationOptions.model_validate({f"x{number}": 1 for number in range(ITEMS)})
    assert caught.value.error_count() == 1


def test_thousands_of_ignored_fields_cost_few_names() -> None:
    made = CompletionRequest.model_validate({f"x{number}": 1 for number in range(ITEMS)} | {"prompt": "x"})
    assert len(made.ignored_fields()) == MAX_IGNORED_NAMES + 1


def test_long_valid_lists_of_token_ids_pass() -> None:
    assert len(CompletionRequest(prompt=[1] * 100_000).prompts()[0]) == 100_000
    assert len(NativeRequest(input_ids=[[1] * 100_000]).source()[0]) == 100_000


class _UnusableTokenizer:
    """Stands for a tokenizer that must not be called."""

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        return {"a": 0, "abcd": 1}


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    codec = TextCodec(_UnusableTokenizer(), None)  # type: ignore[arg-type]
    codec.limit.context = lambda: 10
    with pytest.raises(InvalidRequestError, match=r"41 characters.*10 tokens") as caught:
        codec.encode("x" * 41)
    assert caught.value.reason == "context_length_exceeded"
    with pytest.raises(InvalidRequestError, match="11 token ids"):
        codec.limit.check_ids(11, "tokens")


def test_a_text_that_may_fit_is_tokenized(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    codec = TextCodec(tokenizer, None)
    limit = TextLimit(tokenizer)
    codec.limit.context = lambda: 10
    longest = max(tokenizer.get_vocab(), key=len)
    assert len(longest) == limit.longest_token
    assert len(codec.encode(longest * 10, add_special_tokens=False)) == 10


def test_long_and_short_texts_are_encoded_alike(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    codec = TextCodec.load(folder)
    text = "A long text, repeated. " * 400
    assert codec.encode(text) == tuple(codec.tokenizer.encode(text).ids)
    ids = codec.encode(text)
    assert codec.decode(ids) == codec.tokenizer.decode(list(ids), skip_special_tokens=True)
