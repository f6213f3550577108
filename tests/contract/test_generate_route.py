"""The route ``/generate``, used in the way of scripts that were written for SGLang."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import httpx
import pytest
from fake_target import FakeTarget
from gateway_thread import GatewayThread, Stack

TIMEOUT_S = 30


def post(stack: Stack, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{stack.base_url}/generate", json=body, timeout=TIMEOUT_S)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_text_in_text_and_ids_out(stack: Stack) -> None:
    sampling = {"max_new_tokens": 6, "temperature": 0}
    asked = {"text": "The quick", "sampling_params": sampling, "speculation": {"mode": "on"}}
    reply = post(stack, asked).json()
    meta = reply["meta_info"]
    assert reply["text"]
    assert len(reply["output_ids"]) == meta["completion_tokens"]
    assert {
        "id",
        "finish_reason",
        "prompt_tokens",
        "cached_tokens",
        "e2e_latency",
        "spec_verify_ct",
        "spec_accept_rate",
    } <= meta.keys()
    assert meta["finish_reason"]["type"] in ("length", "stop")
    assert meta["spec_accept_length"] == pytest.approx(
        meta["completion_tokens"] / meta["spec_verify_ct"], rel=1e-5
    )
    assert reply["speculation"]["rounds"] == meta["spec_verify_ct"]


def test_ids_and_batches(stack: Stack) -> None:
    sampling = {"max_new_tokens": 4, "temperature": 0, "sampling_seed": 1}
    one = post(stack, {"input_ids": [9, 10, 11], "sampling_params": sampling}).json()
    assert one["meta_info"]["prompt_tokens"] == 3
    many = post(stack, {"input_ids": [[9, 10, 11], [12]], "sampling_params": sampling, "rid": "mine"}).json()
    assert many[0]["output_ids"] == one["output_ids"]
    assert [reply["meta_info"]["id"] for reply in many] == ["mine-0", "mine-1"]
    # A batch of one is a batch.
    assert len(post(stack, {"text": ["The quick"], "sampling_params": sampling}).json()) == 1
    assert len(post(stack, {"text": "The quick", "sampling_params": {**sampling, "n": 2}}).json()) == 2


@pytest.mark.parametrize(
    ("prompt", "field"), [({"text": ""}, "text"), ({"input_ids": []}, "input_ids"), ({"text": [""]}, "text")]
)
def test_an_empty_prompt_is_named_as_it_was_given(stack: Stack, prompt: dict[str, Any], field: str) -> None:
    response = post(stack, prompt)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(field)


def test_a_stream_repeats_the_text_so_far(stack: Stack) -> None:
    body = {"text": "The quick", "sampling_params": {"max_new_tokens": 8, "temperature": 0.5, "seed": 3}}
    whole = post(stack, body).json()
    events = events_of(post(stack, {**body, "stream": True}))
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in pairwise(events))
    assert [event["meta_info"]["finish_reason"] is None for event in events] == [True] * (len(events) - 1) + [
        False
    ]
    assert (events[-1]["text"], events[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert "speculation" in events[-1]


SPEC_COUNTERS = (
    "spec_verify_ct",
    "spec_accept_length",
    "spec_accept_rate",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
    "spec_correct_drafts_histogram",
)


def test_every_event_of_a_stream_has_the_counters_so_far(stack: Stack) -> None:
    body = {
        "text": "The quick brown fox jumps over the lazy dog. " * 6,
        "sampling_params": {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True},
        "speculation": {"mode": "on"},
    }
    whole = post(stack, body).json()["meta_info"]
    metas = [event["meta_info"] for event in events_of(post(stack, {**body, "stream": True}))]
    # The second request finds the prompt of the first in the cache.
    assert {meta["cached_tokens"] for meta in metas} == {metas[-1]["cached_tokens"]}
    assert metas[-1]["cached_tokens"] >= whole["cached_tokens"]
    # Only the event of the prefill comes before the first round.
    drafted = [meta for meta in metas if "spec_verify_ct" in meta]
    assert len(drafted) >= len(metas) - 1
    for meta in drafted:
        assert set(SPEC_COUNTERS) <= meta.keys()
        assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]
        expected = meta["completion_tokens"] / meta["spec_verify_ct"]
        assert meta["spec_accept_length"] == pytest.approx(expected, rel=1e-5)
    counted = [meta["spec_verify_ct"] for meta in drafted]
    assert counted == sorted(counted)
    # The counters of the last tokens are those of the whole answer.
    assert [drafted[-2][name] for name in SPEC_COUNTERS] == [whole[name] for name in SPEC_COUNTERS]


def test_a_streamed_batch_is_numbered(stack: Stack) -> None:
    events = events_of(
        post(
            stack,
            {"text": ["The quick", "What is"], "stream": True, "sampling_params": {"max_new_tokens": 4}},
        )
    )
    assert {event["index"] for event in events} == {0, 1}
    assert sorted(event["index"] for event in events if event["meta_info"]["finish_reason"]) == [0, 1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"frequency_penalty": 2.5}}, "sampling_params.frequency_penalty"),
        (
            {"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 8}},
            "sampling_params.min_new_tokens",
        ),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "sampling_params": {"structural_tag": "{}"}}, "sampling_params.structural_tag"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "sampling_params": [{"temperature": -1}]}, "sampling_params.temperature"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [10**9]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"text": "a", "speculation": {"topk": 99}}, "speculation.topk"),
        ({"text": "a", "image_data": "http://example.org"}, "image_data"),
    ],
)
def test_wrong_fields_are_named(stack: Stack, body: dict[str, Any], param: str) -> None:
    response = post(stack, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_stop_regex_ends_the_answer_with_the_token_that_completes_a_match(stack: Stack) -> None:
    sampling = {"max_new_tokens": 24, "temperature": 0.8, "seed": 5, "n": 2, "ignore_eos": True}
    free = post(stack, {"text": "The quick", "sampling_params": sampling}).json()
    # A pattern that matches inside the first answer: any four characters from its middle.
    text = free[0]["text"]
    middle = len(text) // 2
    pattern = (
        "(?:"
        + "".join(rf"\x{ord(one):02x}" if one < "\x80" else "." for one in text[middle : middle + 4])
        + ")"
    )
    expected = []
    for reply in free:
        ids = reply["output_ids"]
        texts = [detokenized(stack, ids[:end]) for end in range(1, len(ids) + 1)]
        end = next((end for end, text in enumerate(texts, 1) if re.search(pattern, text)), None)
        expected.append((reply["text"], ids, None) if end is None else (texts[end - 1], ids[:end], pattern))
    assert expected[0][2] == pattern
    for mode in ("on", "off"):
        body = {
            "text": "The quick",
            "sampling_params": {**sampling, "stop_regex": ["(never|ever){9}", pattern]},
            "speculation": {"mode": mode},
        }
        whole = post(stack, body).json()
        assert [ended(reply) for reply in whole] == expected
        events = events_of(post(stack, {**body, "stream": True}))
        for reply, index in zip(whole, range(2), strict=True):
            mine = [event for event in events if event["index"] == index]
            assert ended(mine[-1]) == ended(reply)
            assert all(later["text"].startswith(earlier["text"]) for earlier, later in pairwise(mine))


def detokenized(stack: Stack, ids: list[int]) -> str:
    body = {"tokens": ids, "skip_special_tokens": True}
    return httpx.post(f"{stack.base_url}/detokenize", json=body).json()["prompt"]


def ended(reply: dict[str, Any]) -> tuple[str, list[int], Any]:
    reason = reply["meta_info"]["finish_reason"]
    assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"])
    return reply["text"], reply["output_ids"], reason.get("matched")


def test_a_stop_regex_of_plain_text_is_cut_off_as_in_sglang(stack: Stack) -> None:
    sampling = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    text = post(stack, {"text": "The quick", "sampling_params": sampling}).json()["text"]
    plain = next(one for one in text[3:] if one.isalnum())
    stops = [
        post(stack, {"text": "The quick", "sampling_params": {**sampling, name: plain}}).json()
        for name in ("stop", "stop_regex")
    ]
    assert ended(stops[0]) == ended(stops[1])
    assert stops[1]["text"] == text[: text.index(plain)]


@pytest.mark.parametrize("pattern", ["(a", "(?=a)b", "(a{999}){999}", "", "x" * 1025, ["a"] * 33])
def test_a_wrong_stop_regex_is_named(stack: Stack, pattern: Any) -> None:
    asked = {"text": "a", "sampling_params": {"stop_regex": pattern}}
    error = post(stack, asked).json()["error"]
    assert (error["param"], error["message"].count("stop_regex")) == ("sampling_params.stop_regex", 1)


def test_neutral_values_of_unsupported_parameters_pass(stack: Stack) -> None:
    neutral = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "regex": None,
        "top_k": -1,
    }
    response = post(
        stack, {"text": "a", "return_logprob": False, "sampling_params": {**neutral, "max_new_tokens": 2}}
    )
    assert response.status_code == 200


def test_what_is_served_is_told(stack: Stack) -> None:
    for path in ("/get_model_info", "/model_info"):
        info = httpx.get(stack.base_url + path).json()
        assert info["is_generation"] is True
        assert info["model_path"].startswith("/")
        assert info["has_image_understanding"] is info["has_audio_understanding"] is False
        assert info["preferred_sampling_params"] is None
    for path in ("/server_info", "/get_server_info"):
        told = httpx.get(stack.base_url + path).json()
        assert told["speculative_max_nodes"] >= 1
        assert told["dtype"] == info["dtype"]
        assert told["model_path"] == info["model_path"]
        assert (told["served_model_name"], told["status"]) == (info["served_model_name"], "ready")
        assert told["tp_size"] >= 1
        assert (told["dp_size"], told["pp_size"]) == (len(told["internal_states"]), 1)
        assert told["context_length"] == told["max_req_input_len"] + 1 == info["max_model_len"]
        assert told["last_gen_throughput"] >= 0
        state = told["internal_states"][0]
        assert state["auto"]["reason"]
        assert state["last_gen_throughput"] >= 0
        assert state["effective_max_running_requests_per_dp"] == told["max_running_requests"] >= 1
        assert state["memory_usage"]["token_capacity"] == told["max_total_num_tokens"]
        assert {"weight", "kvcache", "graph"} <= state["memory_usage"].keys()
    for path in ("/weight_version", "/get_weight_version"):
        assert httpx.get(stack.base_url + path).json() == {"weight_version": info["weight_version"]}


def test_the_limits_are_those_of_sglang(stack: Stack) -> None:
    hot = {"temperature": 3, "stop": ["x" * 400], "max_new_tokens": 2}
    assert post(stack, {"text": "a", "sampling_params": hot}).status_code == 200
    for wrong in (-1, 1e9):
        reply = post(stack, {"text": "a", "sampling_params": {"temperature": wrong}})
        assert reply.json()["error"]["param"] == "sampling_params.temperature"


def test_text_and_ids_convert_both_ways(stack: Stack) -> None:
    text = "The quick brown fox 🦊 jumps."
    tokens = httpx.post(
        f"{stack.base_url}/tokenize", json={"prompt": text, "add_special_tokens": False}
    ).json()
    assert tokens["count"] == len(tokens["tokens"]) > 1
    back = httpx.post(f"{stack.base_url}/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back["prompt"] == text


@pytest.mark.parametrize(
    ("fields", "at_once"),
    [({}, False), ({"stream": True}, True), ({"sampling_params": {"stop": "zzz"}}, True)],
    ids=["whole", "stream", "stop string"],
)
def test_the_target_may_collect_the_tokens_of_whole_answers(
    gateway: GatewayThread, fake: FakeTarget, fields: dict[str, Any], at_once: bool
) -> None:
    assert post(gateway.stack, {"input_ids": [9, 10, 11]} | fields).is_success
    (request,) = fake.seen
    assert (request.message_interval_ms == 0) == at_once
