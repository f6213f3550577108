"""A moving average of the durations of one kind of work, which a few slow measurements hardly affect.

Other work on the machine can prolong a duration, but nothing can shorten it. A cold cache also prolongs the
first measurements. The estimate is therefore close to the short measurements:

- The shortest of the first `FEW_SAMPLES` measurements is the estimate.
- Afterwards, a shorter measurement has a larger weight than a longer one.
- A measurement that is much longer than the estimate is an *outlier*. A single outlier is ignored. A second
  one in a row shows that the work has become slower, and counts.

An estimate that is not updated for a long time becomes *unsure* again. Its next measurements count as first
measurements.
"""

from __future__ import annotations

FEW_SAMPLES = 4
"""Number of measurements from which on an estimate is sure."""
MOST_SAMPLES = 16.0
"""Largest number of measurements that an estimate remembers."""
FADING = 0.99
"""Factor by which each decision of the controller without a new measurement reduces that number.

An estimate with `MOST_SAMPLES` measurements becomes unsure after 138 such decisions, which is after some 550
plain rounds."""
CHEAPER_WEIGHT = 0.5
"""Weight of a measurement that is below the moving average."""
DEARER_WEIGHT = 0.05
"""Weight of a measurement that is above the moving average."""
OUTLIER = 1.5
"""A measurement above this multiple of the estimate is an outlier."""
LARGEST_RISE = 4.0
"""A measurement counts as at most this multiple of the moving average."""


class Estimate:
    """The estimated duration of one kind of work.

    Args:
        seconds: The first measurement.
        now: Number of the decisions that the speculation controller has made so far.

    Attributes:
        seconds: The estimate, in seconds.
    """

    __slots__ = ("_after_outlier", "_measured_at", "_samples", "seconds")

    def __init__(self, seconds: float, now: int) -> None:
        self.seconds = seconds
        self._samples = 1.0
        self._measured_at = now
        self._after_outlier = False

    def observe(self, seconds: float, now: int) -> None:
        """Include a measurement. `now` is the number of the controller's decisions so far."""
        known = self._known(now)
        is_first = not self._after_outlier
        self._after_outlier = seconds > OUTLIER * self.seconds
        if self._after_outlier and is_first:
            return
        if known < FEW_SAMPLES:
            # The old estimate of work that has not run for long may be outdated in both directions.
            self.seconds = min(self.seconds, seconds) if known >= 1 else seconds
        else:
            weight = CHEAPER_WEIGHT if seconds < self.seconds else DEARER_WEIGHT
            self.seconds += weight * (min(seconds, LARGEST_RISE * self.seconds) - self.seconds)
        self._samples = min(MOST_SAMPLES, known + 1.0)
        self._measured_at = now

    def is_sure(self, now: int) -> bool:
        """Return True if enough measurements are recent enough to rely on the estimate."""
        return self._known(now) >= FEW_SAMPLES

    def _known(self, now: int) -> float:
        """Return the number of measurements, of which old ones count less."""
        return float(self._samples * FADING ** (now - self._measured_at))
