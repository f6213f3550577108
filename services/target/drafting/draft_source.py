"""The interface through which a round gets its draft trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.policy.cost_model import DraftPath
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.spec.tree import DraftShape

Draft = Callable[[], None]
"""Enqueues the drafting of a round whose entries have been uploaded."""


@dataclass(frozen=True, slots=True)
class PreparedDrafts:
    """A round whose drafting can be enqueued.

    Attributes:
        entries: The entries of the round. An entry without a tree has the shape `NO_DRAFT`. Sequences that
            still await their trees are left out, so the list may be empty.
        enqueue: Function that enqueues the drafting. None if no sequence drafts in this round.
        may_run_ahead: True if the next round can be enqueued before the host has read this round.
        catches_up: True if the drafter must first process many earlier tokens of some sequences.
    """

    entries: Seq[Entry]
    enqueue: Draft | None
    may_run_ahead: bool = True
    catches_up: bool = False


@dataclass(frozen=True, slots=True)
class ProposalWait:
    """Measured times of one request for the trees of a round that ran through the host.

    Attributes:
        wait_s: Seconds for which the round waited for its trees.
        answer_s: Seconds from the announcement of the round until its trees had arrived.
        requested: Number of sequences for which trees were requested, by the requested tree shape. The answer
            may contain smaller trees.
        draft_s: Seconds for which the drafter worked on the trees, as reported by the drafter.
    """

    wait_s: float
    answer_s: float
    requested: Mapping[DraftShape, int]
    draft_s: float = 0.0


class DraftSource(Protocol):
    """Interface of the code that supplies the draft trees of rounds. Engine thread only.

    Draft sources inherit from this class. They override a method with a default implementation only if the
    method has work to do.
    """

    @property
    def path(self) -> DraftPath:
        """How the trees of the next round reach the target."""
        ...

    def recording(self, batch_size: int, shape: DraftShape) -> Callable[[], None] | None:
        """Return a function that records the drafting of `batch_size` trees of one shape in advance.

        Return None if this drafting is not recorded.
        """
        return None

    @property
    def requested(self) -> bool:
        """True if the trees of the next round have been requested. Joining sequences then cannot draft."""
        return False

    def waits_for_host(self, entries: Seq[Entry]) -> bool:
        """Return True if the results of all earlier rounds must be read before this round is drafted."""
        ...

    def prepare(self, entries: Seq[Entry]) -> PreparedDrafts:
        """Prepare the drafting of a round."""
        ...

    def launched(self) -> None:
        """Do the host's work for the round that was just enqueued, before the previous round is read."""
        return

    def receive_trees(self) -> None:
        """Do the host's part of drafting the round that was enqueued last. This may wait for a drafter.

        The decode loop calls this method before it reads that round, and after it has read all earlier
        rounds.
        """
        return

    def take_wait(self) -> ProposalWait | None:
        """Return the times of the last round's trees. Return None if they were not measured."""
        return None

    def saved(self, seconds: float) -> None:
        """Note how much time the trees of the last round have saved, in seconds."""
        return

    def prefilled(self, chunk: PrefillChunk) -> None:
        """Pass on the feature rows of a prompt chunk that was enqueued."""
        ...

    def first_token(self, sequence: Sequence, token: int) -> None:
        """Pass on the first token after a prompt. The sequence already contains the token."""
        ...

    def committed(self, entry: Entry, kept: Seq[int], outcome: Outcome) -> None:
        """Pass on the tokens that a round chose for a sequence that continues."""
        ...

    def read(self, ended: Set[int], draft_s: float) -> None:
        """Finish a round after all its entries were passed to `committed`, before its tokens are delivered.

        Args:
            ended: Ids of the drafter's sessions that end with this round and were not closed yet.
            draft_s: Seconds of drafting on the device, which include the wait for another process.
        """
        return

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence that is about to end or to be retracted."""
        ...

    def abandon(self) -> None:
        """Forget all rounds after a failure that has ended all sequences."""
        ...
