"""The sandbox of chat templates: limits the time and the size of everything that a template can compute.

A template comes from the model's folder and is untrusted code. The sandbox enforces two rules:

1. Every call, lookup, arithmetic operation, filter and loop iteration checks the clock.
2. The size of every value that a template creates is limited. The size of a container includes all of its
   values. A value that occurs several times counts several times. This rule also limits the time of a single
   operation, such as a comparison.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import do_join, do_replace, do_round, do_sum
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_OUTPUT_CHARS = 4 * 1024 * 1024
MAX_PARTS = 200_000
"""Largest number of values in a container, including the values in nested containers."""
MAX_RENDER_S = 2.0
MAX_EXPONENT = 64
MAX_INTEGER_BITS = 8192
MAX_FIELD_CHARS = 9_999
MAX_PRECISION = 99
_WIDE_FIELD = re.compile(r"\d{5,}|\*")
# Filters and functions that can produce text or lists of any length from a number. Chat templates do not need
# such functions.
UNBOUNDED_FILTERS = ("batch", "center", "format", "pprint", "slice", "wordwrap", "urlize", "xmlattr")
UNBOUNDED_FUNCTIONS = ("lipsum",)
UNBOUNDED_METHODS = ("expandtabs", "translate", "maketrans")
_CONTAINERS = (list, tuple, dict, set, frozenset)
_VALUES = (str, bytes, int, float, list, tuple, dict)

deadline: ContextVar[float] = ContextVar("render_deadline")
"""Time at which the current rendering must end, from `time.monotonic`."""


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with bounds on time and sizes."""

    intercepted_binops = frozenset(["+", "*", "**", "%", "//", "/", "-"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=check_size, **options)
        for name in UNBOUNDED_FILTERS:
            del self.filters[name]
        for name in UNBOUNDED_FUNCTIONS:
            del self.globals[name]
        self.filters |= {
            "join": _join_filter(),
            "replace": _replace_filter(),
            "round": _round,
            "sum": _sum_filter(),
        }
        for name, filter_function in list(self.filters.items()):
            self.filters[name] = checked(filter_function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Bounding().visit(super()._parse(source, name, filename))
        return template

    def tick(self) -> bool:
        """Check the clock and return True. Compiled templates call this method in each turn of a loop."""
        check_time()
        return True

    def concatenate(self, *parts: Any) -> str:
        """Return the text of ``a ~ b``."""
        texts = [str(check_size(part)) for part in parts]
        _refuse_above(sum(map(len, texts)), MAX_OUTPUT_CHARS, "a string is too long")
        return "".join(texts)

    def bounded(self, value: Any) -> Any:
        """Check the size of a list, tuple or dictionary literal of a template, and return the value."""
        return check_size(value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left operator right``."""
        check_time()
        if operator == "**" and not (isinstance(right, int) and abs(right) <= MAX_EXPONENT):
            raise SecurityError(f"exponents above {MAX_EXPONENT} are not allowed")
        if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            _refuse_above(bits, MAX_INTEGER_BITS, "a number is too large")
        if operator == "%" and isinstance(left, str):
            _check_format(left, "%", right if isinstance(right, tuple) else (right,))
        if operator in ("*", "+"):
            sequences = [side for side in (left, right) if isinstance(side, (str, bytes, list, tuple))]
            count = max((side for side in (left, right) if isinstance(side, int)), default=1)
            length = sum(map(len, sequences)) * max(count, 1)
            most = (
                MAX_PARTS if any(isinstance(side, (list, tuple)) for side in sequences) else MAX_OUTPUT_CHARS
            )
            _refuse_above(length, most, "a string or list is too long")
        return check_size(super().call_binop(context, operator, left, right))

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method."""
        check_time()
        # Jinja wraps str.format. The attribute `__wrapped__` contains the original method.
        method = getattr(__obj, "__wrapped__", __obj)
        if isinstance(value := getattr(method, "__self__", None), _VALUES):
            args = _check_method(value, method.__name__, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        return result if isinstance(result, bool) else check_size(result)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up ``obj.attribute``."""
        check_time()
        return _check_length(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up ``obj[argument]``."""
        check_time()
        return _check_length(super().getitem(obj, argument))


class _Bounding(NodeTransformer):
    """Adds calls to the sandbox where Jinja makes no call itself: loops, ``~``, and container literals."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        tick = _call("tick", [], node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_call("tick", [], node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call("concatenate", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return _bounded(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _bounded(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _bounded(node) if node.ctx == "load" else node


def _bounded(node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Expr:
    """Return the literal, wrapped in a check of its size. Literals of constants need no check."""
    if all(isinstance(item, nodes.Const) for item in node.items):
        return node
    return _call("bounded", [node], node.lineno)


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(function, arguments, [], None, None, lineno=line)


def check_time() -> None:
    """Raise SecurityError if the rendering takes too long."""
    # Jinja also calls the sandbox while it compiles a template, to fold constants. No deadline is set then.
    until = deadline.get(None)
    if until is not None and time.monotonic() > until:
        raise SecurityError(f"it took longer than {MAX_RENDER_S:g} s")


def check_size(value: Any) -> Any:
    """Return `value`. Raise SecurityError if its size, including all values in it, is above the limit."""
    if not isinstance(value, _CONTAINERS):
        return _check_length(value)
    parts = chars = 0
    rest: list[Any] = [value]
    while rest:
        one = rest.pop()
        parts += 1
        if isinstance(one, dict):
            inner: Iterable[Any] = [*one.keys(), *one.values()]
        elif isinstance(one, _CONTAINERS):
            inner = one
        else:
            chars += len(one) if isinstance(one, (str, bytes)) else 0
            continue
        _refuse_above(parts + len(rest) + len(one), MAX_PARTS, "a list is too long")
        rest.extend(inner)
    _refuse_above(chars, MAX_OUTPUT_CHARS, "the texts in a list are too long")
    return value


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks the clock, runs `function`, and then checks the size of the result."""

    @functools.wraps(function)
    def with_checks(*args: Any, **kwargs: Any) -> Any:
        check_time()
        return check_size(function(*args, **kwargs))

    return with_checks


def _check_length(value: Any) -> Any:
    if isinstance(value, (str, bytes)):
        _refuse_above(len(value), MAX_OUTPUT_CHARS, "a string is too long")
    return value


def _refuse_above(size: int, most: int, what: str) -> None:
    if size > most:
        raise SecurityError(what)


def _check_method(value: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Check a method's arguments before the method runs. Return the arguments, with iterators as lists."""
    given = (*args, *kwargs.values())
    if any(isinstance(argument, int) and argument > MAX_FIELD_CHARS for argument in given):
        raise SecurityError("a string is padded too far")
    if name in UNBOUNDED_METHODS:
        raise SecurityError(f"the method {name} is not allowed")
    if not isinstance(value, (str, bytes)):
        return args
    if name in ("format", "format_map"):
        _check_format(str(value), "{", given)
    elif name == "replace" and len(args) >= 2:
        _check_replaced(value, args[0], args[1])
    elif name == "join" and args:
        parts = list(_counted(args[0]))
        _refuse_above(_joined_length(value, parts), MAX_OUTPUT_CHARS, "a string is too long")
        return (parts, *args[1:])
    return args


def _check_format(text: str, mark: str, arguments: Iterable[Any]) -> None:
    """Refuse a format string whose result could be too long.

    The estimate assumes that every mark is replaced by all arguments together. A digit in the string may be a
    width. The estimate then also adds the largest padding to every mark.
    """
    if _WIDE_FIELD.search(text):
        raise SecurityError("a format width is too large")
    longest = sum(len(str(check_size(argument))) for argument in arguments)
    width = MAX_FIELD_CHARS if re.search(r"\d", text) else 0
    _refuse_above(len(text) + text.count(mark) * (longest + width), MAX_OUTPUT_CHARS, "a string is too long")


def _check_replaced(text: Any, old: Any, new: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        length = len(text) + text.count(old) * max(0, len(new) - len(old))
        _refuse_above(length, MAX_OUTPUT_CHARS, "a string is too long")


def _counted(parts: Iterable[Any]) -> Iterable[Any]:
    for number, part in enumerate(parts):
        _refuse_above(number, MAX_PARTS, "a list is too long")
        yield part


def _joined_length(separator: Any, parts: list[Any]) -> int:
    return len(separator) * len(parts) + sum(len(part) for part in parts if isinstance(part, (str, bytes)))


def _join_filter() -> Callable[..., str]:
    @functools.wraps(do_join)
    def join(eval_ctx: Any, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
        parts = check_size(list(_counted(value)))
        # The length of a part that is not a string is at most that of its text, which is limited too.
        _refuse_above(
            _joined_length(str(d), [str(part) for part in parts]), MAX_OUTPUT_CHARS, "a string is too long"
        )
        return str(do_join(eval_ctx, parts, d, attribute))

    return join


def _replace_filter() -> Callable[..., str]:
    @functools.wraps(do_replace)
    def replace(eval_ctx: Any, s: str, old: str, new: str, count: int | None = None) -> str:
        _check_replaced(str(s), str(old), str(new))
        return str(do_replace(eval_ctx, s, old, new, count))

    return replace


def _sum_filter() -> Callable[..., Any]:
    @functools.wraps(do_sum)
    def total(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, (int, float)):
            raise SecurityError("only numbers can be summed")
        return do_sum(environment, iterable, attribute, start)

    return total


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    _refuse_above(abs(precision), MAX_PRECISION, "a number is rounded too finely")
    return do_round(value, precision, method)
