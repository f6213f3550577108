"""CUDA graphs of passes over the new rows of one sequence. The number of rows is padded to a few sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import Any, Generic, Protocol, TypeVar

from outrider.shared.attn.padded import PaddedRows
from outrider.shared.engine.buckets import bucket
from outrider.shared.engine.graphs import GraphCache


class HasRows(Protocol):
    """Static inputs of a pass, including the padding rows."""

    rows: PaddedRows


Inputs = TypeVar("Inputs", bound=HasRows)


class RecordedRows(ABC, Generic[Inputs]):
    """Pads forward passes to row counts that have CUDA graphs, and stores the graphs' static inputs.

    Use this object on the engine thread only.

    Args:
        graphs: Cache in which the passes are recorded.
        sizes: The numbers of rows for which passes are recorded, in ascending order.
    """

    def __init__(self, graphs: GraphCache, sizes: Seq[int]) -> None:
        self._graphs = graphs
        self._sizes = tuple(sizes)
        self._inputs: dict[int, Inputs] = {}

    @abstractmethod
    def _make_inputs(self, size: int) -> Inputs:
        """Allocate the inputs of a pass over at most `size` rows."""

    @abstractmethod
    def _key(self, size: int) -> Hashable:
        """Return the key of the graph for one size."""

    @abstractmethod
    def _pass(self, inputs: Inputs) -> Any:
        """Run the pass over these inputs."""

    def _takes(self, start: int, count: int) -> bool:
        """Return whether a graph is recorded for `count` rows that start at token index `start`."""
        size = bucket(self._sizes, count)
        return (
            size is not None
            and self._at(size).rows.fits(start, count)
            and self._graphs.replays(self._key(size))
        )

    def _size_for(self, count: int) -> int:
        """Return the size of the recorded pass for a number of rows that `_takes` has accepted."""
        size = bucket(self._sizes, count)
        assert size is not None, "no pass is this large; call `_takes` first"
        return size

    def _run(self, size: int) -> Any:
        """Replay the pass of one size over the inputs that were loaded for it."""
        return self._graphs.run(self._key(size), self._pass_of(size))

    def _record(self, size: int) -> None:
        """Record the pass of one size over padding rows, which store nothing."""
        self._at(size).rows.make_idle()
        self._graphs.capture(self._key(size), self._pass_of(size))

    def _pass_of(self, size: int) -> Callable[[], Any]:
        inputs = self._at(size)
        return lambda: self._pass(inputs)

    def _at(self, size: int) -> Inputs:
        found = self._inputs.get(size)
        if found is None:
            found = self._inputs[size] = self._make_inputs(size)
        return found
