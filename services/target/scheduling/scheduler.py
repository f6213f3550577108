"""Which sequences prefill and decode in a step, and who holds pages: continuous batching with retraction.

A sequence waits, is admitted when pages for all of its tokens are free, prefills in chunks, then decodes in every step. When a decoding
sequence needs a page and none is free, a paused one, or else the one that arrived last, is *retracted*: it gives back its pages, keeps
its tokens, and waits to be prefilled again from prompt + emitted tokens, which is exact. The oldest is never retracted for a younger
one and fits into the pool alone (checked on submission), so something always advances.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.services.target.scheduling.limits import SchedulerLimits
from outrider.services.target.scheduling.queue_gate import QueueGate
from outrider.services.target.scheduling.sequence import Sequence, SequenceStatus
from outrider.shared.kv.pages import PageAllocator, PageLease

SPARE_TOKENS = 64
"""What the leases of a batch on the device grow by beyond their need."""
PLENTY = 4
"""Spare pages are taken while there are so many times as many."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows ``[start, stop)`` of one sequence to compute; the last chunk of a prefill yields a token."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether this chunk reaches the last committed token."""
        return self.stop == self.sequence.committed_len


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step. `retracted` and `admitted` are told so that the drafter can close and open them."""

    admitted: list[Sequence]
    retracted: list[Sequence]
    prefills: list[PrefillChunk]
    decodes: list[Sequence]


