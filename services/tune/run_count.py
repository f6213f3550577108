"""Estimates how far a search is, from the number of its runs, and shows this on a progress bar."""

from __future__ import annotations

from outrider.services.tune.candidates import candidate_shapes
from outrider.services.tune.round_times import probe_shapes
from outrider.services.tune.search import CHECKED, FINALISTS, TuneSizes
from outrider.shared.obs.progress import Progress


class RunCount:
    """Counts the runs of a search.

    The number of runs is not known in advance, because the measurements of a batch size end as soon as its
    fastest shape is known. The end of each batch size therefore corrects the count.

    Args:
        progress: Receives the share of the work that is done. Its total must be 1.
        sizes: The amount of work of the search.
    """

    def __init__(self, progress: Progress, sizes: TuneSizes) -> None:
        self._progress = progress
        self._sizes = sizes
        self._runs = 0
        self._batches = 0
        candidates = candidate_shapes(sizes.largest)
        probes = 0 if sizes.exhaustive else len(probe_shapes(candidates))
        finalists = len(candidates) if sizes.exhaustive else FINALISTS
        checks = len(candidates) + 1 + sizes.check * (CHECKED + 2) if sizes.check else 0
        self._runs_per_batch = probes + sizes.passes * (finalists + 1) + checks

    def ran(self) -> None:
        """Count one run of prompts."""
        self._runs = min(self._runs + 1, self._runs_per_batch)
        self._tell()

    def batch_done(self) -> None:
        """Note that the measurements of one batch size are complete."""
        self._batches += 1
        self._runs = 0
        self._tell()

    def _tell(self) -> None:
        number, total = self._batches, len(self._sizes.batches)
        step = f"{self._sizes.batches[number]} at a time" if number < total else ""
        self._progress.tell((number + self._runs / self._runs_per_batch) / total, step=step)
