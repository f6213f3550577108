"""Chat templates, rendered by Jinja in a restricted sandbox.

The sandbox provides the functions that published templates use, and limits a template's time and output size.
Templates come from the model's folder, never from a client. A template is still untrusted code.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.shared.base.errors import CheckpointError, InvalidRequestError

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_OUTPUT_CHARS = 4 * 1024 * 1024
MAX_RENDER_S = 2.0
MAX_EXPONENT = 64
MAX_FIELD_CHARS = 9_999
MAX_INDENT = 16
_WIDE_FIELD = re.compile(r"\d{5,}|\*")
# Filters that can produce text of any length from a number. Chat templates do not need such filters.
UNBOUNDED_FILTERS = ("center", "format", "wordwrap", "urlize", "xmlattr")

_deadline: ContextVar[float] = ContextVar("render_deadline")


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


class _Sandbox(ImmutableSandboxedEnvironment):
    """Checks the time limit at every call, lookup and arithmetic operation, and checks sizes in advance."""

    intercepted_binops = frozenset(["+", "*", "**", "%", "//", "/", "-"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_time()
        if operator == "**" and not (isinstance(right, int) and abs(right) <= MAX_EXPONENT):
            raise SecurityError(f"exponents above {MAX_EXPONENT} are not allowed")
        if operator == "%" and isinstance(left, str) and _WIDE_FIELD.search(left):
            raise SecurityError("a format width is too large")
        if operator == "*" and any(isinstance(side, (str, list, tuple)) for side in (left, right)):
            length = max(len(side) for side in (left, right) if isinstance(side, (str, list, tuple)))
            count = max((side for side in (left, right) if isinstance(side, int)), default=0)
            if length * count > MAX_OUTPUT_CHARS:
                raise SecurityError("a repeated string or list is too long")
        return _check_size(super().call_binop(context, operator, left, right))

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        # Padding and formatting methods of strings can produce arbitrarily long text from one number.
        # Jinja wraps str.format. The method itself is in `__wrapped__`.
        method = getattr(__obj, "__wrapped__", __obj)
        if isinstance(text := getattr(method, "__self__", None), str):
            if any(
                isinstance(argument, int) and argument > MAX_FIELD_CHARS
                for argument in (*args, *kwargs.values())
            ):
                raise SecurityError("a string is padded too far")
            if method.__name__ in ("format", "format_map") and _WIDE_FIELD.search(text):
                raise SecurityError("a format width is too large")
        return _check_size(super().call(__context, __obj, *args, **kwargs))

    def getattr(self, obj: Any, attribute: str) -> Any:
        _check_time()
        return _check_size(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        _check_time()
        return _check_size(super().getitem(obj, argument))


class ChatTemplate:
    """A compiled chat template. Rendering is synchronous, so render long chats on a worker thread."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Compile a template.

        Args:
            source: The template's Jinja source.
            special_tokens: Maps names such as ``bos_token`` to special tokens. Templates can use these names.
            now: Clock for the template's ``strftime_now``.

        Raises:
            CheckpointError: If the template is too long or not valid Jinja.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(
                f"The chat template has more than {MAX_TEMPLATE_CHARS} characters.", field="chat_template"
            )
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        for name in UNBOUNDED_FILTERS:
            del environment.filters[name]
        environment.filters["tojson"] = _to_json
        environment.filters["indent"] = _indent
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointError(
                f"The chat template is not valid Jinja: {error}.", field="chat_template"
            ) from None
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of the prompt.

        Args:
            messages: Messages in order, each with ``role`` and ``content``.
            options: Additional variables for the template.
            add_generation_prompt: Whether to end with the header of the assistant's answer.

        Raises:
            InvalidRequestError: If the template rejects the messages, fails while rendering, or exceeds its
                limits.
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, **options}
        token = _deadline.set(time.monotonic() + MAX_RENDER_S)
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **variables
            ):
                _check_time()
                length += len(piece)
                if length > MAX_OUTPUT_CHARS:
                    raise SecurityError(f"its output is longer than {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except TemplateRefusal as error:
            raise InvalidRequestError(
                f"The model's chat template rejects these messages: {error}.", field="messages"
            ) from None
        except (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            raise InvalidRequestError(
                f"The model's chat template fails on these messages: {error}.", field="messages"
            ) from None
        finally:
            _deadline.reset(token)
        return "".join(pieces)


def _check_time() -> None:
    # Constant folding calls the sandbox while a template is compiled. No deadline is set at that time.
    deadline = _deadline.get(None)
    if deadline is not None and time.monotonic() > deadline:
        raise SecurityError(f"it took longer than {MAX_RENDER_S:g} s")


def _check_size(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_OUTPUT_CHARS:
        raise SecurityError("a string is too long")
    return value


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Indent like Jinja's own filter, with a limit on the size of the result."""
    if (width if isinstance(width, int) else len(width)) * (text.count("\n") + 1) > MAX_OUTPUT_CHARS:
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
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: object) -> None:
    raise TemplateRefusal(str(message))
