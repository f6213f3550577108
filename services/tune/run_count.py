"""Estimates how far a search is, from the number of its runs, and shows this on a progress bar."""

from __future__ import annotations

from outrider.services.tune.candidates import candidate_shapes
from outrider.services.tune.check import CHECKED
from outrider.services.tune.paired import LEAST_LEFT
from outrider.services.tune.result import TuneSizes
from outrider.services.tune.search import FINALISTS, prompt_parts
from outrider.services.tune.step_times import probe_shapes
from outrider.shared.obs.progress import Progress


class RunCount:
    """Counts the runs of a search: those for predictions, and then those that measure each batch size.

    The number of runs is not known in advance, because the measurements of a batch size end as soon as its
    fastest shape is known. The end of each batch size therefore corrects the count.

    Args:
        progress: Receives the share of the work that is done. Its total must be 1.
        sizes: The amount of work of the search.
        num_prompts: Number of prompts.
    """

    def __init__(self, progress: Progress, sizes: TuneSizes, num_prompts: int) -> None:
        self._progress = progress
        self._sizes = sizes
        self._predictions = self._batches = self._runs = 0
        candidates = candidate_shapes(sizes.largest)
        self._most_predictions = 1 + len(sizes.batches) * len(probe_shapes(candidates))
        # Mode auto takes part in the first passes, and plain decoding usually in one pass.
        finalists = min(FINALISTS, len(candidates))
        measured = 2 * sizes.passes if sizes.exhaustive else 1 + sizes.passes
        measured += sizes.passes * len(candidates) if sizes.exhaustive else _narrowed(finalists, sizes.passes)
        if sizes.check:
            rivals = min(CHECKED + 1, len(candidates))
            measured += len(candidates) + _narrowed(rivals, sizes.check) + 2 * sizes.check
        # A short run precedes the first measurement of each shape.
        first = 2 + (len(candidates) if sizes.exhaustive or sizes.check else finalists)
        self._runs_of = [first + measured * len(prompt_parts(num_prompts, batch)) for batch in sizes.batches]
        self._share = measured

    def ran(self) -> None:
        """Count one run of prompts."""
        if self._predictions < self._most_predictions:
            self._predictions += 1
        else:
            self._runs = min(self._runs + 1, self._runs_of[self._batches])
        self._tell()

    def batch_done(self) -> None:
        """Note that the measurements of one batch size are complete."""
        self._batches += 1
        self._runs = 0
        self._tell()

    def _tell(self) -> None:
        number, total = self._batches, len(self._sizes.batches)
        current = self._runs / self._runs_of[number] if number < total else 0.0
        # All batch sizes have the same share of the work.
        done = self._predictions + (number + current) * self._share
        step = f"{self._sizes.batches[number]} at a time" if number < total else ""
        if self._predictions < self._most_predictions:
            step = "predictions"
        self._progress.tell(done / (self._most_predictions + total * self._share), step=step)


def _narrowed(shapes: int, passes: int) -> int:
    """Return the number of runs of `passes` passes, if the slower half of the shapes drops out after each."""
    runs = 0
    for _ in range(passes):
        runs += shapes
        shapes = max(min(shapes, LEAST_LEFT), -(-shapes // 2))
    return runs
