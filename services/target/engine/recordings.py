"""Lists the CUDA graphs of the usual rounds, to record them at start-up or after a change of the draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import product
from typing import Protocol

from outrider.services.target.model.packed_batch import SamplingMode, width_class
from outrider.services.target.model.round_runner import RoundRunner
from outrider.services.target.model.verify_pass import PassSize
from outrider.services.target.policy.looks import LOOK_ROWS
from outrider.shared.spec.tree import DraftShape


class RecordedDrafts(Protocol):
    """A draft source whose drafts are recorded in advance."""

    def capture(self, batch_size: int, shape: DraftShape) -> None:
        """Record the draft of one size with idle rows."""
        ...


USUAL_MODES = (SamplingMode.NOISE, SamplingMode.GREEDY)
"""Sampling modes whose graphs are recorded in advance. Other modes are recorded after some use."""

Recording = tuple[str, Callable[[], None]]
"""A description, and a function that records one graph or does nothing if the graph exists."""


def round_recordings(
    rounds: RoundRunner,
    drafts: RecordedDrafts | None,
    batches: Seq[tuple[int, DraftShape]],
    *,
    captures: bool,
) -> Iterator[Recording]:
    """Yield the recordings of rounds in which all sequences have the same tree shape, and of looks.

    Args:
        rounds: Records verify passes.
        drafts: Records drafts. None if trees come from the host.
        batches: Batch sizes and shapes, in the order in which to record them.
        captures: True if feature rows are stored for a drafter.
    """
    seen: set[PassSize] = set()

    def passes(rows: int, nodes: int, capture: bool) -> Iterator[Recording]:
        if rows > rounds.max_rows:
            return
        rows = rounds.buckets.size_for(rows)
        for mode in USUAL_MODES:
            size = PassSize(rows, width_class(nodes), mode, capture)
            if size not in seen:
                seen.add(size)
                yield f"rounds of {rows} rows", lambda size=size: rounds.capture(size)  # type: ignore[misc]

    for batch_size, shape in batches:
        if shape.drafts and drafts is not None:
            yield (
                f"drafts of {batch_size} sequences, {shape.max_nodes} nodes",
                lambda batch_size=batch_size, shape=shape: drafts.capture(batch_size, shape),  # type: ignore[misc]
            )
        nodes = _nodes(shape)
        for capture in (True, False) if captures and not shape.drafts else (captures,):
            yield from passes(batch_size * nodes, nodes, capture)
    # In a look of `auto`, a few sequences draft and the others do not.
    crowds = [size for size, shape in batches if not shape.drafts and size > LOOK_ROWS]
    shapes = dict.fromkeys(shape for _, shape in batches if shape.drafts)
    for batch_size, shape in product(crowds, shapes):
        nodes = _nodes(shape)
        yield from passes(batch_size + LOOK_ROWS * (nodes - 1), nodes, captures)


def _nodes(shape: DraftShape) -> int:
    return shape.bounded().max_nodes if shape.drafts else 1