class Scheduler:
    """Owns every live sequence and every page lease. Engine thread only, except `gate`."""

    def __init__(self, allocator: PageAllocator, page_size: int, limits: SchedulerLimits) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.limits = limits
        self.gate = QueueGate(limits)
        self.waiting: list[Sequence] = []
        self.active: list[Sequence] = []
        self.num_retractions = 0

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.active
        yield from self.waiting

    @property
    def capacity(self) -> int:
        """Slots of the whole pool: the longest sequence that can ever be served."""
        return self.allocator.num_pages * self.page_size

    def has_work(self) -> bool:
        """Whether `schedule` may return something to do: an unpaused sequence exists."""
        return any(sequence.paused_at is None for sequence in self)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence: higher priority first, then by arrival. The caller has passed `gate.enter`."""
        bisect.insort(self.waiting, sequence, key=_queue_key)

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step and reserve its pages: every decoding sequence can store `node_bound` rows afterwards."""
        retracted: list[Sequence] = []
        decodes = self._reserve_decodes(retracted)
        admitted = [] if retracted else self._admit(now, retracted)
        return StepPlan(admitted, retracted, self._chunks(), decodes)

    def reserve_ahead(self, sequence: Sequence, committed_upper: int) -> bool:
        """Grow a running sequence's lease for a round that starts at most at this committed_len; False when no page is free."""
        assert sequence.lease is not None
        missing = self._missing(sequence, committed_upper)
        return missing <= 0 or sequence.lease.extend(missing)

    def reserve_all_ahead(self, uppers: list[tuple[Sequence, int]]) -> bool:
        """Grow the leases of a batch for a round, see `reserve_ahead`; if one must, all do, by more than is needed where there is plenty.

        The device's page tables are written anew whenever a lease has grown: so they seldom are.
        """
        if any(self._missing(sequence, upper) > 0 for sequence, upper in uppers):
            spare = [
                (one, self._missing(one, min(upper + SPARE_TOKENS, one.end_len))) for one, upper in uppers
            ]
            if PLENTY * sum(max(missing, 0) for _, missing in spare) <= self.allocator.free_pages:
                for sequence, missing in spare:
                    if missing > 0 and sequence.lease is not None:
                        sequence.lease.extend(missing)
        return all(self.reserve_ahead(sequence, upper) for sequence, upper in uppers)

    def decoding(self) -> list[Sequence]:
        """Return the sequences that would decode if a step were scheduled now, in its order."""
        running = [
            one for one in self.active if one.status is SequenceStatus.RUNNING and one.paused_at is None
        ]
        return sorted(running, key=_queue_key)

    def has_other_work(self) -> bool:
        """Whether `schedule` would prefill or admit anything: what rounds that stay on the device must make way for."""
        if any(
            sequence.status is SequenceStatus.PREFILLING and sequence.paused_at is None
            for sequence in self.active
        ):
            return True
        first = next((sequence for sequence in self.waiting if sequence.paused_at is None), None)
        return first is not None and self._admissible(first)

    def worth_waiting_for(self, prefilled: list[PrefillChunk]) -> bool:
        """Whether those whose prompts this step computed had better wait for the next, which computes the rest of the prompts.

        That is so if nobody else decodes: a round of some takes about as long as one of all, and nobody waits for more than one step.
        """
        prefilling = [
            one for one in self.active if one.status is SequenceStatus.PREFILLING and one.paused_at is None
        ]
        if not 0 < sum(one.committed_len - one.cached_len for one in prefilling) <= self.limits.prefill_chunk:
            return False
        fresh = {chunk.sequence.session_id for chunk in prefilled}
        return all(one.session_id in fresh for one in self.decoding())

    def release(self, sequence: Sequence, now: float) -> None:
        """Drop a sequence that finished, failed or was cancelled, and give back its pages. Safe to call twice."""
        if sequence.status is SequenceStatus.ENDED:
            return
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            if not sequence.resumptions:
                self.gate.leave(sequence.prompt_len, now)
        else:
            self.active.remove(sequence)
        sequence.status = SequenceStatus.ENDED
        self._give_back(sequence)

    def recompute(self, sequence: Sequence) -> None:
        """Prefill an active sequence again in its own pages, e.g. to capture features that its first pass did not."""
        sequence.feature_len = 0
        if sequence.cached_len:
            sequence.cached_len = 0
            sequence.status = SequenceStatus.PREFILLING
            sequence.resumptions += 1

    def check(self) -> None:
        """Assert that no page is lost and no length out of order."""
        self.allocator.check()
        held = sum(len(sequence.lease.pages) for sequence in self if sequence.lease is not None)
        assert held + self.allocator.free_pages == self.allocator.num_pages, (
            held,
            self.allocator.free_pages,
            self.allocator.num_pages,
        )
        for sequence in self:
            sequence.check()

    def _reserve_decodes(self, retracted: list[Sequence]) -> list[Sequence]:
        decodes: list[Sequence] = []
        for sequence in sorted(self.active, key=_queue_key) if len(self.active) > 1 else list(self.active):
            if sequence.status is not SequenceStatus.RUNNING or sequence.paused_at is not None:
                continue
            while not self.reserve_ahead(sequence, sequence.committed_len):
                victim = self._victim()
                self._retract(victim)
                retracted.append(victim)
                if victim is sequence:
                    break
            else:
                decodes.append(sequence)
        return [sequence for sequence in decodes if sequence.status is SequenceStatus.RUNNING]

    def _victim(self) -> Sequence:
        return max(self.active, key=lambda sequence: (sequence.paused_at is not None, _queue_key(sequence)))

    def _retract(self, sequence: Sequence) -> None:
        self.active.remove(sequence)
        self._give_back(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.cached_len = 0
        sequence.feature_len = 0
        sequence.resumptions += 1
        self.num_retractions += 1
        bisect.insort(self.waiting, sequence, key=_queue_key)

    def _admit(self, now: float, retracted: list[Sequence]) -> list[Sequence]:
        admitted: list[Sequence] = []
        for sequence in (
            [sequence for sequence in self.waiting if sequence.paused_at is None] if self.waiting else ()
        ):
            while (lease := self._lease_for_admission(sequence)) is None:
                # Slow readers must not keep others out: with nobody else at work, one of them gives up its pages.
                if not self.active or any(other.paused_at is None for other in self.active):
                    return admitted
                victim = self._victim()
                self._retract(victim)
                retracted.append(victim)
            sequence.lease = lease
            sequence.status = SequenceStatus.PREFILLING
            if not sequence.resumptions:
                sequence.admitted_at = now
                self.gate.leave(sequence.prompt_len, now)
            self.waiting.remove(sequence)
            self.active.append(sequence)
            admitted.append(sequence)
        return admitted

    def _lease_for_admission(self, sequence: Sequence) -> PageLease | None:
        if not self._admissible(sequence):
            return None
        return self.allocator.allocate(self._pages(sequence.committed_len + sequence.node_bound))

    def _admissible(self, sequence: Sequence) -> bool:
        if len(self.active) >= self.limits.max_running:
            return False
        # One spare page for each active sequence, or else it is retracted again a few steps later.
        pages = self._pages(sequence.committed_len + sequence.node_bound)
        return pages + len(self.active) <= self.allocator.free_pages

    def _chunks(self) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        budget = self.limits.prefill_chunk
        for sequence in self.active:
            if sequence.status is SequenceStatus.PREFILLING and sequence.paused_at is None and budget > 0:
                stop = min(sequence.cached_len + budget, sequence.committed_len)
                budget -= stop - sequence.cached_len
                chunks.append(PrefillChunk(sequence, sequence.cached_len, stop))
        return chunks

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None

    def _missing(self, sequence: Sequence, committed_upper: int) -> int:
        """Return the pages that a lease lacks (below 0: has to spare) for a round that starts at most at this committed_len."""
        assert sequence.lease is not None
        return self._pages(committed_upper + sequence.node_bound) - len(sequence.lease.pages)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def _queue_key(sequence: Sequence) -> tuple[int, int]:
    return (-sequence.request.priority, sequence.arrival)
