"""A grammar over the token ids of toy models: a random automaton, some of whose states force a token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import takewhile

import numpy as np

from outrider.services.target.grammar.matcher import Grammar, Mask, Matcher
from outrider.shared.spec.trees import HostTree


class ToyGrammar(Grammar):
    """An automaton. State 0 is the start.

    Args:
        vocab_size: Number of tokens.
        ends: The tokens that end an output. Every fifth state allows them.
        seed: Seed of the automaton.
        states: Number of states.
        stuck: A state that allows nothing. None if every state allows something.
        last: A state that allows only the end. None if there is none.
        letters: The tokens of letters.
    """

    def __init__(
        self,
        vocab_size: int,
        ends: tuple[int, ...],
        seed: int = 0,
        states: int = 40,
        *,
        stuck: int | None = None,
        last: int | None = None,
        letters: tuple[int, ...] = (),
    ) -> None:
        self._letters = letters
        self._vocab_size, self._ends, self._states = vocab_size, ends, states
        rng = random.Random(seed)
        inner = [token for token in range(vocab_size) if token not in ends]
        self._allowed = [
            set(rng.sample(inner, rng.choice([1, 1, 2, 8, vocab_size // 2]))) for _ in range(states)
        ]
        for state in range(4, states, 5):
            self._allowed[state] |= set(ends)
        if stuck is not None:
            self._allowed[stuck] = set()
        if last is not None:
            self._allowed[last] = set(ends)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def matcher(self) -> Matcher:
        return ToyMatcher(self)

    def text_of(self, token: int) -> bytes:
        return b"<%d>" % token

    def ends(self) -> tuple[int, ...]:
        return self._ends

    def letters(self) -> tuple[int, ...]:
        return self._letters

    def token_of(self, text: str) -> int | None:
        return int(text[1:-1])

    @cache  # noqa: B019
    def after(self, state: int, token: int) -> int:
        """Return the next state; -1 after the end."""
        return -1 if token in self._ends else (state * 31 + token * 7 + 1) % self._states

    def allowed(self, state: int) -> set[int]:
        """Return the tokens that a state allows."""
        return self._allowed[state] if state >= 0 else set()

    def accepts(self, output: list[int]) -> bool:
        """Return whether every token of an output was allowed."""
        matcher = self.matcher()
        return all(matcher.accept(token) for token in output)


class ToyMatcher(Matcher):
    """The states of one output."""

    def __init__(self, grammar: ToyGrammar) -> None:
        self._grammar = grammar
        self._path = [0]

    def accept(self, token: int) -> bool:
        if token not in self._grammar.allowed(self._path[-1]):
            return False
        self._path.append(self._grammar.after(self._path[-1], token))
        return True

    def rollback(self, count: int) -> None:
        del self._path[len(self._path) - count :]
        assert self._path, "more tokens were removed than added"

    def allows(self, tokens: Sequence[int]) -> bool:
        accepted = sum(1 for _ in takewhile(self.accept, tokens))
        self.rollback(accepted)
        return accepted == len(tokens)

    def fill(self, mask: Mask) -> None:
        mask.fill(0)
        for token in self._grammar.allowed(self._path[-1]):
            mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def forced(self) -> list[int]:
        state, found = self._path[-1], []
        while len(found) < 4 and len(allowed := self._grammar.allowed(state)) == 1:
            (token,) = allowed
            found.append(token)
            state = self._grammar.after(state, token)
        return found

    def fork(self) -> ToyMatcher:
        forked = ToyMatcher(self._grammar)
        forked._path = list(self._path)
        return forked


def drawn_tree(rng: random.Random, grammar: ToyGrammar, nodes: int) -> HostTree:
    """Draw a tree in which about half of the nodes are allowed."""
    tree, states = HostTree.of_root(1), [0]
    for _ in range(nodes):
        parent = rng.randrange(len(tree.tokens))
        inner = sorted(grammar.allowed(states[parent])) if states[parent] >= 0 else []
        token = rng.choice(inner) if inner and rng.random() < 0.5 else rng.randrange(grammar.vocab_size)
        tree.add(token, parent, -rng.random())
        states.append(grammar.after(states[parent], token) if token in inner else -1)
    return tree
