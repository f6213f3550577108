"""Chat templates, compiled and rendered by Jinja in a sandbox.

Templates come from the model's folder, never from a client. A template is still untrusted code: the sandbox
hides Python's internals from it, and `render_process` limits its time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.services.gateway.templates.render_lines import MAX_OUTPUT_CHARS
from outrider.shared.base.errors import CheckpointError, InvalidRequestError

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_REASON_CHARS = 1000


class TemplateRefusal(TemplateError):
    """Raised when a template calls raise_exception to reject the messages."""


class Arguments(dict[str, Any]):
    """The arguments of a tool call, in a format that all chat templates can use.

    Some templates print the arguments as JSON, and other templates append them to text. This dictionary
    supports both uses.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, text: str) -> str:
        return text + str(self)

    def __add__(self, text: str) -> str:
        return str(self) + text


class GenerationBlock(Extension):
    """Supports ``{% generation %} … {% endgeneration %}``, which marks the assistant's tokens for training.

    For serving, the block renders its content unchanged.
    """

    tags = {"generation"}  # noqa: RUF012 - declared by Jinja as a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A compiled chat template.

    Only the size of the output is limited here. Compiling and rendering may take any time and memory, so the
    gateway does both in another process. `TemplateRenderer` is the gateway's side of it.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Compile a template.

        Args:
            source: The template's Jinja source.
            special_tokens: Maps names such as ``bos_token`` to special tokens. Templates can use these names.
            now: Returns the current time for the template's ``strftime_now``.

        Raises:
            CheckpointError: If the template is too long or not valid Jinja.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(
                f"The chat template has more than {MAX_TEMPLATE_CHARS} characters.", field="chat_template"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except (TemplateError, SyntaxError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"The chat template is not valid Jinja: {error}.", field="chat_template"
            ) from None
        except (RecursionError, MemoryError):
            raise CheckpointError(
                "The chat template cannot be compiled: it is too large or nested too deeply.",
                field="chat_template",
            ) from None
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str:
        """Render the chat template, and return the text of the prompt.

        Args:
            messages: Messages in order, each with ``role`` and ``content``.
            options: Additional variables for the template.
            add_generation_prompt: Whether the prompt ends with the header of the assistant's answer.

        Raises:
            InvalidRequestError: If the template rejects the messages, fails while rendering, or writes too
                much text.
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, **options}
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=[_with_arguments(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **variables,
            ):
                length += len(piece)
                if length > MAX_OUTPUT_CHARS:
                    raise SecurityError(f"its output is longer than {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except TemplateRefusal as error:
            raise InvalidRequestError(
                f"The model's chat template rejects these messages: {_reason(error)}.", field="messages"
            ) from None
        # A template that meets unexpected messages may raise any error.
        except Exception as error:
            raise InvalidRequestError(
                f"The model's chat template fails on these messages: {_reason(error)}.", field="messages"
            ) from None
        return "".join(pieces)


def _with_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the message. The arguments of its tool calls are `Arguments`."""
    copied = dict(message)
    if calls := copied.get("tool_calls"):
        copied["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": Arguments(call["function"]["arguments"])}}
            for call in calls
        ]
    return copied


def _reason(error: Exception) -> str:
    return str(error)[:MAX_REASON_CHARS] or type(error).__name__


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes for HTML, which would change prompts.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: object) -> None:
    raise TemplateRefusal(str(message))
