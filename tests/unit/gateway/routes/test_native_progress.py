"""Streams of /generate: an event that is built piece by piece equals one that is encoded as a whole."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.services.gateway.request import Chunk, Started
from outrider.services.gateway.routes.logprobs import native_meta
from outrider.services.gateway.routes.native_progress import NativeProgress
from outrider.services.gateway.sse import encode_event, json_line
from outrider.shared.base.logit_rules import LogprobParams, TokenLogprob

CORE: Any = SimpleNamespace(token_bytes=lambda token: bytes([token]))
PROMPT = (65, 66, 67)
SCORE = TokenLogprob(-0.5, [97, 98], [-0.5, -1.5], [-3.0])
CHUNKS = [
    Chunk("", (), prompt_logprobs=[SCORE], prompt_ids=PROMPT),
    Chunk("", (), prompt_logprobs=[SCORE], prompt_ids=PROMPT),
    Chunk('a"\\', [97], logprobs=[SCORE], drafts=[(3, 1)]),
    Chunk("\u2028\n", [98, 99], logprobs=[SCORE, TokenLogprob(-1.0)], cached_tokens=2),
    Chunk("🦊\ud800", [], drafts=[(3, 2), (2, 1)]),
]


@pytest.mark.parametrize("with_text", [False, True])
@pytest.mark.parametrize(
    "wanted",
    [
        LogprobParams(),
        LogprobParams(top=0),
        LogprobParams(top=2, token_ids=(5,)),
        LogprobParams(top=2, prompt_top=0, prompt_start=1),
        LogprobParams(top=0, prompt_top=2, prompt_start=1, token_ids=(5,)),
    ],
)
def test_every_event_contains_the_whole_part_so_far(wanted: LogprobParams, with_text: bool) -> None:
    progress = NativeProgress(CORE, Started(3, 0, PROMPT), wanted, with_text)
    for count in range(len(CHUNKS) + 1):
        found = CHUNKS[:count]
        whole = {
            "text": "".join(one.text for one in found),
            "output_ids": [token for one in found for token in one.token_ids],
            "meta_info": {"id": "r"} | native_meta(CORE, wanted, PROMPT, found, with_text),
            "index": 0,
        }
        event = progress.event({"id": "r"}, {"index": 0})
        assert json.loads(event) == json.loads(json_line(whole))
        assert len(encode_event(event).splitlines()) == 2
        if count < len(CHUNKS):
            progress.add(CHUNKS[count])
    assert progress.event({"id": "r"}, {}).endswith("}}")
    assert (progress.num_tokens, progress.rounds.histogram) == (3, [0, 2, 1])
