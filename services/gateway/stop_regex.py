"""Finds matches of regular expressions in generated text, in bounded time per character.

Patterns have the syntax of Python's `re`, as in SGLang. They become one automaton, which reads the text once.
Parts that no automaton can match, such as backreferences and look-around, are refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

# Python's parser of regular expressions and its table of letters have no public names.
from re import _casefix as sre_casefix  # type: ignore[attr-defined]
from re import _parser as sre_parse  # type: ignore[attr-defined]
from typing import Any

from outrider.shared.base.errors import InvalidRequestError

MAX_NODES = 1024
"""Largest automaton, including the parts of its classes of characters. It bounds the time per character."""
MAX_CACHED_STATES, MAX_CACHED_MOVES = 128, 4096
SPECIAL_CHARACTERS = frozenset(r".^$*+?{}[]\|()")
_UNSUPPORTED = {
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a conditional group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
    "ATOMIC_GROUP": "an atomic group",
}

Accepts = Callable[[str], bool]


def is_plain(pattern: str) -> bool:
    """Return whether a pattern contains no special characters, so that it matches only itself."""
    return SPECIAL_CHARACTERS.isdisjoint(pattern)


@lru_cache(maxsize=32)
def compile_stops(patterns: tuple[str, ...]) -> StopAutomaton:
    """Return the automaton of some patterns. The results for recent patterns are kept.

    Raises:
        InvalidRequestError: If a pattern is invalid, or no automaton can match it, or the automaton would
            have more than `MAX_NODES` nodes. The error's field is ``stop_regex``.
    """
    automaton = StopAutomaton(patterns)
    for pattern in patterns:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = sre_parse.parse(pattern)
            automaton.add(pattern, tree)
        except (re.error, OverflowError, RecursionError, ValueError) as error:
            reason = "is nested too deeply" if isinstance(error, RecursionError) else f"is not valid: {error}"
            raise InvalidRequestError(
                f"stop_regex: the pattern {pattern[:64]!r} {reason}.", field="stop_regex"
            ) from None
    return automaton


class _Node:
    """A node of the automaton.

    Attributes:
        accepts: Decides whether the node consumes a character. None if it consumes none.
        needs: Decides, from the characters before and after a position, whether it may be passed.
        to: The next nodes.
        pattern: Index of the pattern that ends here. -1 for all other nodes.
    """

    __slots__ = ("accepts", "needs", "pattern", "to")

    def __init__(self) -> None:
        self.accepts: Accepts | None = None
        self.needs: Callable[[str, str], bool] | None = None
        self.to: list[_Node] = []
        self.pattern = -1


class _State:
    """The nodes that the text so far can reach, and the kind of its last character.

    `moves` maps the next character to the next state, or to the index of a pattern that has matched. `at_end`
    is the index of a pattern that matches if the text ends here, or -1. It is None until it is needed.
    """

    __slots__ = ("at_end", "before", "moves", "nodes")

    def __init__(self, nodes: frozenset[_Node], before: str) -> None:
        self.nodes = nodes
        self.before = before
        self.moves: dict[str, _State | int] = {}
        self.at_end: int | None = None


class StopAutomaton:
    """A nondeterministic automaton of all patterns. The states that texts reach are cached."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = patterns
        self._start = _Node()
        self._num_nodes = 1
        self._classes: set[Accepts] = set()
        self._states: dict[tuple[frozenset[_Node], str], _State] = {}
        self._num_moves = 0

    def add(self, pattern: str, tree: Any) -> None:
        """Add a pattern. `tree` is its parsed form.

        Raises:
            ValueError: If the automaton cannot match the pattern, or becomes too large.
        """
        end = self._node()
        end.pattern = self.patterns.index(pattern)
        self._start.to.append(self._sequence(tree, end, tree.state.flags))

    def start(self, before: str = "") -> _State:
        """Return the state before a text. `before` is the character before the text, if there is one."""
        return self._state(frozenset([self._start]), _kind(before))

    def advance(self, state: _State, text: str) -> _State | int:
        """Read text. Return the next state, or the index of the first pattern with a match.

        A match may end anywhere in `text`. The end of `text` counts as the end of the whole text.
        """
        before = state
        for character in text:
            before = state
            move = self._moved(state, character)
            if isinstance(move, int):
                return move
            state = move
        last = state
        if text.endswith("\n"):
            # `$` also matches before a line break at the end of the text. More text ends such a match.
            move = self._moved(before, "\n", "\n$")
            if isinstance(move, int):
                return move
            last = move
        if last.at_end is None:
            ends = (node.pattern for node in self._reached(last, "") if node.pattern >= 0)
            last.at_end = min(ends, default=-1)
        return state if last.at_end < 0 else last.at_end

    def _moved(self, state: _State, character: str, key: str = "") -> _State | int:
        """Return the next state, or the index of the first pattern with a match."""
        move = state.moves.get(key or character)
        return self._move(state, character, key or character) if move is None else move

    def _move(self, state: _State, character: str, key: str) -> _State | int:
        nodes = {self._start}
        found = -1
        answers: dict[Accepts, bool] = {}
        for node in self._reached(state, key):
            if node.pattern >= 0:
                found = node.pattern if found < 0 else min(found, node.pattern)
            elif (accepts := node.accepts) is not None:
                answer = answers.get(accepts)
                if answer is None:
                    answer = answers[accepts] = accepts(character)
                if answer:
                    nodes.update(node.to)
        move: _State | int = self._state(frozenset(nodes), _kind(character)) if found < 0 else found
        self._num_moves += 1
        if self._num_moves > MAX_CACHED_MOVES or len(self._states) > MAX_CACHED_STATES:
            self._states.clear()
            self._num_moves = 0
        state.moves[key] = move
        return move

    def _state(self, nodes: frozenset[_Node], before: str) -> _State:
        return self._states.setdefault((nodes, before), _State(nodes, before))

    def _reached(self, state: _State, after: str) -> Iterable[_Node]:
        """Return the nodes that a state reaches without a character. `after` is the next character."""
        seen = set(state.nodes)
        waiting = list(seen)
        while waiting:
            node = waiting.pop()
            if node.accepts is None and (node.needs is None or node.needs(state.before, after)):
                for other in node.to:
                    if other not in seen:
                        seen.add(other)
                        waiting.append(other)
        return seen

    def _node(self, size: int = 1) -> _Node:
        self._num_nodes += size
        if self._num_nodes > MAX_NODES:
            raise ValueError(
                f"the patterns together have more than {MAX_NODES} parts. A part that is repeated n times "
                "counts n times"
            )
        return _Node()

    def _sequence(self, items: Iterable[Any], to: _Node, flags: int) -> _Node:
        """Return the first node of some items, which are followed by the node `to`."""
        for kind, value in reversed(list(items)):
            to = self._item(str(kind), value, to, flags)
        return to

    def _item(self, kind: str, value: Any, to: _Node, flags: int) -> _Node:
        match kind:
            case "SUBPATTERN":
                _, added, removed, items = value
                if added & _ALPHABETS:
                    flags &= ~_ALPHABETS
                return self._sequence(items, to, (flags | added) & ~removed)
            case "BRANCH":
                node = self._node()
                node.to = [self._sequence(items, to, flags) for items in value[1]]
                return node
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, items = value
                return self._repeat(least, most, items, to, flags)
            case "AT":
                node = self._node()
                positions = _ASCII_POSITIONS if flags & re.ASCII else _POSITIONS
                node.needs = positions[str(value), bool(flags & re.MULTILINE)]
            case _ if kind in _UNSUPPORTED:
                raise ValueError(f"{_UNSUPPORTED[kind]} is not supported")
            case _:
                relevant = flags & (re.IGNORECASE | re.ASCII | re.DOTALL)
                accepts = _accepts(kind, _hashable(value), relevant)
                node = self._node(len(value) if kind == "IN" and accepts not in self._classes else 1)
                node.accepts = accepts
                self._classes.add(accepts)
        node.to = [to]
        return node

    def _repeat(self, least: int, most: int, items: Any, to: _Node, flags: int) -> _Node:
        if most == sre_parse.MAXREPEAT:
            loop = self._node()
            loop.to = [self._sequence(items, loop, flags), to]
            to = loop
        else:
            after = to
            for _ in range(most - least):
                skip = self._node()
                skip.to = [self._sequence(items, to, flags), after]
                to = skip
        for _ in range(least):
            first = self._sequence(items, to, flags)
            if first is to:  # the items are empty
                break
            to = first
        return to


