"""HTTP status, type and headers of every error code, and messages for invalid bodies."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from outrider.services.gateway.errors import TYPE_OF_CODE, error_response, explain_validation
from outrider.services.gateway.schemas.chat import ChatRequest
from outrider.services.gateway.schemas.completions import CompletionRequest, as_batch
from outrider.shared.base.errors import ErrorCode, InvalidRequestError, OutriderError, OverloadedError


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_its_status_and_type(code: ErrorCode) -> None:
    response = error_response(OutriderError("why", code=code, reason="reason", field="field"))
    assert response.status_code == code.value
    expected = {"message": "why", "type": TYPE_OF_CODE[code], "param": "field", "code": "reason"}
    assert json.loads(bytes(response.body)) == {"error": expected}


def test_retry_after_is_whole_seconds_rounded_up() -> None:
    assert error_response(OverloadedError("full", retry_after_s=0.2)).headers["Retry-After"] == "1"
    assert error_response(OverloadedError("full", retry_after_s=3.1)).headers["Retry-After"] == "4"
    assert "Retry-After" not in error_response(OverloadedError("full")).headers


def test_text_that_has_no_utf8_form_can_be_quoted() -> None:
    assert b"\\ud800" in bytes(error_response(InvalidRequestError("\ud800", field="\ud800")).body)


def explain(model: type, body: object) -> InvalidRequestError:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return explain_validation(
        [{**problem, "loc": ("body", *problem["loc"])} for problem in caught.value.errors()]
    )


@pytest.mark.parametrize(
    ("model", "body", "field", "reason"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "invalid_value"),
        (ChatRequest, {"messages": [{"role": "x", "content": "a"}]}, "messages.0.role", "invalid_value"),
        (ChatRequest, {}, "messages", "missing_field"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": "a"}], "stream": 1},
            "stream",
            "invalid_value",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": "a"}], "speculation": {"strange": 1}},
            "speculation.strange",
            "unknown_field",
        ),
        (CompletionRequest, {"prompt": ["a", 1]}, "prompt", "invalid_value"),
        (CompletionRequest, {"prompt": [[1, "a"]]}, "prompt", "invalid_value"),
        (
            CompletionRequest,
            {"prompt": "a", "speculation": {"depth": "x"}},
            "speculation.depth",
            "invalid_value",
        ),
    ],
)
def test_a_wrong_type_names_the_clients_field_not_our_union(
    model: type, body: object, field: str, reason: str
) -> None:
    error = explain(model, body)
    assert (error.field, error.reason) == (field, reason)
    assert field in error.message


@pytest.mark.parametrize(
    ("prompt", "batch"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], []),
        ([[]], [[]]),
    ],
)
def test_a_prompt_is_one_or_a_batch(prompt: object, batch: list[object]) -> None:
    assert as_batch(prompt) == batch  # type: ignore[arg-type]
