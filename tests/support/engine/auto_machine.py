"""A synthetic machine that serves requests in mode `auto`, in simulated time."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.services.target.policy.acceptance import SamplingKind
from outrider.services.target.policy.controller import (
    EntryBound,
    ExecutedEntry,
    ExecutedStep,
    SequenceState,
    SpeculationController,
)
from outrider.services.target.policy.cost_model import DraftPath
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

TREE, CHAIN = DraftShape(5, 8, 32), DraftShape(10, 1, 11)
CHAIN_3, CHAIN_5 = DraftShape(3, 1, 4), DraftShape(5, 1, 6)
CATCH_UP_S = 2e-6
"""Seconds for each token that a drafter catches up on."""

Law = Callable[[int], float]
"""Returns the probability that a draft at a depth (from 1) is accepted if its parent was accepted."""


@dataclass(frozen=True)
class Machine:
    """The costs of an 8B model on one H200, in seconds: weights dominate up to 256 rows, then arithmetic."""

    scale: float = 1.0

    def verify_s(self, batch_size: int, rows: int) -> float:
        plain = [(1, 3.8e-3), (16, 4.4e-3), (64, 5.9e-3), (256, 11e-3)]
        for (low, low_s), (high, high_s) in pairwise(plain):
            if batch_size <= high:
                base = low_s + (high_s - low_s) * (batch_size - low) / (high - low)
                break
        more = 2e-6 * (min(rows, 256) - min(batch_size, 256)) + 20e-6 * max(0, rows - 256)
        return self.scale * (base + more)

    def draft_s(self, shape: DraftShape, count: int) -> float:
        """A chain of 3 takes 0.9 ms, and a tree 5/8/32 takes 1.6 ms."""
        alone = 0.3e-3 * shape.depth if shape.topk == 1 else 0.32e-3 * shape.depth
        return self.scale * alone * (1 + count / 256)

    def round_s(self, shapes: Sequence[DraftShape]) -> tuple[float, float]:
        """Return the seconds of drafting and of verifying."""
        groups = Counter(shape for shape in shapes if shape.drafts)
        drafting = sum(self.draft_s(shape, count) for shape, count in groups.items())
        return drafting, self.verify_s(len(shapes), sum(shape.max_nodes for shape in shapes))

    def rate(self, shape: DraftShape, batch_size: int, law: Law) -> float:
        """Return the expected tokens per second of a batch whose entries all have one shape."""
        return batch_size * tokens_of(shape, law) / sum(self.round_s([shape] * batch_size))

    def best_rate(self, batch_size: int, law: Law) -> float:
        """Return the best rate of plain decoding, chains of 3 and 5 and the tree."""
        return max(self.rate(shape, batch_size, law) for shape in (NO_DRAFT, CHAIN_3, CHAIN_5, TREE))


class CostlyRows(Machine):
    """A machine on which each row beyond one per sequence takes 60 µs more to verify."""

    def verify_s(self, batch_size: int, rows: int) -> float:
        return super().verify_s(batch_size, batch_size) + 60e-6 * (rows - batch_size)


@dataclass
class Request:
    """A request that is being served."""

    state: SequenceState
    law: Law
    prompt: int
    left: int
    forms: tuple[DraftShape, DraftShape]
    emitted: int = 0
    fed: int = 0

    @property
    def bound(self) -> EntryBound:
        return EntryBound(self.state, self.forms[0], self.left - 1, self.forms[1], self.prompt + self.emitted)


@dataclass
class Server:
    """Serves a closed loop of requests: a new one comes as soon as one ends.

    Attributes:
        controller: The controller under test.
        machine: The costs.
        batch_size: Number of requests at the same time.
        new_tokens: Tokens of each request.
        laws: Acceptance of the requests, in turn.
        kinds: Kinds of sampling of the requests, in turn.
        others: Shapes of further entries that always have these shapes, and never accept a draft.
        seconds, tokens: Totals so far. Tokens of `others` do not count.
        rounds: The shapes of the `auto` entries of each round.
    """

    controller: SpeculationController
    machine: Machine
    batch_size: int
    new_tokens: int
    laws: Sequence[Law]
    kinds: Sequence[SamplingKind] = (SamplingKind.GREEDY,)
    others: Sequence[DraftShape] = ()
    forms: tuple[DraftShape, DraftShape] = (TREE, CHAIN)
    prompt: int = 128
    path: DraftPath = DraftPath.DEVICE
    seed: int = 0
    seconds: float = 0.0
    tokens: int = 0
    rounds: list[list[DraftShape]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._started = 0
        self._unread: deque[ExecutedStep] = deque()
        # The first requests are at different places of their answers.
        self.live = [
            self._request(max(2, self.new_tokens * (index + 1) // self.batch_size))
            for index in range(self.batch_size)
        ]

    def run(self, tokens: int) -> float:
        """Serve until a number of tokens has been emitted. Return the tokens per second."""
        first_tokens, first_s = self.tokens, self.seconds
        while self.tokens - first_tokens < tokens:
            self.round()
        return (self.tokens - first_tokens) / (self.seconds - first_s)

    def round(self) -> None:
        """Run one round. As with a lookahead of 1, it is chosen before the last round is observed."""
        shapes = self.controller.choose([one.bound for one in self.live], self.others, self.path)
        if self._unread:
            self.controller.observe(self._unread.popleft())
        drafting, verifying = self.machine.round_s([*shapes, *self.others])
        executed = [ExecutedEntry(None, shape.max_nodes, shape, 0) for shape in self.others]
        caught_up = False
        for index, (request, shape) in enumerate(zip(self.live, shapes, strict=True)):
            if shape.drafts:
                length = request.prompt + request.emitted
                # A drafter in another process has all tokens.
                behind = 0 if self.path is DraftPath.HOST else max(0, length - request.fed - 12)
                drafting += CATCH_UP_S * behind
                caught_up |= behind > 0
                request.fed = length
            accepted = 0
            while accepted < shape.depth and self._rng.random() < request.law(accepted + 1):
                accepted += 1
            executed.append(ExecutedEntry(request.state, shape.max_nodes, shape, accepted))
            kept = min(accepted + 1, request.left)
            request.emitted += kept
            request.left -= kept
            self.tokens += kept
            if not request.left:
                self.live[index] = self._request(self.new_tokens)
        self.seconds += drafting + verifying
        self.rounds.append(shapes)
        groups = Counter(shape for shape in (*shapes, *self.others) if shape.drafts)
        self._unread.append(
            ExecutedStep(executed, groups, drafting, verifying, drafting + verifying, self.path, caught_up)
        )

    def _request(self, tokens: int) -> Request:
        law = self.laws[self._started % len(self.laws)]
        kind = self.kinds[self._started % len(self.kinds)]
        self._started += 1
        made = Request(self.controller.new_state(kind), law, self.prompt, tokens, self.forms)
        if self.controller.would_draft(made.bound):
            made.state.drafted_len = made.fed = made.prompt
            self.seconds += CATCH_UP_S * made.prompt
        return made


def tokens_of(shape: DraftShape, law: Law) -> float:
    """Return the expected tokens of a round of one request."""
    tokens, reach = 1.0, 1.0
    for depth in range(1, shape.depth + 1 if shape.drafts else 1):
        reach *= law(depth)
        tokens += reach
    return tokens


def law_of(accept_length: float) -> Law:
    """Return the law with one probability at all depths, under which chains of 5 have this accept length."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if 1 + sum(middle**depth for depth in range(1, 6)) < accept_length:
            low = middle
        else:
            high = middle
    return lambda depth: low
