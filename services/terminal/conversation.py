"""The state of a chat: messages, options and the last round. Saves the state to a file and loads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.shared.base.errors import InvalidRequestError

FORMAT = "outrider-chat/1"
SHAPE_OPTIONS = ("depth", "topk", "max_nodes")
OPTIONS: Mapping[str, Callable[[str], int | float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "max_tokens": int,
    **dict.fromkeys(SHAPE_OPTIONS, int),
}
"""Options that `/set` accepts, with the type of each. The server checks the ranges."""


@dataclass(slots=True)
class Conversation:
    """The messages and request options of one terminal chat.

    Attributes:
        options: Options of every request, by field name.
        mode: Speculation mode (auto, on or off), or None for the server's default.
        system: System prompt; empty for none.
        messages: The messages so far, without the system prompt.
        last_round: The last round of the last answer. None if that answer has no round.
        dropped_turns: Number of turns that were dropped because the context was full.
    """

    options: dict[str, int | float] = field(default_factory=dict)
    mode: str | None = None
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    last_round: dict[str, Any] | None = None
    dropped_turns: int = 0

    def set_option(self, name: str, value: str) -> None:
        """Set an option from text; the value `default` removes it.

        Raises:
            InvalidRequestError: If the name is unknown, or the value is not a number.
        """
        if name not in OPTIONS:
            known = ", ".join(OPTIONS)
            raise InvalidRequestError(f"{name!r} is not an option. Options: {known}.", field=name)
        if value == "default":
            self.options.pop(name, None)
            return
        try:
            self.options[name] = OPTIONS[name](value)
        except ValueError:
            kind = "a whole number" if OPTIONS[name] is int else "a number"
            raise InvalidRequestError(f"{name} must be {kind}, not {value!r}.", field=name) from None

    def request(self, trace: bool) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Return the messages and the options of the next request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        fields: dict[str, Any] = {k: v for k, v in self.options.items() if k not in SHAPE_OPTIONS}
        speculation: dict[str, Any] = {k: v for k, v in self.options.items() if k in SHAPE_OPTIONS}
        if self.mode:
            speculation["mode"] = self.mode
        if trace:
            speculation["trace"] = True
        if speculation:
            fields["speculation"] = speculation
        return [*system, *self.messages], fields

    def drop_oldest_turn(self) -> bool:
        """Remove the oldest question with its answer. Return False if only the newest question is left."""
        if len(self.messages) < 2:
            return False
        del self.messages[0]
        while len(self.messages) > 1 and self.messages[0]["role"] == "assistant":
            del self.messages[0]
        self.dropped_turns += 1
        return True

    def save(self, path: Path) -> None:
        """Write the chat to a file.

        Raises:
            InvalidRequestError: If the file cannot be written.
        """
        body = {
            "format": FORMAT,
            "system": self.system,
            "mode": self.mode,
            "options": self.options,
            "messages": self.messages,
        }
        try:
            path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequestError(f"{path} cannot be written: {error.strerror}.", field="/save") from None

    def load(self, path: Path) -> None:
        """Replace this chat by a saved one.

        Raises:
            InvalidRequestError: If the file cannot be read, or is not a saved chat.
        """
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidRequestError(f"{path} cannot be read: {error.strerror}.", field="/load") from None
        except ValueError:
            body = None
        if not isinstance(body, dict) or body.get("format") != FORMAT or not _are_messages(body):
            raise InvalidRequestError(f"{path} is not a chat that /save wrote.", field="/load")
        options = body.get("options")
        self.options = (
            {name: value for name, value in options.items() if name in OPTIONS and _is_number(value)}
            if isinstance(options, dict)
            else {}
        )
        self.mode = body.get("mode") if body.get("mode") in ("auto", "on", "off") else None
        self.system = str(body.get("system") or "")
        self.messages = [{"role": one["role"], "content": one["content"]} for one in body["messages"]]
        self.last_round = None
        self.dropped_turns = 0


def _are_messages(body: dict[str, Any]) -> bool:
    messages = body.get("messages")
    return isinstance(messages, list) and all(
        isinstance(one, dict)
        and one.get("role") in ("user", "assistant")
        and isinstance(one.get("content"), str)
        for one in messages
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
