"""The result of a search for the best tree shapes: measured speeds, the best shape and the best mode."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from outrider.services.tune.candidates import AutoLimits
from outrider.services.tune.modes import faster
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.spec.tree import NO_DRAFT, DraftShape


@dataclass(frozen=True, slots=True)
class TuneSizes:
    """The amount of work for one search of tree shapes.

    Attributes:
        batches: Numbers of concurrent requests. Each number is searched separately.
        tokens: Largest length of an answer, in tokens.
        largest: The largest depth, width and number of nodes that the server allows.
        passes: Least number of passes over the prompts. Mode `auto` takes part in these passes only, and so
            does plain decoding. If plain decoding is far slower than the best shape, it has only one pass.
        most_passes: Largest number of passes.
        share: Time limit for further passes, as a share of the duration of an exhaustive search. If the
            fastest shape is not known after `passes` passes, passes are added until this limit.
        exhaustive: True to measure all shapes in `passes` passes, instead of the finalists only.
        check: Number of passes that compare the chosen shape with the best of all shapes; 0 for no check.
    """

    batches: Sequence[int]
    tokens: int
    largest: DraftShape
    passes: int = 3
    most_passes: int = 9
    share: float = 0.075
    exhaustive: bool = False
    check: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison of the tree shape that the search chose with the best of all shapes.

    Attributes:
        choice: The shape that the search chose.
        best: The fastest of all shapes.
        ratios: Speed of `choice` divided by the speed of `best`, for each pass. These passes have no part in
            the selection of `best`.
        seconds: Duration of one pass over all shapes, without the pauses between the runs.
    """

    choice: DraftShape
    best: DraftShape
    ratios: Sequence[float]
    seconds: float

    @property
    def ratio(self) -> float:
        """The median ratio."""
        return median(self.ratios)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Predicted and measured speeds of tree shapes for one batch size.

    Attributes:
        batch: Number of concurrent requests.
        predicted: Shape → predicted speed, relative to plain decoding. The predictions are scaled so that
            predictions of measured shapes match the measured speeds.
        measured: Shape → measured speed, in tokens per second of all requests together. Includes `NO_DRAFT`.
        ratios: Shape → speed relative to plain decoding, in each pass with both.
        auto: Measured speed of mode `auto`, in tokens per second. None if it was not measured.
        to_auto: Shape → speed relative to mode `auto`, in each pass with both. Includes `NO_DRAFT`.
        seconds: Duration of the search for this batch size, without the check. It includes an equal share of
            the recording, which serves all batch sizes.
        exhaustive_s: Duration of an exhaustive search for this batch size. It is an estimate, unless the
            search is exhaustive or a check has measured all shapes once.
        check: The comparison with the best of all shapes. None if no check was requested.
        left: The shapes of the last pass. The others dropped out, so their speeds are less certain. If it is
            empty, all measured shapes count.
    """

    batch: int
    predicted: Mapping[DraftShape, float]
    measured: Mapping[DraftShape, float]
    ratios: Mapping[DraftShape, Sequence[float]] = field(default_factory=dict)
    auto: float | None = None
    to_auto: Mapping[DraftShape, Sequence[float]] = field(default_factory=dict)
    seconds: float = 0.0
    exhaustive_s: float = 0.0
    check: Check | None = None
    left: Collection[DraftShape] = ()

    @property
    def best(self) -> DraftShape:
        """The fastest of the shapes that did not drop out, or plain decoding if it is faster."""
        return max({NO_DRAFT, *self.contenders}, key=lambda shape: self.measured[shape])

    @property
    def contenders(self) -> Collection[DraftShape]:
        """The measured shapes that did not drop out."""
        return self.left or self.measured.keys()

    def speedup(self, shape: DraftShape) -> float | None:
        """Return the measured speed of a shape relative to plain decoding; None if it was not measured."""
        if shape not in self.measured:
            return None
        return self.measured[shape] / self.measured[NO_DRAFT]

    @property
    def auto_speedup(self) -> float | None:
        """The measured speed of mode `auto` relative to plain decoding; None if it was not measured."""
        return None if self.auto is None else self.auto / self.measured[NO_DRAFT]


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The result of a search.

    Attributes:
        accept_lengths: Shape → predicted accept length.
        batches: The results for each batch size.
        seconds: Duration of the search and the checks.
        limits: The limits of mode `auto`. None if mode `auto` was not measured.
        shape: The measured shape that is the best one over all batch sizes.
        mode: The best mode. With `ON`, requests use `shape`, and with `AUTO`, shapes within `limits`.
    """

    accept_lengths: Mapping[DraftShape, float]
    batches: Sequence[BatchResult]
    seconds: float = 0.0
    limits: AutoLimits | None = None
    shape: DraftShape = field(init=False)
    mode: SpeculationMode = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self._overall())
        object.__setattr__(self, "mode", self._best_mode())

    @property
    def default_shape(self) -> DraftShape:
        """The default shape of a server in the best mode. It also limits the shapes of mode `auto`."""
        return self.limits.shape if self.mode is SpeculationMode.AUTO and self.limits else self.shape

    def _best_mode(self) -> SpeculationMode:
        """Return the best mode.

        The mode is `OFF` if no draft pays at any batch size. Otherwise, it is `AUTO`, unless the best shape
        or plain decoding is faster than mode `auto` at every batch size by more than the noise.
        """
        gains = [[1 / ratio for ratio in one.to_auto.get(NO_DRAFT, ())] for one in self.batches]
        if self.shape == NO_DRAFT and not any(faster(gain) for gain in gains):
            return SpeculationMode.OFF
        better = [
            shape
            for shape in (self.shape, NO_DRAFT)
            if all(faster(one.to_auto.get(shape, ())) for one in self.batches)
        ]
        if not better:
            return SpeculationMode.AUTO
        return SpeculationMode.ON if better[0].drafts else SpeculationMode.OFF

    def _overall(self) -> DraftShape:
        """Return the measured tree shape with the best mean speed-up over all batch sizes.

        A speed-up below 1 counts as 1, because mode `auto` then decodes without drafts. The result is
        `NO_DRAFT` if no shape is faster than plain decoding at any batch size at which it did not drop out.
        """
        best, most = NO_DRAFT, 1.0
        for shape in self.accept_lengths:
            product = 1.0
            for one in self.batches:
                speedup = one.speedup(shape)
                product *= max(1.0, one.predicted[shape] if speedup is None else speedup)
            mean = product ** (1 / len(self.batches))
            won = (one for one in self.batches if shape in one.contenders)
            if mean > most and any((one.speedup(shape) or 0.0) > 1 for one in won):
                best, most = shape, mean
        return best
