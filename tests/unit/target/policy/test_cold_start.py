"""`auto` after a start with slow first measurements, on a machine where a draft takes as long as a pass.

The machine resembles the embedded pair on two CPU cores. Other work on the machine makes some rounds slower.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from support.engine.auto_machine import Law, Machine, Server

from outrider.services.target.policy.controller import ExecutedEntry, ExecutedStep, SpeculationController
from outrider.services.target.policy.cost_model import DraftPath
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

FORMS = (DraftShape(5, 4, 16), DraftShape(10, 1, 11))
STARTS, REQUESTS, TOKENS = 12, 6, 77
SLOW = 5.0
"""Factor by which the first pass of each size and the first draft of each shape take longer."""


def good(depth: int) -> float:
    return 0.9


def useless(depth: int) -> float:
    return 0.0


@dataclass(frozen=True)
class ColdMachine(Machine):
    """A pass takes 3.2 ms and 0.3 ms for each row. A draft takes 2.3 ms and 0.75 ms for each level."""

    seed: int = 0
    slow: float = SLOW
    busy_share: float = 0.02
    known: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rng", random.Random(self.seed))

    def round_s(self, shapes: Sequence[DraftShape]) -> tuple[float, float]:
        depths = [shape.depth for shape in shapes if shape.drafts]
        rows = sum(shape.max_nodes for shape in shapes)
        drafting = (2.3e-3 + 0.75e-3 * max(depths)) * self._times(max(depths), "draft") if depths else 0.0
        return drafting, (3.2e-3 + 0.3e-3 * rows) * self._times(rows, "pass")

    def _times(self, size: int, part: str) -> float:
        factor = 1.0 if (size, part) in self.known else self.slow
        self.known.add((size, part))
        rng: random.Random = self.rng  # type: ignore[attr-defined]
        if rng.random() < self.busy_share:
            factor *= rng.uniform(2, 4)
        return factor * rng.lognormvariate(0, 0.15)


def start(machine: ColdMachine, law: Law) -> Server:
    """Return a server after a warm-up that measured the default tree and plain decoding only."""
    controller = SpeculationController()
    for shape in (FORMS[0],) * 20 + (NO_DRAFT,) * 20:
        drafting, verifying = machine.round_s([shape])
        entry = ExecutedEntry(None, shape.max_nodes, shape, 0)
        requested = Counter([shape] if shape.drafts else [])
        seconds = drafting + verifying
        controller.observe(ExecutedStep([entry], requested, drafting, verifying, seconds, DraftPath.HOST))
    controller.forget_acceptance()
    return Server(controller, machine, 1, TOKENS, [law], path=DraftPath.HOST, forms=FORMS, seed=machine.seed)


@pytest.mark.parametrize("slow", [1.0, SLOW])
def test_a_good_draft_is_used_although_its_first_rounds_were_slow(slow: float) -> None:
    used = 0
    for seed in range(STARTS):
        server = start(ColdMachine(seed=seed, slow=slow), good)
        server.run(REQUESTS * TOKENS)
        used += len(server.rounds) < 0.65 * REQUESTS * TOKENS
    assert used >= STARTS - 1


def test_a_useless_draft_costs_little_although_drafting_is_slow() -> None:
    machine = ColdMachine(slow=SLOW, busy_share=0.0)
    server = start(machine, useless)
    server.run(REQUESTS * TOKENS)
    seconds = server.seconds
    looked = sum(shapes[0].drafts for shapes in server.rounds)
    assert 1 <= looked <= 8
    server.run(20 * REQUESTS * TOKENS)
    rounds = len(server.rounds)
    later = sum(shapes[0].drafts for shapes in server.rounds) - looked
    assert later > 10, "the draft is measured again and again"
    plain_s = sum(sum(machine.round_s([NO_DRAFT])) for _ in range(2000)) / 2000
    assert (server.seconds - seconds) / (rounds - REQUESTS * TOKENS) <= plain_s / 0.985


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_long_slow_phase_is_forgotten(batch_size: int) -> None:
    """Drafts take 4 times as long for a while, so that drafting stops. Later they are fast again."""
    machine = ColdMachine(slow=1.0, busy_share=0.0)
    phase = [1.0]

    class Phased(ColdMachine):
        def round_s(self, shapes: Sequence[DraftShape]) -> tuple[float, float]:
            drafting, verifying = machine.round_s(shapes)
            return drafting * phase[0], verifying

    server = Server(
        SpeculationController(), Phased(), batch_size, 400, [good], path=DraftPath.HOST, forms=FORMS
    )
    server.run(4000)
    phase[0] = 4.0
    server.run(3000)
    assert sum(shapes[0].drafts for shapes in server.rounds[-100:]) < 20
    phase[0] = 1.0
    server.run(8000)
    last = server.rounds[-100:]
    assert sum(shapes[0].drafts for shapes in last) > 80
