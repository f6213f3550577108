"""The table of options: every option is read from REST and gRPC alike, and from declared fields only."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from outrider.gateway.v1 import gateway_pb2
from outrider.services.gateway.options.table import READ_OPTIONS, grpc_path
from outrider.services.gateway.parameters import Parameters
from outrider.services.gateway.requested_rules import RequestedRules
from outrider.services.gateway.schemas.anthropic import MessagesRequest
from outrider.services.gateway.schemas.chat import ChatRequest
from outrider.services.gateway.schemas.completions import CompletionRequest
from outrider.services.gateway.schemas.native import NativeRequest
from outrider.services.gateway.schemas.responses import ResponsesRequest
from outrider.services.gateway.schemas.template_options import TEMPLATE_OPTIONS
from outrider.services.gateway.target_messages import options_from_proto
from outrider.shared.base.errors import InvalidRequestError

VALUES: dict[str, Any] = {
    "max_tokens": 7,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.25,
    "min_p": 0.125,
    "seed": 9,
    "n": 2,
    "stop": ["x", "y"],
    "stop_regex": ["x+", "[yz]"],
    "stop_token_ids": [4, 5],
    "ignore_eos": True,
    "include_stop_string": True,
    "skip_special_tokens": False,
    "priority": -1,
    "cache_salt": "salt",
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"3": 1.5},
    "min_tokens": 1,
    "allowed_token_ids": [1, 2],
    "bad_words": ["no"],
}
OUTER = {option.name for option in READ_OPTIONS if option.is_outer}


def rest_name(name: str, last: bool) -> str:
    names = next(option.rest_names for option in READ_OPTIONS if option.name == name)
    return names[-1 if last and name != "max_tokens" else 0]


def from_grpc() -> Parameters:
    options = gateway_pb2.GenerationOptions()
    for option in READ_OPTIONS:
        _, *outer, name = grpc_path(option.grpc[0]).split(".")
        message: Any = options
        for part in outer:
            message = getattr(message, part)
        if (value := VALUES.get(option.name)) is None:
            continue
        if isinstance(value, list):
            getattr(message, name).extend(value)
        elif isinstance(value, dict):
            getattr(message, name).update({int(key): one for key, one in value.items()})
        else:
            setattr(message, name, value)
    return Parameters.of(options_from_proto(options))


def test_rest_and_grpc_read_all_options_alike() -> None:
    expected = from_grpc()
    body = {rest_name(name, False): value for name, value in VALUES.items()}
    assert CompletionRequest(prompt="x", **body).parameters() == expected
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **body})
    assert chat.parameters() == expected
    body = {rest_name(name, True): value for name, value in VALUES.items() if name not in OUTER}
    outer = {name: VALUES[name] for name in OUTER}
    body["max_new_tokens"] = body.pop("max_tokens")
    body.pop("stop_sequences")
    native = NativeRequest.model_validate(
        {"text": "x", "sampling_params": {**body, "stop": ["x", "y"]}, **outer}
    )
    assert native.parameters() == replace(expected, may_be_empty=True)


def test_every_option_is_an_attribute_and_has_a_value_in_this_test() -> None:
    assert {option.name for option in READ_OPTIONS} - VALUES.keys() == {"bad_word_ids"}
    rules = {option.name for option in READ_OPTIONS if option.is_rule}
    assert rules == {one.name for one in fields(RequestedRules)}
    apart = {"speculation", "rules", "logprobs", "may_be_empty", "constraint", "states"}
    assert {option.name for option in READ_OPTIONS} - rules == {
        one.name for one in fields(Parameters)
    } - apart


def test_an_empty_request_has_the_defaults() -> None:
    assert CompletionRequest(prompt="x").parameters() == Parameters()
    assert Parameters.of(options_from_proto(gateway_pb2.GenerationOptions())).temperature is None


def test_a_field_that_a_route_does_not_declare_is_not_read() -> None:
    body = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
    anthropic = MessagesRequest.model_validate({**body, "n": 5, "ignore_eos": True, "stop_sequences": ["z"]})
    assert anthropic.parameters() == Parameters(max_tokens=3, stop=("z",))
    assert ChatRequest.model_validate({**body, "max_new_tokens": 9}).parameters().max_tokens == 3


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (CompletionRequest(prompt="x", seed=1, sampling_seed=2), "seed"),
        (ResponsesRequest(input="x", max_tokens=1, max_output_tokens=2), "max_tokens"),
    ],
)
def test_two_names_of_an_option_must_agree(body: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError, match="differ") as caught:
        body.parameters()
    assert caught.value.field == field


def test_names_that_agree_are_accepted_and_one_switch_suffices() -> None:
    body = CompletionRequest(
        prompt="x", seed=1, sampling_seed=1, no_stop_trim=True, include_stop_str_in_output=False
    )
    assert body.parameters() == Parameters(seed=1, include_stop_string=True)


def test_the_table_lists_the_variables_of_templates() -> None:
    about = ChatRequest.model_fields["chat_template_kwargs"].description
    assert about == f"Allowed keys: {', '.join(TEMPLATE_OPTIONS)}."
