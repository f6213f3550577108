"""The garbage collector of a service that has started."""

from __future__ import annotations

import gc

from outrider.shared.base.garbage import freeze_objects


def test_objects_of_running_answers_are_not_visited_all_the_time() -> None:
    before = gc.get_threshold()
    try:
        freeze_objects()
        collections = gc.get_stats()[0]["collections"]
        kept = [[number] for number in range(10_000)]
        assert gc.get_stats()[0]["collections"] - collections <= 1
        assert len(kept) == 10_000
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
