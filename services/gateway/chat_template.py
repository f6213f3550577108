"""Chat templates, rendered by Jinja in a restricted sandbox.

The sandbox provides the functions that published templates use, and limits the time and the output size of a
template. Templates come from the model's folder, never from a client. A template is still untrusted code.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent
from jinja2.parser import Parser

from outrider.services.gateway import template_bounds as bounds
from outrider.shared.base.errors import CheckpointError, InvalidRequestError

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_INDENT = 16
MAX_PATTERN_CHARS = 256


class TemplateRefusal(TemplateError):
    """Raised when a template calls raise_exception to reject the messages."""


class GenerationBlock(Extension):
    """Supports ``{% generation %} … {% endgeneration %}``, which marks the assistant's tokens for training.

    For serving, the block renders its content unchanged.
    """

    tags = {"generation"}  # noqa: RUF012 - declared by Jinja as a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A compiled chat template. Rendering is synchronous, so render long chats on a worker thread."""

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
        environment = bounds.BoundedSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = bounds.checked(_to_json)
        environment.filters["indent"] = bounds.checked(_indent)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern[:MAX_PATTERN_CHARS])
        try:
            self._template = environment.from_string(source)
        except (TemplateError, SyntaxError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"The chat template is not valid Jinja: {error}.", field="chat_template"
            ) from None
        except (RecursionError, MemoryError):
            raise CheckpointError(
                "The chat template cannot be compiled: it is nested too deeply.", field="chat_template"
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
            InvalidRequestError: If the template rejects the messages, fails while rendering, or exceeds its
                limits.
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, **options}
        # The template comes with the model and is not trusted, so its time and its output are limited.
        token = bounds.deadline.set(time.monotonic() + bounds.MAX_RENDER_S)
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **variables
            ):
                bounds.check_time()
                length += len(piece)
                if length > bounds.MAX_OUTPUT_CHARS:
                    raise SecurityError(f"its output is longer than {bounds.MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except TemplateRefusal as error:
            raise InvalidRequestError(
                f"The model's chat template rejects these messages: {error}.", field="messages"
            ) from None
        # A template that meets unexpected messages may raise any of these.
        except (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
            MemoryError,
        ) as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(
                f"The model's chat template fails on these messages: {reason}.", field="messages"
            ) from None
        finally:
            bounds.deadline.reset(token)
        return "".join(pieces)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Indent text as Jinja's own filter does, but limit the size of the result."""
    if (width if isinstance(width, int) else len(width)) * (text.count("\n") + 1) > bounds.MAX_OUTPUT_CHARS:
        raise SecurityError("a string is indented too far")
    return do_indent(text, width, first, blank)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes for HTML, which would change prompts.
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise SecurityError("a string is indented too far")
    return json.dumps(
        bounds.check_size(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: object) -> None:
    raise TemplateRefusal(str(message))
