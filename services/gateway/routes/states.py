"""Builds the fields of replies that contain hidden states and routed experts, as SGLang names them."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from outrider.services.gateway.errors import JsonResponse
from outrider.services.gateway.request import Completion
from outrider.services.gateway.requested_states import NUMBER_BYTES, RequestedStates
from outrider.shared.base.token_states import TokenStates

NUMBERS_AT_ONCE = 1 << 14
"""Numbers that are written before other requests get a turn. Writing them takes a few milliseconds."""


class StateTexts:
    """Writes the hidden states of tokens into a reply.

    A reply can contain millions of numbers. Writing all of them at once would stop all other requests for
    seconds. The body of a reply is therefore built with placeholders. `reply` replaces them part by part, and
    lets other requests run in between.
    """

    def __init__(self) -> None:
        self._states: dict[str, tuple[TokenStates, int]] = {}

    def native(self, one: Completion, wanted: RequestedStates) -> dict[str, Any]:
        """Return the state fields of SGLang's `meta_info`. Empty if the client wants no states.

        The field `hidden_states` is a list. Its first entry is for the prompt and contains one list of
        numbers per prompt token. Each further entry is the list of numbers of one token of the answer. The
        last token of the answer has no entry.
        """
        fields = _experts(one, wanted)
        if wanted.wanted.hidden_states:
            name = f"@{uuid.uuid4().hex}"
            self._states[name] = one.states, one.finished.usage.prompt_tokens
            fields["hidden_states"] = name
        return fields

    async def reply(self, body: Any, headers: Mapping[str, str] | None) -> Response:
        """Return the reply with this body, in which all placeholders are replaced."""
        if not self._states:
            return JsonResponse(body, headers=headers)
        text = json.dumps(body, allow_nan=False, separators=(",", ":"))
        parts: list[str] = []
        for name, (states, prompt_len) in self._states.items():
            before, _, text = text.partition(f'"{name}"')
            parts += [before, await _native_text(states, prompt_len)]
        parts.append(text)
        return Response("".join(parts), media_type="application/json", headers=dict(headers or {}))


def choice_states(one: Completion, wanted: RequestedStates) -> dict[str, Any]:
    """Return the state fields of a choice in OpenAI's APIs. Empty if the client wants no states.

    As in SGLang, the field `hidden_states` is a single list of numbers. They are the hidden state of the
    second-to-last token of the answer.
    """
    experts = _experts(one, wanted)
    fields: dict[str, Any] = {"sgl_ext": experts} if experts else {}
    if wanted.wanted.hidden_states:
        states = one.states
        last = states.between(states.stop - 1, states.stop)
        numbers = memoryview(last.hidden_states).cast("f").tolist() if last is not None else []
        fields["hidden_states"] = [number if math.isfinite(number) else None for number in numbers]
    return fields


def _experts(one: Completion, wanted: RequestedStates) -> dict[str, Any]:
    if not wanted.wanted.routed_experts:
        return {}
    states = one.states.between(wanted.experts_start, one.states.stop)
    data = b"" if states is None else states.routed_experts
    return {"routed_experts": base64.b64encode(data).decode("ascii")}


async def _native_text(states: TokenStates, prompt_len: int) -> str:
    """Return the hidden states in SGLang's format, as JSON."""
    if not states.count:
        return "[]"
    width = len(states.hidden_states) // states.count
    form = "[" + ",".join(["%.9g"] * (width // NUMBER_BYTES)) + "]"
    rows: list[str] = []
    written = 0
    for at in range(0, len(states.hidden_states), width):
        row = form % tuple(memoryview(states.hidden_states)[at : at + width].cast("f"))
        rows.append(row.replace("nan", "null").replace("-inf", "null").replace("inf", "null"))
        written += width // NUMBER_BYTES
        if written >= NUMBERS_AT_ONCE:
            written = 0
            await asyncio.sleep(0)
    prompt = max(0, prompt_len - states.first)
    return "[" + ",".join([f"[{','.join(rows[:prompt])}]", *rows[prompt:]]) + "]"
