"""Steps of an engine whose model is spread: one that does not come back ends the target (`shared.parallel.lead.Lead.step`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from outrider.shared.engine.graphs import GraphCache
from outrider.shared.engine.loop import Steppable
from outrider.shared.nn.decoder import Decoder
from outrider.shared.parallel.lead_decoder import LeadDecoder


class WatchedEngine:
    """A `Steppable` whose steps are watched.

    Args:
        engine: What steps.
        decoder: What it computes with.
    """

    def __init__(self, engine: Steppable, decoder: LeadDecoder) -> None:
        self._engine = engine
        self._decoder = decoder

    def has_work(self) -> bool:
        """See `Steppable.has_work`."""
        return self._engine.has_work()

    def step(self) -> None:
        """See `Steppable.step`."""
        with self._decoder.watched():
            self._engine.step()

    def next_wakeup(self) -> float | None:
        """See `Steppable.next_wakeup`."""
        return self._engine.next_wakeup()

    def step_failed(self, error: Exception) -> None:
        """See `Steppable.step_failed`."""
        self._engine.step_failed(error)


def watched_engine(engine: Steppable, decoder: Decoder) -> Steppable:
    """Return the engine, watched if its model is spread."""
    return WatchedEngine(engine, decoder) if isinstance(decoder, LeadDecoder) else engine


def watched(decoder: Decoder) -> AbstractContextManager[None]:
    """Watch what is done with a decoder outside of an engine's steps, if it is spread."""
    return decoder.watched() if isinstance(decoder, LeadDecoder) else nullcontext()


def forget_graphs(graphs: GraphCache, decoder: Decoder) -> None:
    """Drop the graphs of a spread model on all ranks, once nobody steps: NCCL waits for ever where a graph still holds a group."""
    if isinstance(decoder, LeadDecoder) and decoder.failure is None:
        graphs.clear()
