"""Builds the output items of a response, and the events of its stream, from the pieces of an answer."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.services.gateway.parsers.pieces import Piece, Reasoning, Text, ToolCallArguments, ToolCallStart
from outrider.shared.base.logit_rules import TokenLogprob

ResponseEvent = dict[str, Any]
Logprobs = list[dict[str, Any]]
ItemLogprobsOf = Callable[[Sequence[tuple[int, TokenLogprob]]], Logprobs]
"""Returns the `logprobs` of a text's tokens, in the format of a chat reply."""


@dataclass(slots=True)
class ItemWriter:
    """Converts the pieces of an answer to output items of OpenAI's Responses API.

    When the type of the pieces changes, a new item begins.

    Attributes:
        logprobs_of: Function that formats the logprobs of a text's tokens.
        items: Items in order. The last item stays open until the next item begins or `finish` is called.
    """

    logprobs_of: ItemLogprobsOf = lambda tokens: []
    items: list[dict[str, Any]] = field(default_factory=list)
    _open: bool = False

    def push(self, piece: Piece) -> list[ResponseEvent]:
        """Add a piece and return its events, without sequence numbers."""
        match piece:
            case Text(text=text, tokens=tokens):
                return [*self._part("message"), self._text(text, self.logprobs_of(tokens))]
            case Reasoning(text=text):
                begun = self._part("reasoning")
                self._item["content"][0]["text"] += text
                return [*begun, self._event("response.reasoning_text.delta", content_index=0, delta=text)]
            case ToolCallStart(id=call_id, name=name):
                call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
                return [*self.finish(), self._begin("fc", call)]
            case ToolCallArguments(text=text):
                self._item["arguments"] += text
                return [self._event("response.function_call_arguments.delta", delta=text)]

    def finish(self, status: str = "completed") -> list[ResponseEvent]:
        """Close the open output item and return its events.

        Args:
            status: Status of the item: ``completed``, or ``incomplete`` if the answer was cut off in the
                item.
        """
        if not self._open:
            return []
        self._open = False
        item = self._item
        item["status"] = status
        done = self._event("response.output_item.done", item=item)
        if item["type"] == "function_call":
            arguments = self._event(
                "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
            )
            return [arguments, done]
        part = item["content"][0]
        extra = {"logprobs": _of_event(part["logprobs"])} if part["type"] == "output_text" else {}
        return [
            self._event(f"response.{part['type']}.done", content_index=0, text=part["text"], **extra),
            self._event("response.content_part.done", content_index=0, part=part),
            done,
        ]

    @property
    def _item(self) -> dict[str, Any]:
        return self.items[-1]

    def _part(self, kind: str) -> list[ResponseEvent]:
        """Return the events that open an item of type `kind`. Empty if such an item is open already."""
        if self._open and self._item["type"] == kind:
            return []
        events = self.finish()
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            added = self._begin("msg", {"type": kind, "role": "assistant", "content": []})
        else:
            part = {"type": "reasoning_text", "text": ""}
            added = self._begin("rs", {"type": kind, "summary": [], "content": []})
        self._item["content"] = [part]
        events += [
            added,
            self._event("response.content_part.added", content_index=0, part=copy.deepcopy(part)),
        ]
        return events

    def _begin(self, prefix: str, item: dict[str, Any]) -> ResponseEvent:
        self.items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item})
        self._open = True
        return {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": copy.deepcopy(self._item),
        }

    def _text(self, text: str, logprobs: Logprobs) -> ResponseEvent:
        part = self._item["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        return self._event(
            "response.output_text.delta", content_index=0, delta=text, logprobs=_of_event(logprobs)
        )

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        place: dict[str, Any] = {"output_index": len(self.items) - 1}
        if kind != "response.output_item.done":
            place["item_id"] = self._item["id"]
        return {"type": kind, **place, **fields}


def _of_event(logprobs: Logprobs) -> Logprobs:
    """Return logprobs in the format of OpenAI's events: the format of the items, without bytes."""
    return [
        {
            "token": one["token"],
            "logprob": one["logprob"],
            "top_logprobs": [
                {"token": top["token"], "logprob": top["logprob"]} for top in one["top_logprobs"]
            ],
        }
        for one in logprobs
    ]
