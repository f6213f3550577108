"""Token ids of the prompt in replies, where clients of vLLM and SGLang read them; and `extra_key`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_target import FakeTarget
from gateway_thread import GatewayThread
from http_calls import CHAT, client_of, error_of
from tokenizers import Tokenizer

COMPLETIONS = "/v1/completions"
TURNS = [{"role": "user", "content": "The quick"}]


@pytest.fixture
def http(gateway: GatewayThread) -> Iterator[httpx.Client]:
    with client_of(gateway) as client:
        yield client


def ask(http: httpx.Client, path: str, **fields: Any) -> Any:
    """Return the reply, or the list of chunks of a stream."""
    body = {"messages": TURNS} if path == CHAT else {"prompt": ["The quick", "fox"]}
    response = http.post(path, json={**body, "max_tokens": 4, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("field", ["return_token_ids", "return_prompt_token_ids"])
def test_a_chat_has_the_ids_of_its_prompt(http: httpx.Client, fake: FakeTarget, field: str) -> None:
    reply = ask(http, CHAT, n=2, **{field: True})
    prompt = list(fake.seen[-1].prompt_ids)
    assert reply["prompt_token_ids"] == prompt
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [prompt, prompt]
    assert ("token_ids" in reply["choices"][0]) is (field == "return_token_ids")
    chunks = ask(http, CHAT, stream=True, **{field: True})
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt] + [None] * (len(chunks) - 1)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == prompt


@pytest.mark.parametrize("echo", [False, True])
def test_each_completion_has_the_ids_of_its_prompt(
    http: httpx.Client, tokenizer: Tokenizer, echo: bool
) -> None:
    prompts = [tokenizer.encode(text).ids for text in ("The quick", "fox")]
    reply = ask(http, COMPLETIONS, return_token_ids=True, echo=echo)
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == prompts
    assert "prompt_token_ids" not in reply
    found: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in ask(http, COMPLETIONS, return_token_ids=True, echo=echo, stream=True):
        assert "prompt_token_ids" not in chunk
        for choice in chunk["choices"]:
            found[choice["index"]].append(choice.get("prompt_token_ids"))
    for index, prompt in enumerate(prompts):
        assert found[index] == [prompt] + [None] * (len(found[index]) - 1)


def test_generate_has_the_ids_of_its_prompt(http: httpx.Client) -> None:
    body = {"input_ids": [5, 6, 7], "return_prompt_token_ids": True, "sampling_params": {"max_new_tokens": 2}}
    assert http.post("/generate", json=body).json()["prompt_token_ids"] == [5, 6, 7]
    lines = http.post("/generate", json={**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [event.get("prompt_token_ids") for event in events[-2:]] == [None, [5, 6, 7]]


def test_no_ids_are_returned_unasked(http: httpx.Client) -> None:
    assert "prompt_token_ids" not in json.dumps([ask(http, path) for path in (CHAT, COMPLETIONS)])


@pytest.mark.parametrize("field", ["return_token_ids", "return_prompt_token_ids", "add_special_tokens"])
def test_responses_refuse_what_they_would_lack(http: httpx.Client, field: str) -> None:
    response = http.post("/v1/responses", json={"input": "x", field: True})
    assert (response.status_code, error_of(response)["param"]) == (400, field)


def test_extra_key_separates_prefixes_as_cache_salt_does(http: httpx.Client, fake: FakeTarget) -> None:
    ask(http, CHAT, extra_key="mine")
    assert fake.seen[-1].cache_salt == "mine"
    native = {"text": "x", "sampling_params": {"max_new_tokens": 1}, "extra_key": "yours"}
    assert http.post("/generate", json=native).status_code == 200
    assert fake.seen[-1].cache_salt == "yours"


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {"messages": TURNS}), ("/generate", {"text": "x"}), (COMPLETIONS, {"prompt": "x"})],
)
@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (
            {"extra_key": "a", "cache_salt": "b"},
            ("cache_salt", "cache_salt and extra_key differ. Set only one of them."),
        ),
        ({"extra_key": "x" * 257}, ("extra_key", "extra_key: must have at most 256 characters.")),
        ({"cache_salt": "x" * 257}, ("cache_salt", "cache_salt: must have at most 256 characters.")),
    ],
)
def test_errors_of_salts_name_the_field(
    http: httpx.Client, path: str, body: dict[str, Any], fields: dict[str, str], error: tuple[str, str]
) -> None:
    found = error_of(http.post(path, json={**body, **fields}))
    assert (found["param"], found["message"]) == error


@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ["x", "y"], "sampling_params": {"max_new_tokens": 1}}),
        (COMPLETIONS, {"prompt": ["x", "y"], "max_tokens": 1}),
    ],
)
def test_each_prompt_of_a_batch_may_have_its_own_salt(
    http: httpx.Client, fake: FakeTarget, path: str, body: dict[str, Any], field: str
) -> None:
    assert http.post(path, json={**body, field: ["mine", "yours"]}).status_code == 200
    assert {one.cache_salt: list(one.prompt_ids) for one in fake.seen[-2:]} == {
        "mine": http.post("/tokenize", json={"prompt": "x"}).json()["tokens"],
        "yours": http.post("/tokenize", json={"prompt": "y"}).json()["tokens"],
    }
    assert http.post(path, json={**body, field: "ours"}).status_code == 200
    assert [one.cache_salt for one in fake.seen[-2:]] == ["ours", "ours"]
    wrong = error_of(http.post(path, json={**body, field: ["mine"]}))
    assert wrong["message"] == f"{field} has 1 entries, but there are 2 prompts."
    wrong = error_of(http.post(path, json={**body, field: ["mine", "x" * 257]}))
    assert wrong["message"] == f"{field}: must have at most 256 characters."
    both = error_of(http.post(path, json={**body, "cache_salt": ["a", "b"], "extra_key": ["a", "c"]}))
    assert both["message"] == "cache_salt and extra_key differ. Set only one of them."


def test_prompts_with_their_own_salts_share_one_seed_and_keep_their_order(
    http: httpx.Client, fake: FakeTarget
) -> None:
    body = {"prompt": ["x", "y"], "max_tokens": 4, "n": 2, "cache_salt": ["mine", "yours"]}
    reply = http.post(COMPLETIONS, json={**body, "return_prompt_token_ids": True}).json()
    asked = fake.seen[-4:]
    assert len({one.sampling.seed for one in asked}) == 1
    assert {str(one.sampling.seed) for one in asked} == {reply["metadata"]["seed"]}
    assert sorted((one.cache_salt, one.sampling.choice_index) for one in asked) == [
        ("mine", 0),
        ("mine", 1),
        ("yours", 0),
        ("yours", 1),
    ]
    prompts = [choice["prompt_token_ids"] for choice in reply["choices"]]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert reply["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[2])


@pytest.mark.parametrize("field", ["lora_path", "custom_logit_processor", "image_data"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/generate", {"text": ["x", "y"]}), (COMPLETIONS, {"prompt": ["x", "y"]})],
)
def test_a_refused_field_with_null_for_each_prompt_asks_for_nothing(
    http: httpx.Client, path: str, body: dict[str, Any], field: str
) -> None:
    assert http.post(path, json={**body, field: [None, None]}).status_code == 200
    wrong = http.post(path, json={**body, field: [None, "a"]})
    assert (wrong.status_code, error_of(wrong)["param"]) == (400, field)
