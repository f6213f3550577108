"""The list of graphs to record for the usual batches."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from outrider.services.target.engine.recordings import (
    DENSE_ROWS,
    MOST_MASKED_ROWS,
    MOST_MIXED_ROWS,
    USUAL_MODES,
    Recordings,
    masked_recordings,
    mixed_recordings,
    round_recordings,
)
from outrider.services.target.model.packed_batch import SamplingMode
from outrider.services.target.model.verify_pass import PassSize
from outrider.shared.engine.buckets import row_buckets
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

TREE, CHAIN = DraftShape(3, 2, 7), DraftShape(3, 1, 4)
NOTHING: Any = SimpleNamespace(recording=lambda *_what: None)
"""A source whose drafts are not recorded."""


class Recorder:
    """Stands for the round runner and for the drafts; notes what is recorded."""

    def __init__(self, max_rows: int = 64) -> None:
        self.max_rows = max_rows
        self.buckets = row_buckets(max_rows)
        self.made: list[Any] = []

    def capture(self, *what: Any) -> None:
        self.made.append(what if len(what) > 1 else what[0])

    def recording(self, *what: Any) -> Callable[[], None]:
        return lambda: self.capture(*what)

    def record(
        self, batches: list[tuple[int, DraftShape]], *, drafts: bool = False, captures: bool = False
    ) -> list[str]:
        """Record everything, and return the descriptions."""
        step_runner: Any = self
        source: Any = self if drafts else NOTHING
        recordings = list(round_recordings(step_runner, source, batches, captures=captures))
        assert not self.made, "listing must record nothing"
        for _description, record in recordings:
            record()
        return [description for description, _record in recordings]


def sizes(rows: int, width: int, capture: bool = False) -> list[PassSize]:
    return [PassSize(rows, width, mode, capture) for mode in USUAL_MODES]


def test_plain_rounds_have_one_graph_for_each_mode() -> None:
    recorder = Recorder()
    assert recorder.record([(3, NO_DRAFT)]) == ["rounds of 4 rows"] * 2
    assert recorder.made == sizes(4, 1)


def test_batches_of_the_same_rows_share_their_graphs() -> None:
    recorder = Recorder()
    recorder.record([(2, TREE), (4, CHAIN), (4, NO_DRAFT), (1, TREE)])
    assert recorder.made == sizes(16, 8) + sizes(4, 1) + sizes(8, 8)


def test_trees_that_levels_cannot_fill_are_bounded() -> None:
    recorder = Recorder()
    recorder.record([(1, DraftShape(3, 1, 60))])
    assert recorder.made == sizes(4, 8)


def test_with_features_plain_rounds_are_recorded_in_both_ways() -> None:
    recorder = Recorder()
    recorder.record([(1, NO_DRAFT), (1, CHAIN)], captures=True)
    assert recorder.made == sizes(1, 1, True) + sizes(1, 1, False) + sizes(4, 8, True), (
        "rows that draft always store features"
    )


def test_each_shape_and_batch_size_has_its_draft() -> None:
    recorder = Recorder()
    described = recorder.record([(2, TREE), (1, TREE), (2, NO_DRAFT)], drafts=True)
    drafts = [made for made in recorder.made if isinstance(made, tuple)]
    assert drafts == [(2, TREE), (1, TREE)]
    assert described[0] == "drafts of 2 sequences, 7 nodes"


def test_rounds_beyond_the_limit_of_packed_rows_are_left_out() -> None:
    recorder = Recorder(max_rows=20)
    recorder.record([(4, TREE), (2, TREE), (20, NO_DRAFT)])
    assert recorder.made == sizes(16, 8) + sizes(20, 1)


def test_other_sampling_modes_can_be_listed_alone() -> None:
    step_runner: Any = Recorder()
    for _, record in round_recordings(
        step_runner, NOTHING, [(2, NO_DRAFT)], [SamplingMode.FILTERED], captures=False
    ):
        record()
    assert step_runner.made == [PassSize(2, 1, SamplingMode.FILTERED, False)]


def mixed(max_rows: int) -> list[PassSize]:
    step_runner: Any = Recorder(max_rows)
    for _description, record in mixed_recordings(step_runner, captures=True):
        record()
    return step_runner.made


def test_mixed_rounds_are_recorded_in_every_mode_but_full_the_largest_first() -> None:
    made = mixed(2048)
    assert made[0] == PassSize(MOST_MIXED_ROWS, 8, SamplingMode.FILTERED, True), "it needs the most memory"
    assert [size.rows for size in made] == sorted((size.rows for size in made), reverse=True)
    dense = [size.rows for size in made if size.rows <= DENSE_ROWS]
    assert set(dense) == {2, 4, *range(8, DENSE_ROWS + 1, 8)}
    assert len(made) == len(set(made)) == len({size.rows for size in made}) * 2 * (len(SamplingMode) - 1)
    assert len(made) <= 128, "recording must end soon"


def test_mixed_rounds_keep_to_the_limit_of_packed_rows() -> None:
    assert {size.rows for size in mixed(20)} == {2, 4, 8, 16, 20}


def test_rounds_with_forms_are_recorded_in_every_width() -> None:
    recorder = Recorder(2048)
    step_runner: Any = recorder
    for _description, record in masked_recordings(step_runner, captures=True, drafting=True):
        record()
    made = recorder.made
    assert all(size.masked and size.mode is SamplingMode.FULL for size in made)
    assert max(size.rows for size in made) == MOST_MASKED_ROWS
    assert [size.rows for size in made] == sorted((size.rows for size in made), reverse=True)
    assert {(size.width, size.capture) for size in made if size.rows == 8} == {
        (1, True),
        (1, False),
        (8, True),
        (64, True),
    }
    assert {size.width for size in made if size.rows == 1} == {1}
    recorder.made.clear()
    for _description, record in masked_recordings(step_runner, captures=False, drafting=False):
        record()
    assert {(size.width, size.capture) for size in recorder.made} == {(1, False)}


def test_rounds_with_forms_are_listed_unless_there_are_several_ranks() -> None:
    step_runner: Any = SimpleNamespace(buckets=row_buckets(4), max_rows=4)
    runner: Any = SimpleNamespace(captures=False, graphs=SimpleNamespace(observed=False))
    recordings = Recordings(runner, step_runner, None, drafting=False, refresh=lambda: None)
    listed = [description for description, _record in recordings.masked()]
    assert listed == ["rounds of 4 rows", "rounds of 2 rows", "rounds of 1 rows"]
    runner.graphs.observed = True
    assert recordings.masked() == []
