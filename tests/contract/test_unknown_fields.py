"""Unknown fields are ignored and reported, unless ignoring them would change the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_target import FakeTarget
from gateway_thread import GatewayThread
from http_calls import CHAT, client_of, error_of

HEADER = "X-Outrider-Ignored"
TURNS = [{"role": "user", "content": "The quick"}]


@pytest.fixture
def http(gateway: GatewayThread) -> Iterator[httpx.Client]:
    with client_of(gateway) as client:
        yield client


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post(CHAT, json={"messages": TURNS, "max_tokens": 4, "temperature": 0, **fields})


def test_unknown_fields_are_listed_in_a_header_and_change_nothing(http: httpx.Client) -> None:
    plain = chat(http)
    response = chat(
        http,
        made_up=1,
        kv_transfer_params={"a": 1},
        messages=[{"role": "user", "content": "The quick", "cache_control": {"type": "ephemeral"}}],
    )
    assert response.headers[HEADER] == "made_up,kv_transfer_params,messages.0.cache_control"
    assert response.json()["choices"] == plain.json()["choices"]
    assert HEADER not in plain.headers


def test_a_stream_and_the_other_routes_have_the_header_too(http: httpx.Client) -> None:
    assert chat(http, stream=True, made_up=1).headers[HEADER] == "made_up"
    body = {"prompt": "x", "max_tokens": 1, "made_up": 1}
    assert http.post("/v1/completions", json=body).headers[HEADER] == "made_up"
    native = {"text": "x", "sampling_params": {"max_new_tokens": 1, "odd": 2}, "routed_dp_rank": 3}
    assert http.post("/generate", json=native).headers[HEADER] == "routed_dp_rank,sampling_params.odd"


@pytest.mark.parametrize("number", [300, 2000])
def test_any_number_of_unknown_fields_is_ignored(http: httpx.Client, number: int) -> None:
    response = chat(http, **{f"x{at}": at for at in range(1, number)})
    assert response.status_code == 200
    assert response.headers[HEADER] == ",".join([*(f"x{at}" for at in range(1, 33)), "..."])


def test_a_refused_field_is_found_among_many_unknown_ones(http: httpx.Client) -> None:
    response = chat(http, **{f"x{at}": at for at in range(1, 1000)}, use_beam_search=True)
    assert error_of(response)["param"] == "use_beam_search"


def test_names_that_are_unfit_for_a_header_are_replaced_and_cut(http: httpx.Client) -> None:
    names = {"a,b\r\nc: d": 1, "é" * 200: 1} | {f"x{number}": 1 for number in range(40)}
    listed = chat(http, **names).headers[HEADER].split(",")
    assert listed[:2] == ["a?b??c??d", "?" * 64]
    assert len(listed) == 33
    assert listed[-1] == "..."


@pytest.mark.parametrize(
    "fields",
    [
        {"made_up": None, "other": False, "third": []},
        {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "return_hidden_states": False},
        {"lora_path": None, "guided_json": None, "structured_outputs": {}, "bad_words": []},
        {"add_generation_prompt": True, "continue_final_message": False, "echo": False},
        {"spaces_between_special_tokens": True, "top_logprobs": 0, "suffix": ""},
        {"spaces_between_special_tokens": False, "skip_special_tokens": False, "custom_params": {}},
        {"repeat_penalty": 1, "typical_p": 1.0, "mirostat": 0, "xtc_probability": 0, "dry_multiplier": 0.0},
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
    ],
)
def test_neutral_values_pass_without_a_warning(http: httpx.Client, fields: dict[str, Any]) -> None:
    response = chat(http, **fields)
    assert response.status_code == 200, response.text
    assert HEADER not in response.headers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
        ({"custom_params": {"a": 1}}, "custom_params"),
        ({"spaces_between_special_tokens": 2}, "spaces_between_special_tokens"),
        ({"return_meta_info": True}, "return_meta_info"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"mirostat": 2}, "mirostat"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"top_a": 0.1}, "top_a"),
        ({"tfs_z": 0.9}, "tfs_z"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": "[ ]*"}},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_samplers_and_forms_of_other_servers_are_refused(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    response = chat(http, **fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_field_that_would_change_the_text_is_refused_on_every_route(http: httpx.Client, path: str) -> None:
    for field, value in (
        ("logits_processors", ["x"]),
        ("repetition_detection", {"size": 2}),
        ("lora_path", "a"),
    ):
        body = {"prompt": "x"} if path == "/v1/completions" else {"text": "x"}
        response = http.post(path, json={**body, field: value})
        assert (response.status_code, error_of(response)["param"]) == (400, field)


def test_usage_so_far_is_in_every_chunk_if_asked_for(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = chat(http, stream=True, stream_options=options).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 4)
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1


def test_the_last_message_can_be_continued_and_echoed(http: httpx.Client, fake: FakeTarget) -> None:
    turns = [*TURNS, {"role": "assistant", "content": "brown "}]
    fields = {"messages": turns, "add_generation_prompt": False, "continue_final_message": True}
    reply = chat(http, **fields, echo=True).json()
    assert reply["choices"][0]["message"]["content"].startswith("brown ")
    open_ended = http.post("/tokenize", json={"prompt": "<|bos|><|user|>The quick<|assistant|>brown "}).json()
    assert list(fake.seen[0].prompt_ids) == open_ended["tokens"]
    assert error_of(chat(http, messages=turns, continue_final_message=True))["param"] == (
        "continue_final_message"
    )


def test_a_prompt_can_be_cut_at_its_start(http: httpx.Client, fake: FakeTarget) -> None:
    body = {"prompt": [9, 10, 11, 12], "max_tokens": 2}
    http.post("/v1/completions", json={**body, "truncate_prompt_tokens": 3})
    http.post("/v1/completions", json={"prompt": [9] * 600, "max_tokens": 2, "truncate_prompt_tokens": -1})
    assert list(fake.seen[0].prompt_ids) == [10, 11, 12]
    assert len(fake.seen[1].prompt_ids) == 510


def test_other_names_of_fields_mean_the_same(http: httpx.Client, fake: FakeTarget) -> None:
    assert chat(http, request_id="mine").json()["id"] == "mine"
    chat(http, sampling_seed=7, temperature=1)
    assert fake.seen[-1].sampling.seed == 7
    assert error_of(chat(http, sampling_seed=7, seed=8))["param"] == "seed"
