"""Lists the CUDA graphs to record in advance, for uniform rounds, mixed rounds and passes over prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

from outrider.services.target.drafting.draft_source import DraftSource
from outrider.services.target.engine.recorder import Recording
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.packed_batch import WIDTHS, SamplingMode, width_class
from outrider.services.target.model.step_runner import StepRunner
from outrider.services.target.model.verify_pass import PassSize
from outrider.shared.engine.buckets import padded_size
from outrider.shared.spec.tree import DraftShape

USUAL_MODES = (SamplingMode.NOISE, SamplingMode.GREEDY)
"""Sampling modes of requests without filters, rules and logprobs."""
MIXED_MODES = (SamplingMode.FILTERED, *USUAL_MODES)
"""Sampling modes in which rounds with trees are recorded in advance."""
MOST_MIXED_ROWS = 1024
"""Largest number of packed rows of a round with trees that is recorded in advance.

With 64 requests of all kinds, a quarter of the rounds has more than 512 rows.
"""
DENSE_ROWS = 64
"""Number of rows up to which mixed rounds of every bucket are recorded in advance.

For larger rounds, padding rows cost little, so only the sizes in `WIDE_ROWS` are recorded.
"""
WIDE_ROWS = (96, 128, 192, 256, 320, 384, 512, 640, 768, 1024)
MOST_MASKED_ROWS = 256
"""Largest number of packed rows of a round with forms that is recorded in advance."""


class Recordings:
    """Lists the CUDA graphs that one engine can record in advance.

    Its methods may be called on the engine thread, or before this thread starts.

    Args:
        runner: Records passes over prompts.
        step_runner: Records verify passes.
        drafts: The draft source, which lists the recordings of its drafting.
        drafting: True if requests may draft.
        refresh: Adopts a changed draft before a recording, because graphs store only the features that
            the draft needs.
    """

    def __init__(
        self,
        runner: ModelRunner,
        step_runner: StepRunner,
        drafts: DraftSource,
        *,
        drafting: bool,
        refresh: Callable[[], object],
    ) -> None:
        self._runner = runner
        self._step_runner = step_runner
        self._drafts = drafts
        self._drafting = drafting
        self._refresh = refresh

    def rounds(
        self, batches: Seq[tuple[int, DraftShape]], modes: Seq[SamplingMode] = USUAL_MODES
    ) -> list[Recording]:
        """List the CUDA graphs of rounds in which all sequences have the same tree shape.

        Args:
            batches: Pairs of a batch size and a tree shape, in the order in which to record them.
            modes: Sampling modes.
        """
        self._refresh()
        wanted = [(size, shape) for size, shape in batches if self._drafting or not shape.drafts]
        return list(
            round_recordings(self._step_runner, self._drafts, wanted, modes, captures=self._runner.captures)
        )

    def mixed(self, modes: Seq[SamplingMode] = MIXED_MODES, sizes: Seq[int] | None = None) -> list[Recording]:
        """List the graphs of rounds that contain trees of several shapes and plain rows.

        Args:
            modes: Sampling modes.
            sizes: Numbers of rows. None selects those that are recorded in advance.
        """
        self._refresh()
        if not self._drafting:
            return []
        captures = self._runner.captures
        return list(mixed_recordings(self._step_runner, modes, sizes, captures=captures))

    def masked(self) -> list[Recording]:
        """List the graphs of rounds in which outputs have forms. Several ranks do not record such rounds."""
        if self._runner.graphs.observed:
            return []
        captures = self._runner.captures
        return list(masked_recordings(self._step_runner, captures=captures, drafting=self._drafting))

    def prompt(self, size: int) -> Recording:
        """Return the recording of the pass over prompt chunks of up to `size` tokens."""
        self._refresh()
        return f"prompts of {size} tokens", lambda: self._runner.capture_prefill(size)

    def whole_prompt(self, size: int) -> Recording:
        """Return the recording of the pass over one prompt by a library's attention kernel.

        The recording does nothing if there is no such library.
        """
        self._refresh()
        return f"single prompts of {size} tokens", lambda: self._runner.capture_prefill(size, True)


def round_recordings(
    step_runner: StepRunner,
    drafts: DraftSource,
    batches: Seq[tuple[int, DraftShape]],
    modes: Seq[SamplingMode] = USUAL_MODES,
    *,
    captures: bool,
) -> Iterator[Recording]:
    """Yield the recordings of CUDA graphs for rounds in which all sequences have the same tree shape.

    Args:
        step_runner: Records verify passes.
        drafts: The draft source, which lists the recordings of its drafting.
        batches: Pairs of a batch size and a tree shape, in the order in which to record them.
        modes: Sampling modes.
        captures: True if feature rows are stored for a drafter.
    """
    seen: set[PassSize] = set()
    for batch_size, shape in batches:
        bounded = shape.bounded()
        record = drafts.recording(batch_size, shape) if shape.drafts else None
        if record is not None:
            yield f"drafts of {batch_size} sequences, {shape.max_nodes} nodes", record
        nodes = bounded.max_nodes if shape.drafts else 1
        if batch_size * nodes > step_runner.max_rows:
            continue
        rows = padded_size(step_runner.buckets, batch_size * nodes)
        for capture in (True, False) if captures and not shape.drafts else (captures,):
            for mode in modes:
                size = PassSize(rows, width_class(nodes), mode, capture)
                if size not in seen:
                    seen.add(size)
                    yield _recording(step_runner, size)


def mixed_recordings(
    step_runner: StepRunner,
    modes: Seq[SamplingMode] = MIXED_MODES,
    sizes: Seq[int] | None = None,
    *,
    captures: bool,
) -> Iterator[Recording]:
    """Yield the recordings of CUDA graphs for rounds with trees.

    Larger rounds come first, so that the graphs of smaller rounds can reuse the memory of larger graphs.

    Args:
        step_runner: Records verify passes.
        modes: Sampling modes.
        sizes: Numbers of rows. None selects those that are recorded in advance.
        captures: True if feature rows are stored for a drafter.
    """
    most = min(MOST_MIXED_ROWS, step_runner.max_rows)
    if sizes is None:
        sizes = [rows for rows in step_runner.buckets if rows <= DENSE_ROWS or rows in WIDE_ROWS]
    for rows in reversed(step_runner.buckets):
        if 1 < rows <= most and rows in sizes:
            for mode in modes:
                for width in WIDTHS[1:]:
                    yield _recording(step_runner, PassSize(rows, width, mode, captures))


def masked_recordings(step_runner: StepRunner, *, captures: bool, drafting: bool) -> Iterator[Recording]:
    """Yield the recordings of CUDA graphs for rounds with constrained outputs, the largest round first.

    Args:
        step_runner: Records verify passes.
        captures: True if feature rows are stored for a drafter.
        drafting: True if requests may draft.
    """
    most = min(MOST_MASKED_ROWS, step_runner.max_rows)
    for rows in reversed(step_runner.buckets):
        if rows <= most and (rows <= DENSE_ROWS or rows in WIDE_ROWS):
            for width in WIDTHS if drafting and rows > 1 else WIDTHS[:1]:
                for capture in (True, False) if captures and width == 1 else (captures,):
                    yield _recording(
                        step_runner, PassSize(rows, width, SamplingMode.FULL, capture, masked=True)
                    )


def _recording(step_runner: StepRunner, size: PassSize) -> Recording:
    return f"rounds of {size.rows} rows", lambda: step_runner.capture(size)
