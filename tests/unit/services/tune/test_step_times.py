"""Times of rounds of any shape, from the times of a few shapes."""

from __future__ import annotations

import pytest

from outrider.services.tune.candidates import candidate_shapes
from outrider.services.tune.step_times import StepTimes, probe_shapes
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

CANDIDATES = candidate_shapes(DraftShape(8, 8, 64))


def draft_ms(shape: DraftShape) -> float:
    return 0.5 + 0.3 * shape.depth + (0.05 * shape.topk if shape.topk > 1 else 0.0)


def verify_ms(nodes: int) -> float:
    return 4.0 + 0.01 * nodes


def test_a_few_probes_predict_all_shapes_of_a_linear_machine() -> None:
    times = StepTimes()
    for shape in probe_shapes(CANDIDATES):
        draft = draft_ms(shape) if shape.drafts else 0.0
        rounds = [{"draft_ms": draft, "verify_ms": verify_ms(shape.max_nodes)} for _ in range(3)]
        times.add(shape, rounds, draft + verify_ms(shape.max_nodes) + 0.2)
    assert times.measured
    assert len(probe_shapes(CANDIDATES)) <= 8 < len(CANDIDATES) / 5
    assert times.round_ms(NO_DRAFT) == pytest.approx(verify_ms(1) + 0.2)
    for shape in CANDIDATES:
        expected = draft_ms(shape) + verify_ms(shape.max_nodes) + 0.2
        assert times.round_ms(shape) == pytest.approx(expected, rel=0.02)


def test_nothing_is_measured_without_rounds() -> None:
    times = StepTimes()
    times.add(DraftShape(3, 1, 4), [], None)
    assert not times.measured


def test_chains_alone_can_be_probed() -> None:
    chains = candidate_shapes(DraftShape(4, 1, 8))
    assert probe_shapes(chains) == [NO_DRAFT, chains[0], chains[-1]]
