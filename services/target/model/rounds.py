"""Rounds that are pending, in flight or read: their entries, results in host memory, and times."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.model.scores import unpack_logprobs
from outrider.services.target.model.token_states import AcceptedPathTap
from outrider.services.target.model.verify_pass import PassResult, PassSize
from outrider.shared.base.generation import TraceNode
from outrider.shared.base.logit_rules import TokenLogprob
from outrider.shared.base.token_states import TokenStates
from outrider.shared.engine.recorded_graph import Parts

Moment = float | torch.cuda.Event
"""A time: seconds of `time.monotonic` on a CPU, an event on a GPU."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Times at three moments of a round: its start, the end of drafting, and its end.

    Drafting includes the drafter's work on earlier tokens. In a round without drafts, the first two times are
    the same.

    On a GPU, the times are CUDA events. On a CPU, they are seconds from `time.monotonic()`.
    """

    begun: Moment
    drafted: Moment
    verified: Moment

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of drafting and of verifying. The round must have ended."""
        return _between(self.begun, self.drafted), _between(self.drafted, self.verified)


@dataclass(frozen=True, slots=True)
class Round:
    """A round that was enqueued and that the host has not read yet.

    Attributes:
        number: The number of the round.
        entries: The sequences, in the order of the results.
        starts: Index of the first packed row of each entry.
        launched_at: Time of the launch, from `time.monotonic()`.
        result: ``[B, 2 + 2 R] int32`` in host memory, the packed results of B entries, as in
            `PassResult.packed`.
        nodes: ``[4, M] int32`` in host memory: tokens, parents, depths and log-probabilities of the trees.
            None if no client wants a trace.
        marks: Times of the round's start, of the end of drafting, and of the round's end.
        provisional: True if a piece of the round ran without a CUDA graph. Later rounds of the same size then
            probably take less time.
        logprobs: ``[M, WORDS] int32`` in host memory, as in `PassResult`. None if no client wants logprobs.
        tap: Receives states of tokens, such as hidden states, and logprobs of tokens that clients have named.
            None if no client wants such data.
    """

    number: int
    entries: Seq[Entry]
    starts: Seq[int]
    launched_at: float
    result: torch.Tensor
    nodes: torch.Tensor | None
    marks: Marks
    provisional: bool = False
    logprobs: torch.Tensor | None = None
    tap: AcceptedPathTap | None = None

    def logprobs_of(self, index: int, count: int) -> list[TokenLogprob]:
        """Return the logprobs of the first `count` tokens that the round chose for an entry."""
        top = self.entries[index].sequence.request.logprobs.top
        if top is None:
            return []
        assert self.logprobs is not None, "the round was launched without logprobs"
        start = self.starts[index]
        requested = self.tap.requested_of(index, count) if self.tap is not None else None
        return unpack_logprobs(self.logprobs[start : start + count], top, requested)

    def states_of(self, index: int, first: int, count: int) -> TokenStates | None:
        """Return the states behind the first `count` tokens of an entry, whose root has the index `first`."""
        return self.tap.states_of(index, first, count) if self.tap is not None else None

    def trace_of(self, index: int, num_nodes: int) -> list[TraceNode]:
        """Return the tree of an entry for the client. Requires `nodes`."""
        assert self.nodes is not None, "the round was launched without a trace"
        start = self.starts[index]
        part = self.nodes[:, start : start + num_nodes]
        tokens, parents, depths = part[:3].tolist()
        logprobs = part[3].view(torch.float32).tolist()
        return [TraceNode(*node) for node in zip(tokens, parents, depths, logprobs, strict=True)]


@dataclass(slots=True)
class PendingVerify:
    """A round whose verify pass cannot be completed until the host has read all earlier rounds.

    Attributes:
        number, entries, starts, launched_at: As in `Round`.
        size: Size of the verify pass.
        begun: Time of the round's start. None if the round starts with its verify pass.
        provisional_runs: `GraphCache.provisional_runs` before the round.
        tap: As in `Round`.
        work: Enqueues the forward pass, and then the rest of the verify pass. None if the round has no forms.
        drafted: Time of the end of drafting. None until the forward pass has been enqueued.
    """

    number: int
    entries: Seq[Entry]
    starts: Seq[int]
    launched_at: float
    size: PassSize
    begun: Moment | None
    provisional_runs: int
    tap: AcceptedPathTap | None = None
    work: Parts[PassResult] | None = None
    drafted: Moment | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A round whose results the host has read.

    Attributes:
        round: The round.
        outcomes: One outcome per entry. None for an entry whose slot was idle.
        seconds: Duration of the round in seconds, counted from the end of the previous round. If the round
            was launched later, the duration is counted from its launch.
        draft_s, verify_s: Seconds of drafting and of verifying.
    """

    round: Round
    outcomes: list[Outcome | None]
    seconds: float
    draft_s: float
    verify_s: float


def unpack_outcomes(rows: list[list[int]]) -> list[Outcome | None]:
    """Decode the result of `verify_pass` into one outcome per row. The outcome of an idle row is None."""
    if not rows:
        return []
    columns = (len(rows[0]) - 2) // 2
    return [
        None
        if accepted < 0
        else Outcome(num_nodes, rest[1 : 1 + accepted], rest[columns : columns + accepted + 1])
        for accepted, num_nodes, *rest in rows
    ]


def _between(first: Moment, second: Moment) -> float:
    if isinstance(first, torch.cuda.Event) and isinstance(second, torch.cuda.Event):
        return float(first.elapsed_time(second)) / 1e3
    assert isinstance(first, float)
    assert isinstance(second, float)
    return second - first
