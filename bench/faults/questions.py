"""Requests whose answers never change, so that every answer can be compared with the first one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.bench.load.samplings import GREEDY, SAMPLINGS
from outrider.bench.measure.prompts import HELDOUT_PROMPTS, load_prompts

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
FIRST_ID = 10
"""Lowest token id of random prompts. Lower ids are often special tokens."""
PROMPT_TOKENS = (1, 5, 60, 300, 700)
ANSWER_TOKENS = (2, 16, 48, 96)
CHATS = 10
SHARED_PREFIXES, SHARED_TOKENS, TAIL_TOKENS = 3, 400, (1, 8, 40)
SEED = 7
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SPECULATIONS: Sequence[Mapping[str, Any]] = (
    {"mode": "off"},
    {"mode": "auto"},
    {"mode": "auto"},
    {"mode": "on"},
    {"mode": "on", "depth": 3, "topk": 1, "max_nodes": 4},
    {"mode": "on", "depth": 2, "topk": 3, "max_nodes": 8},
    {"mode": "on", "depth": 5, "topk": 8, "max_nodes": 32},
    {"mode": "on", "trace": True},
)
"""Objects among which each request chooses. None of them changes an answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request for a test, without the fields `speculation` and `stream`.

    Attributes:
        kind: The feature that the request tests, such as ``schema``.
        path: URL path (route) to which the request is sent.
        body: All fields except `speculation` and `stream`. The request is greedy or has a seed.
    """

    kind: str
    path: str
    body: Mapping[str, Any]

    def sent(self, speculation: Mapping[str, Any], stream: bool) -> dict[str, Any]:
        """Return the body of one request."""
        return {**self.body, "speculation": dict(speculation), "stream": stream}


def soak_questions(vocab: int, longest: int, seed: int) -> list[Question]:
    """Return requests that differ in route, lengths, sampling, penalties, constraints and number of answers.

    Args:
        vocab: All token ids of the prompts are below this number.
        longest: Largest number of tokens of a prompt and its answer.
        seed: Seed of the prompts.
    """
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(FIRST_ID, vocab) for _ in range(count)]

    questions = [*_random_prompts(tokens, draw), *_shared_prompts(tokens, draw), *_chats(draw)]
    return [question for question in questions if _length(question) <= longest]


def _random_prompts(tokens: Any, draw: random.Random) -> Iterator[Question]:
    for sampling in (GREEDY, *SAMPLINGS.values()):
        for length in PROMPT_TOKENS:
            fields = {**sampling, "seed": SEED, "max_new_tokens": draw.choice(ANSWER_TOKENS)}
            fields["ignore_eos"] = draw.random() < 0.5
            yield Question("random", GENERATE, {"input_ids": tokens(length), "sampling_params": fields})


def _shared_prompts(tokens: Any, draw: random.Random) -> Iterator[Question]:
    for _ in range(SHARED_PREFIXES):
        prefix = tokens(SHARED_TOKENS)
        for tail in TAIL_TOKENS:
            fields = {**GREEDY, "max_new_tokens": draw.choice(ANSWER_TOKENS), "ignore_eos": True}
            body = {"input_ids": prefix + tokens(tail), "sampling_params": fields}
            yield Question("shared prefix", GENERATE, body)
    yield Question(
        "several answers",
        COMPLETIONS,
        {"prompt": tokens(50), "max_tokens": 32, "n": 3, "temperature": 0.8, "seed": SEED},
    )


def _chats(draw: random.Random) -> Iterator[Question]:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    extras: Mapping[str, Mapping[str, Any]] = {
        "chat": {},
        "penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.1},
        "bias": {"logit_bias": {"65": 2.0, "70": -5.0}, "logprobs": True, "top_logprobs": 3},
        "schema": {"response_format": form},
        "stop": {"stop": ["e ", "th"]},
        "several answers": {"n": 2},
    }
    for index, messages in enumerate(load_prompts(HELDOUT_PROMPTS, CHATS)):
        for kind, extra in extras.items():
            sampling = {"temperature": 0.0 if index % 2 else 0.9, "seed": SEED + index}
            body = {"messages": messages, "max_tokens": draw.choice(ANSWER_TOKENS), **sampling, **extra}
            yield Question(kind, CHAT, body)


def _length(question: Question) -> int:
    """Return the number of tokens of a prompt of token ids and its answer. 0 for texts, which are short."""
    new = question.body.get("max_tokens") or question.body.get("sampling_params", {}).get("max_new_tokens")
    return len(question.body.get("input_ids", ())) + int(new)
