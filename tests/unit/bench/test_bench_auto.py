"""`outrider bench auto` compares choices on equal work, after the engine has been warmed up."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bench.measure import auto
from outrider.bench.measure.auto import MOST_WARM_UPS, AutoOptions
from outrider.bench.measure.latency import parse_shapes
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.spec.tree import DraftShape

PAIRS, BATCH, NEW_TOKENS = 4, 2, 100


class PlayedEngine:
    """Takes a given time for the batches of each choice. The first batches in mode `auto` record graphs.

    Attributes:
        seconds: Seconds of a batch, by choice. The key of plain decoding is None.
        recording: Number of batches in mode `auto` that record graphs.
        batches: For each measured batch: its choice, its prompts and its seed.
    """

    def __init__(self, seconds: dict[Any, float], recording: int = 1) -> None:
        self.decoder = SimpleNamespace(config=SimpleNamespace(vocab_size=1000))
        self.seconds, self.recording = seconds, recording
        self.graphs = 0
        self.batches: list[tuple[Any, Sequence[Sequence[int]], int | None]] = []

    def set_rates(self, rates: Sequence[float]) -> None: ...

    def forget(self) -> None: ...

    def auto_decision(self) -> dict[str, Any]:
        return {}

    def run_batch(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int | Sequence[int],
        tree: DraftShape | None,
        mode: SpeculationMode | None = None,
        seed: int | None = None,
    ) -> tuple[float, list[Any]]:
        choice = mode or tree
        if choice is SpeculationMode.AUTO and self.recording:
            self.recording -= 1
            self.graphs += 3
        if isinstance(new_tokens, int):
            self.batches.append((choice, prompts, seed))
        return self.seconds[choice], []


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "compiled_kernels", lambda: 0)


SHAPES = parse_shapes(["plain", "chain3", "chain5"], 1.0)
PLAIN, CHAIN_3, CHAIN_5 = (shape.tree for shape in SHAPES)
SECONDS = {SpeculationMode.AUTO: 1.0, PLAIN: 0.99, CHAIN_3: 1.1, CHAIN_5: 2.0}


def measured(engine: PlayedEngine) -> Any:
    options = AutoOptions(Any, SHAPES, [1.0], [BATCH], [NEW_TOKENS], 8, PAIRS, None)  # type: ignore[arg-type]
    return auto._measured(engine, options, "case", 1.0, BATCH, NEW_TOKENS)  # type: ignore[arg-type]


def test_all_choices_of_a_pass_have_the_same_prompts_and_luck() -> None:
    engine = PlayedEngine(SECONDS)
    row = measured(engine)
    seeds = [seed for _, _, seed in engine.batches]
    passes = [[one for one in engine.batches if one[2] == seed] for seed in dict.fromkeys(seeds)][-PAIRS:]
    assert None not in seeds
    for one in passes:
        assert len({str(prompts) for _, prompts, _ in one}) == 1
        assert {SpeculationMode.AUTO, PLAIN, CHAIN_3} <= {choice for choice, _, _ in one}
    assert len({str(one[0][1]) for one in passes}) == PAIRS, "passes differ"
    assert passes[0][0][0] is SpeculationMode.AUTO
    assert passes[1][-1][0] is SpeculationMode.AUTO, "the order changes from pass to pass"
    assert row.more["best"] == "plain"
    assert row.value == pytest.approx(0.99)
    assert len(row.more["ratios"]) == PAIRS


def test_a_choice_that_is_far_slower_is_measured_once() -> None:
    engine = PlayedEngine(SECONDS)
    row = measured(engine)
    assert [choice for choice, _, _ in engine.batches].count(CHAIN_5) == 1
    assert row.more["fixed_tok_s"]["chain 5"] == pytest.approx(BATCH * NEW_TOKENS / 2.0)


@pytest.mark.parametrize(("recording", "late"), [(0, 0), (2, 0), (MOST_WARM_UPS + 2, 3)])
def test_auto_is_measured_after_its_graphs_are_recorded(recording: int, late: int) -> None:
    engine = PlayedEngine(SECONDS, recording)
    row = measured(engine)
    assert row.more["made_late"] == [late, *[0] * (PAIRS - 1)]
    warm_ups = [choice for choice, _, _ in engine.batches].count(SpeculationMode.AUTO) - PAIRS
    assert warm_ups == 1 + min(MOST_WARM_UPS, max(1, recording))
