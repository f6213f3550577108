"""Estimates how far a search is, from the number of its runs, and shows this on a progress bar."""

from __future__ import annotations

from outrider.services.tune.candidates import candidate_shapes
from outrider.services.tune.round_times import probe_shapes
from outrider.services.tune.search import CHECKED, FINALISTS, TuneSizes
from outrider.shared.obs.progress import Progress


class RunCount:
    """Counts the runs of a search: those for predictions, and then those that measure each batch size.

    The number of runs is not known in advance, because the measurements of a batch size end as soon as its
    fastest shape is known. The end of each batch size therefore corrects the count.

    Args:
        progress: Receives the share of the work that is done. Its total must be 1.
        sizes: The amount of work of the search.
    """

    def __init__(self, progress: Progress, sizes: TuneSizes) -> None:
        self._progress = progress
        self._sizes = sizes
        self._predictions = self._runs = self._batches = 0
        candidates = candidate_shapes(sizes.largest)
        self._most_predictions = 1 + len(sizes.batches) * len(probe_shapes(candidates))
        finalists = len(candidates) if sizes.exhaustive else FINALISTS
        checks = len(candidates) + 1 + sizes.check * (CHECKED + 2) if sizes.check else 0
        # Plain decoding and mode auto take part in every pass.
        self._runs_per_batch = sizes.passes * (finalists + 2) + checks

    def ran(self) -> None:
        """Count one run of prompts."""
        if self._predictions < self._most_predictions:
            self._predictions += 1
        else:
            self._runs = min(self._runs + 1, self._runs_per_batch)
        self._tell()

    def batch_done(self) -> None:
        """Note that the measurements of one batch size are complete."""
        self._batches += 1
        self._runs = 0
        self._tell()

    def _tell(self) -> None:
        number, total = self._batches, len(self._sizes.batches)
        done = self._predictions + number * self._runs_per_batch + self._runs
        step = f"{self._sizes.batches[number]} at a time" if number < total else ""
        if self._predictions < self._most_predictions:
            step = "predictions"
        self._progress.tell(done / (self._most_predictions + total * self._runs_per_batch), step=step)
