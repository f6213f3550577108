"""Builds the output items of a response, and the events of its stream, from the pieces of an answer."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from outrider.services.gateway.parsers.pieces import Piece, Reasoning, Text, ToolCallArguments, ToolCallStart

Event = dict[str, Any]


@dataclass(slots=True)
class ItemWriter:
    """Converts pieces to output items. When the type of the pieces changes, a new item begins.

    Attributes:
        items: Items in order. The last item stays open until the next item begins or `finish` is called.
    """

    items: list[dict[str, Any]] = field(default_factory=list)
    _open: bool = False

    def push(self, piece: Piece) -> list[Event]:
        """Add a piece and return its events, without sequence numbers."""
        match piece:
            case Text(text=text):
                return [*self._part("message"), self._delta("response.output_text.delta", text)]
            case Reasoning(text=text):
                return [*self._part("reasoning"), self._delta("response.reasoning_text.delta", text)]
            case ToolCallStart(id=call_id, name=name):
                call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
                return [*self.finish(), self._begin("fc", call)]
            case ToolCallArguments(text=text):
                self._item["arguments"] += text
                return [self._event("response.function_call_arguments.delta", delta=text)]

    def finish(self, status: str = "completed") -> list[Event]:
        """Close the open item and return its events.

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
        extra: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        return [
            self._event(f"response.{part['type']}.done", content_index=0, text=part["text"], **extra),
            self._event("response.content_part.done", content_index=0, part=part),
            done,
        ]

    @property
    def _item(self) -> dict[str, Any]:
        return self.items[-1]

    def _part(self, kind: str) -> list[Event]:
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
            self._event("response.content_part.added", content_index=0, part=dict(part)),
        ]
        return events

    def _begin(self, prefix: str, item: dict[str, Any]) -> Event:
        self.items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item})
        self._open = True
        return {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": dict(self._item),
        }

    def _delta(self, kind: str, text: str) -> Event:
        self._item["content"][0]["text"] += text
        extra: dict[str, Any] = {"logprobs": []} if kind == "response.output_text.delta" else {}
        return self._event(kind, content_index=0, delta=text, **extra)

    def _event(self, kind: str, **fields: Any) -> Event:
        place: dict[str, Any] = {"output_index": len(self.items) - 1}
        if kind != "response.output_item.done":
            place["item_id"] = self._item["id"]
        return {"type": kind, **place, **fields}