class StopSearch:
    """Searches the text of one sequence, token by token."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        """Create a search.

        Raises:
            InvalidRequestError: For the reasons of `compile_stops`.
        """
        self._automaton = compile_stops(patterns)
        self._state = self._automaton.start()

    def push(self, text: str) -> str | None:
        """Read the text of the next token. Return the pattern that the text so far matches, or None.

        After a match, the search goes on behind `text`, and the match before is forgotten. An empty `text`
        never completes a match.
        """
        if not text:
            return None
        found = self._automaton.advance(self._state, text)
        if isinstance(found, int):
            self._state = self._automaton.start(text[-1])
            return self._automaton.patterns[found]
        self._state = found
        return None


def _hashable(value: Any) -> Any:
    return tuple((str(kind), one) for kind, one in value) if isinstance(value, list) else value


@lru_cache(maxsize=256)
def _accepts(kind: str, value: Any, flags: int) -> Accepts:
    """Return the function that decides whether an item of one character matches a character."""
    if kind == "ANY":
        return (lambda character: True) if flags & re.DOTALL else (lambda character: character != "\n")
    if kind in ("LITERAL", "NOT_LITERAL"):
        value = (("LITERAL", value),)
    elif kind != "IN":
        raise ValueError(f"{kind.lower()} is not supported")
    negated = kind == "NOT_LITERAL" or value[0][0] == "NEGATE"
    members = [_member(which, one, flags) for which, one in value if which != "NEGATE"]

    def accepts(character: str) -> bool:
        forms = _cases(character, bool(flags & re.ASCII)) if flags & re.IGNORECASE else {character}
        return any(member(form) for member in members for form in forms) is not negated

    return accepts


def _member(kind: str, value: Any, flags: int) -> Accepts:
    """Return the function that decides whether a part of a class, such as ``a-z``, contains a character."""
    match kind:
        case "LITERAL":
            return chr(value).__eq__
        case "RANGE":
            low, high = chr(value[0]), chr(value[1])
            return lambda character: low <= character <= high
        case _:
            name = str(value).removeprefix("CATEGORY_")
            test = _CATEGORIES[name.removeprefix("NOT_")]
            wanted = not name.startswith("NOT_")
            if flags & re.ASCII:
                return lambda character: (character.isascii() and test(character)) is wanted
            return lambda character: test(character) is wanted


def _cases(character: str, ascii_only: bool) -> set[str]:
    """Return all characters that differ from `character` only in case, and `character` itself.

    Args:
        character: One character.
        ascii_only: If true, only ASCII letters have two cases.
    """
    if ascii_only:
        return {character.lower(), character.upper()} if character.isascii() else {character}
    lower = character.lower()[0]  # only the lower case of `İ` has two characters, and `re` takes the first
    lowers = [lower, *map(chr, sre_casefix._EXTRA_CASES.get(ord(lower), ()))]
    forms = {form for one in lowers for form in (one, one.upper(), one.title()) if len(form) == 1}
    return forms | {_MORE_CAPITALS[one] for one in lowers if one in _MORE_CAPITALS}


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _is_ascii_word(character: str) -> bool:
    return character.isascii() and _is_word(character)


def _kind(character: str) -> str:
    """Return a character that stands for all characters that the conditions of nodes treat alike."""
    if character in ("", "\n"):
        return character
    if _is_word(character):
        return "_" if character.isascii() else "é"
    return " "


def _at_boundary(before: str, after: str) -> bool:
    return _is_word(before) is not _is_word(after[:1])


def _at_ascii_boundary(before: str, after: str) -> bool:
    return _is_ascii_word(before) is not _is_ascii_word(after[:1])


_ALPHABETS = re.ASCII | re.UNICODE | re.LOCALE
_MORE_CAPITALS = {"i": "\u0130", "θ": "\u03f4", "ß": "\u1e9e", "ω": "\u2126", "k": "\u212a", "å": "\u212b"}
"""Lower-case letters, and their capitals that `str.upper` does not return."""
_CATEGORIES: dict[str, Accepts] = {"DIGIT": str.isdecimal, "SPACE": str.isspace, "WORD": _is_word}
_POSITIONS: dict[tuple[str, bool], Callable[[str, str], bool]] = {
    **{("AT_BEGINNING_STRING", lines): lambda before, after: not before for lines in (False, True)},
    **{("AT_END_STRING", lines): lambda before, after: not after for lines in (False, True)},
    **{("AT_BOUNDARY", lines): _at_boundary for lines in (False, True)},
    **{
        ("AT_NON_BOUNDARY", lines): lambda before, after: not _at_boundary(before, after)
        for lines in (False, True)
    },
    ("AT_BEGINNING", False): lambda before, after: not before,
    ("AT_BEGINNING", True): lambda before, after: before in ("", "\n"),
    ("AT_END", False): lambda before, after: after in ("", "\n$"),
    ("AT_END", True): lambda before, after: after[:1] in ("", "\n"),
}
_ASCII_POSITIONS: dict[tuple[str, bool], Callable[[str, str], bool]] = {
    **_POSITIONS,
    **{("AT_BOUNDARY", lines): _at_ascii_boundary for lines in (False, True)},
    **{
        ("AT_NON_BOUNDARY", lines): lambda before, after: not _at_ascii_boundary(before, after)
        for lines in (False, True)
    },
}
