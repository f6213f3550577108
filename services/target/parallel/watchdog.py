"""Watches engine steps of a tensor-parallel model: a step that does not return in time ends the target.

`shared.parallel.lead.Lead.step` implements the timeout itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from outrider.shared.engine.graphs import GraphCache
from outrider.shared.engine.loop import Steppable
from outrider.shared.nn.decoder import Decoder
from outrider.shared.parallel.lead_decoder import LeadDecoder


class WatchedEngine(Steppable):
    """An engine whose steps must return in time.

    Args:
        engine: The engine to step.
        decoder: The model that the engine uses.
    """

    def __init__(self, engine: Steppable, decoder: LeadDecoder) -> None:
        self._engine = engine
        self._decoder = decoder

    def has_work(self) -> bool:
        return self._engine.has_work()

    def step(self) -> None:
        with self._decoder.watched():
            self._engine.step()

    def next_wakeup(self) -> float | None:
        return self._engine.next_wakeup()

    def step_failed(self, error: Exception) -> None:
        self._engine.step_failed(error)


def watched_engine(engine: Steppable, decoder: Decoder) -> Steppable:
    """Return the engine, wrapped in a `WatchedEngine` if its model is tensor-parallel."""
    return WatchedEngine(engine, decoder) if isinstance(decoder, LeadDecoder) else engine


def watched(decoder: Decoder) -> AbstractContextManager[None]:
    """Apply the timeout to work outside of engine steps, such as warm-up, if the model is tensor-parallel."""
    return decoder.watched() if isinstance(decoder, LeadDecoder) else nullcontext()


def forget_graphs(graphs: GraphCache, decoder: Decoder) -> None:
    """Drop the CUDA graphs of a tensor-parallel model on all ranks.

    Call this function after the last engine step and before the ranks leave NCCL. A rank that leaves NCCL
    while a graph uses the NCCL group waits forever. If a rank has failed, the graphs are kept, because the
    device may never finish.
    """
    if isinstance(decoder, LeadDecoder) and decoder.failure is None:
        graphs.clear()
