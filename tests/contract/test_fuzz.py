"""Sends valid and broken requests that are generated from the OpenAPI document.

No request may hang or cause a 500, and every error must have the documented format.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import schemathesis
from gateway_thread import GatewayThread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from outrider.services.gateway.app import create_app

ROUTES = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/generate",
    "/tokenize",
    "/detokenize",
    "/abort_request",
]
# These routes read the body of another route.
SAME_AS = {
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
    "/v1/messages/count_tokens": "/v1/messages",
    "/v1/responses/input_tokens": "/v1/responses",
}
BODILESS = {"/flush_cache", "/ping"}
FUZZ = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
TIMEOUT_S = 20
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": (
        "ChatRequest",
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    ),
    "/v1/completions": ("CompletionRequest", {"prompt": "x", "max_tokens": 2}),
    "/v1/responses": ("ResponsesRequest", {"input": "x", "max_output_tokens": 2}),
    "/v1/messages": (
        "MessagesRequest",
        {"model": "toy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    ),
    "/generate": ("NativeRequest", {"text": "x", "sampling_params": {"max_new_tokens": 2}}),
}
# Includes lone surrogates, which JSON can express.
TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)


def check(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404, 405, 413, 415), (response.status_code, response.text)
    if response.status_code != 200:
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    elif "event-stream" in response.headers["content-type"]:
        named = "event: " in response.text
        assert named or response.text.endswith("data: [DONE]\n\n")
        assert not any(one in response.text for one in ('"server_error"', '"api_error"', "internal_error"))


def send_case(http: httpx.Client, case: Any) -> None:
    """Send a request that schemathesis generated. Its own transports do not support this client."""
    made = case.as_transport_kwargs(base_url=str(http.base_url))
    content = made.get("data")
    if made.get("json") is not None:
        content = json.dumps(made["json"], allow_nan=True).encode()
    if not isinstance(content, (bytes, str, type(None))):
        content = json.dumps(content).encode()
    headers = {name: value for name, value in (made.get("headers") or {}).items() if value.isascii()}
    headers.setdefault("Content-Type", "application/json")
    check(http.request(made["method"], made["url"], content=content, headers=headers))


@pytest.mark.parametrize(
    "mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value
)
@pytest.mark.parametrize("path", ROUTES)
def test_requests_made_from_the_schema_are_answered_or_refused(
    gateway: GatewayThread, path: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_dict(create_app(gateway.server.core).openapi())
    with httpx.Client(base_url=gateway.stack.base_url, timeout=TIMEOUT_S) as http:

        @FUZZ
        @given(case=schema[path]["POST"].as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            send_case(http, case)

        send()


def test_no_route_is_left_out(gateway: GatewayThread) -> None:
    routes = create_app(gateway.server.core).openapi()["paths"].items()
    posted = {path for path, operations in routes if "post" in operations}
    assert posted == {*ROUTES, *SAME_AS, *BODILESS}


@pytest.mark.parametrize("path", BASES)
def test_half_a_character_is_refused_in_every_field(gateway: GatewayThread, path: str) -> None:
    name, base = BASES[path]
    schemas = create_app(gateway.server.core).openapi()["components"]["schemas"]
    fields = {*schemas[name]["properties"], "structured_outputs", "sampling_params", "unknown"}
    with httpx.Client(
        base_url=gateway.stack.base_url, timeout=TIMEOUT_S, headers={"Content-Type": "application/json"}
    ) as http:
        for field in sorted(fields):
            for value, where in (("\ud800", field), ({"regex": ["a\udfff"]}, f"{field}.regex.0")):
                reply = http.post(path, content=json.dumps({**base, field: value}))
                assert (reply.status_code, reply.json()["error"]["param"]) == (400, where)


@pytest.mark.parametrize("path", BASES)
def test_any_value_in_any_field_is_answered_or_refused(gateway: GatewayThread, path: str) -> None:
    name, base = BASES[path]
    fields = sorted(create_app(gateway.server.core).openapi()["components"]["schemas"][name]["properties"])
    with httpx.Client(
        base_url=gateway.stack.base_url, timeout=TIMEOUT_S, headers={"Content-Type": "application/json"}
    ) as http:

        @settings(FUZZ, max_examples=120)
        @given(field=st.sampled_from(fields) | TEXT, value=JSON)
        def send(field: str, value: Any) -> None:
            check(http.post(path, content=json.dumps({**base, field: value})))

        send()
