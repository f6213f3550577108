"""Hidden states of a reply: the numbers of the JSON text, and its place in the reply."""

from __future__ import annotations

import json
import math
import struct

from outrider.services.gateway.request import Chunk, Completion, Finished, Usage
from outrider.services.gateway.requested_states import RequestedStates
from outrider.services.gateway.routes.states import StateTexts, choice_states
from outrider.shared.base.generation import FinishReason, SpeculationReport
from outrider.shared.base.token_states import StateParams, TokenStates

HIDDEN = RequestedStates(StateParams(hidden_states=True))
NUMBERS = [0.1, -1e-30, 3e38, -0.0, 1 / 3, 7.0, math.pi, -2.5e-7]


def completion(numbers: list[float], prompt_tokens: int, completion_tokens: int) -> Completion:
    """Return a sequence whose hidden states have two numbers per token, in two chunks."""
    data, count = struct.pack(f"<{len(numbers)}f", *numbers), len(numbers) // 2
    finished = Finished(
        FinishReason.STOP, None, Usage(prompt_tokens, completion_tokens), SpeculationReport(), 0.0
    )
    chunks = [TokenStates(0, 1, data[:8]), TokenStates(1, count - 1, data[8:])]
    return Completion(finished, 0, [Chunk("", (), states=one) for one in chunks])


async def test_the_numbers_of_json_are_exact() -> None:
    texts = StateTexts()
    one = completion(NUMBERS, prompt_tokens=2, completion_tokens=3)
    body = {"text": 'a"b', "meta_info": {"id": "x", **texts.native(one, HIDDEN)}, "more": [1]}
    reply = await texts.reply(body, {"x-test": "1"})
    assert reply.headers["x-test"] == "1"
    found = json.loads(reply.body)
    exact = [struct.unpack("<f", struct.pack("<f", number))[0] for number in NUMBERS]
    prompt, *answer = found["meta_info"]["hidden_states"]
    numbers = [number for row in [*prompt, *answer] for number in row]
    assert [struct.unpack("<f", struct.pack("<f", number))[0] for number in numbers] == exact
    assert (len(prompt), len(answer)) == (2, 2)
    assert (found["text"], found["more"]) == ('a"b', [1])


async def test_numbers_that_json_lacks_become_null() -> None:
    texts = StateTexts()
    one = completion([math.nan, math.inf, -math.inf, 1.0], prompt_tokens=2, completion_tokens=1)
    reply = await texts.reply(texts.native(one, HIDDEN), None)
    assert json.loads(reply.body) == {"hidden_states": [[[None, None], [None, 1]]]}
    assert choice_states(one, HIDDEN) == {"hidden_states": [None, 1.0]}


async def test_tokens_that_the_reply_lacks_have_no_states() -> None:
    one = completion(NUMBERS, prompt_tokens=2, completion_tokens=2)
    texts = StateTexts()
    found = json.loads((await texts.reply(texts.native(one, HIDDEN), None)).body)["hidden_states"]
    assert (len(found), len(found[0])) == (2, 2)
    assert choice_states(one, RequestedStates()) == {}
