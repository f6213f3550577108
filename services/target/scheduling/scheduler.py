"""Continuous batching: decides which sequences prefill, which decode, and which own KV pages.

The life of a sequence:

1. The sequence waits in the queue until pages for all of its tokens are free. It is then admitted.
2. The sequence prefills in chunks and then decodes in every step.
3. The scheduler may *retract* the sequence. A retracted sequence returns its pages, keeps its tokens and
   waits again. Later, its prompt and its emitted tokens are prefilled again. This does not change its tokens.
   There are two reasons to retract a sequence:

   - A decoding sequence needs a page, and none is free. The scheduler retracts a paused sequence if there is
     one, and otherwise usually the latest arrival (`TokenShares.victim`).
   - A waiting sequence needs a slot or pages. The scheduler retracts a sequence that is paused, has a lower
     priority, or belongs to a tenant with more than its share (`TokenShares.makes_room`).

4. When a sequence ends or is retracted, its full pages stay in the prefix cache until other sequences need
   the memory.

Another sequence may be computing a prefix that a waiting sequence shares. The waiting sequence is then
admitted after this prefix has been stored. It does not wait for a prefix that saves little work
(`LONG_PREFIX`).

At least one sequence always advances, for two reasons. The oldest sequence of the highest priority that is
not paused is never retracted. Each sequence fits into the KV pool if it is alone there. This is checked for
each new request.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.services.target.scheduling.limits import SchedulerLimits
from outrider.services.target.scheduling.queue_gate import QueueGate
from outrider.services.target.scheduling.sequence import Sequence, SequenceStatus
from outrider.services.target.scheduling.token_shares import TokenShares
from outrider.shared.kv.pages import PageAllocator, PageLease
from outrider.shared.kv.prefix_cache import PrefixCache, PrefixMatch

SPARE_TOKENS = 64
"""Number of tokens for which a lease gets spare pages when it grows."""
PLENTY = 4
"""Spare pages are reserved only if the number of available pages is at least this multiple of the number of
spare pages."""
LONG_PREFIX = 256
"""A sequence waits if another sequence is computing at least this many tokens of a prefix that both share.

A sequence also waits for fewer tokens, if they are at least half of the tokens that it has to compute."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens ``[start, stop)`` of one sequence, to be computed in a step.

    The last chunk of a prefill yields a new token.
    """

    sequence: Sequence
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """True if this chunk reaches the last committed token."""
        return self.stop == self.sequence.committed_len


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The scheduler's plan for one engine step.

    Attributes:
        admitted: Sequences for which drafter sessions must be opened.
        retracted: Sequences for which drafter sessions must be closed.
        prefills: Prompt chunks to compute.
        decodes: Sequences to decode.
    """

    admitted: list[Sequence]
    retracted: list[Sequence]
    prefills: list[PrefillChunk]
    decodes: list[Sequence]


class Scheduler:
    """Owns every live sequence and every lease of KV pages. Engine thread only, except for `gate`.

    Attributes:
        prefixes: The stored prefixes.
        finds_features: True if a request that drafts can use only prefixes with stored feature rows.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, limits: SchedulerLimits) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.limits = limits
        self.gate = QueueGate(limits)
        self.prefixes = PrefixCache(allocator, page_size, enabled=limits.prefix_cache)
        self.finds_features = False
        self.waiting: list[Sequence] = []
        self.active: list[Sequence] = []
        self.shares = TokenShares()
        self.num_retractions = 0
        self._free_slots = list(range(limits.max_running))[::-1]
        # A sequence that found too few pages, and the number of pages that were available at that time.
        self._blocked: tuple[Sequence, int] | None = None

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.active
        yield from self.waiting

    @property
    def capacity(self) -> int:
        """Number of KV slots of the whole pool, and thus the length of the longest sequence that fits."""
        return self.allocator.num_pages * self.page_size

    def has_work(self) -> bool:
        """Return True if `schedule` may return work, i.e. if a sequence exists that is not paused."""
        return any(sequence.paused_at is None for sequence in self)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by priority, then by arrival. The caller must have called `gate.enter`."""
        self.shares.enter(sequence, self)
        bisect.insort(self.waiting, sequence, key=_queue_key)

    def schedule(self, now: float, prefill_tokens: int | None = None) -> StepPlan:
        """Plan the next engine step, and reserve KV slots for the next tree of each decoding sequence.

        The trees have up to `Sequence.node_bound` nodes.

        Args:
            now: The current time, from `time.monotonic()`.
            prefill_tokens: Largest number of prompt tokens to compute while sequences decode. With None, only
                `SchedulerLimits.prefill_chunk` limits the number.
        """
        retracted: list[Sequence] = []
        self.shares.collect(self.active)
        decodes = self._reserve_decodes(retracted)
        admitted = [] if retracted else self._admit(now, retracted)
        if retracted:
            decodes = [sequence for sequence in decodes if sequence.status is SequenceStatus.RUNNING]
        budget = self.limits.prefill_chunk
        if decodes and prefill_tokens is not None:
            budget = min(budget, prefill_tokens)
        return StepPlan(admitted, retracted, self._chunks(budget), decodes)

    def reserve_ahead(self, sequence: Sequence, committed_upper: int) -> bool:
        """Grow a sequence's lease for a round that starts with at most `committed_upper` committed tokens.

        If enough pages are free, the lease grows by `SPARE_TOKENS` more tokens than needed. The lease then
        grows less often, which saves writes to the page table on the device.

        Returns:
            False if no page is free.
        """
        assert sequence.lease is not None
        missing = self._missing(sequence, committed_upper)
        if missing <= 0:
            return True
        spare = self._missing(sequence, min(committed_upper + SPARE_TOKENS, sequence.end_len))
        if PLENTY * spare * len(self.active) <= self.allocator.available_pages:
            missing = max(missing, spare)
        return sequence.lease.extend(missing)

    def decoding(self) -> list[Sequence]:
        """Return the sequences that would decode in a step scheduled now, in the order of that step."""
        return sorted((one for one in self.active if _decodes(one)), key=_queue_key)

    def release(self, sequence: Sequence, now: float) -> None:
        """Drop a sequence that has ended, and free its pages. A second call has no effect."""
        if sequence.status is SequenceStatus.ENDED:
            return
        self.shares.leave(sequence)
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            if not sequence.resumptions:
                self.gate.leave(sequence.prompt_len, now, sequence.request.tenant)
        else:
            self.active.remove(sequence)
        sequence.status = SequenceStatus.ENDED
        self._give_back(sequence)
        self._vacate(sequence)

    def recompute(self, sequence: Sequence) -> None:
        """Prefill an admitted sequence again, for example to capture missing feature rows.

        The results of the sequence's passes in flight become void. The caller must flush the prefix cache
        first. If the sequence shares pages with other sequences, or lacks room for its next round, it gives
        up its pages and waits.
        """
        sequence.feature_len = 0
        if not sequence.cached_len:
            return
        assert sequence.lease is not None
        owns = self.prefixes.take_back(sequence.lease)
        if not owns or not self.reserve_ahead(sequence, sequence.committed_len):
            self._requeue(sequence)
            return
        sequence.cached_len = sequence.found_len = 0
        sequence.status = SequenceStatus.PREFILLING
        sequence.resumptions += 1
        sequence.residence += 1
        sequence.tokens_ahead = sequence.passes_ahead = 0

    def disown(self, sequence: Sequence) -> None:
        """Prevent other sequences from using the pages of a sequence whose K/V may be wrong."""
        if sequence.lease is not None:
            self.prefixes.disown(sequence.lease)

    def check(self) -> None:
        """Assert that no page is lost and that the lengths of every sequence are in the documented order."""
        self.allocator.check()
        self.prefixes.check()
        held = sum(len(sequence.lease.own_pages) for sequence in self if sequence.lease is not None)
        assert held == self.allocator.held_pages, (held, self.allocator.held_pages)
        for sequence in self:
            sequence.check()

    def _reserve_decodes(self, retracted: list[Sequence]) -> list[Sequence]:
        decodes: list[Sequence] = []
        for sequence in sorted(self.active, key=_queue_key) if len(self.active) > 1 else list(self.active):
            if not _decodes(sequence):
                continue
            while not self.reserve_ahead(sequence, sequence.committed_upper):
                victim = self.shares.victim(self.active)
                self._retract(victim)
                retracted.append(victim)
                if victim is sequence:
                    break
            else:
                decodes.append(sequence)
        return decodes

    def _retract(self, sequence: Sequence) -> None:
        self._requeue(sequence)
        self.num_retractions += 1

    def _requeue(self, sequence: Sequence) -> None:
        self.active.remove(sequence)
        self._give_back(sequence)
        sequence.status = SequenceStatus.WAITING
        self._vacate(sequence)
        sequence.cached_len = sequence.found_len = 0
        sequence.feature_len = 0
        sequence.resumptions += 1
        bisect.insort(self.waiting, sequence, key=_queue_key)

    def _admit(self, now: float, retracted: list[Sequence]) -> list[Sequence]:
        admitted: list[Sequence] = []
        if self.waiting:
            for sequence in self.active:
                self._publish(sequence)
        for sequence in self.shares.candidates(self.waiting, self.active) if self.waiting else ():
            match = None if self._is_blocked(sequence) else self._find(sequence)
            if match is not None and self._awaits_prefix(sequence, match):
                continue
            while (lease := self._lease_for_admission(sequence, match)) is None:
                # Slow readers must not keep slots and pages that other requests wait for. The youngest paused
                # sequence gives up its slot and pages first.
                victim: Sequence | None
                if any(other.paused_at is not None for other in self.active):
                    victim = self.shares.victim(self.active)
                else:
                    victim = self.shares.makes_room(sequence, self.active, admitted)
                if victim is None:
                    return admitted
                self._retract(victim)
                retracted.append(victim)
                match = None  # the cache has changed
            sequence.lease = lease
            sequence.status = SequenceStatus.PREFILLING
            sequence.slot = self._free_slots.pop()
            sequence.residence += 1
            if not sequence.resumptions:
                sequence.admitted_at = now
                self.gate.leave(sequence.prompt_len, now, sequence.request.tenant)
            self.waiting.remove(sequence)
            self.active.append(sequence)
            admitted.append(sequence)
            self._begin(sequence, lease)
            self.shares.admitted(sequence)
        return admitted

    def _lease_for_admission(self, sequence: Sequence, match: PrefixMatch | None) -> PageLease | None:
        """Lease the pages of a sequence. Search its stored prefix first if `match` is None."""
        if self._is_blocked(sequence):
            return None
        match, available = match or self._find(sequence), self.allocator.available_pages
        # Keep one spare page per active sequence. Otherwise, a newly admitted sequence would be retracted
        # after a few steps.
        pages = self._pages(sequence.committed_len + sequence.node_bound)
        lease = self.prefixes.lease(match, pages, spare=len(self.active))
        self._blocked = None if lease is not None else (sequence, available)
        if lease is not None:
            sequence.feature_len = match.feature_pages * self.page_size
        return lease

    def _is_blocked(self, sequence: Sequence) -> bool:
        """Return True if there is clearly no room for a sequence, without looking for its prefix."""
        if len(self.active) >= self.limits.max_running:
            return True
        if self._blocked is None or self._blocked[0] is not sequence:
            return False
        return self.allocator.available_pages <= self._blocked[1]

    def _find(self, sequence: Sequence) -> PrefixMatch:
        """Return the longest stored prefix that a sequence can use."""
        with_features = self.finds_features and sequence.wants_drafts
        salt = sequence.request.cache_salt
        return self.prefixes.match(sequence.tokens, sequence.sharable_len, salt, with_features=with_features)

    def _awaits_prefix(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Return True if a sequence should wait for the prefix that another sequence is computing.

        `match` is the stored prefix of the sequence.
        """
        awaited = match.awaited * self.page_size
        lacks = sequence.committed_len - len(match.nodes) * self.page_size
        if not awaited or (awaited < LONG_PREFIX and 2 * awaited < lacks):
            return False
        return any(one.lease is match.awaited_from and one.paused_at is None for one in self.active)

    def _begin(self, sequence: Sequence, lease: PageLease) -> None:
        """Let a sequence begin after the stored prefix, and announce the pages that it will compute."""
        found = lease.shared * self.page_size
        sequence.cached_len = sequence.found_len = found
        if not sequence.resumptions:
            sequence.cached_prompt = min(found, sequence.prompt_len)
            if self.prefixes.enabled:
                self.prefixes.queried_tokens += sequence.prompt_len
                self.prefixes.hit_tokens += sequence.cached_prompt
        self.prefixes.promise(lease, sequence.tokens)

    def _publish(self, sequence: Sequence) -> None:
        """Let other sequences use the prefix that a sequence has computed."""
        if sequence.lease is not None:
            self.prefixes.publish(sequence.lease, sequence.cached_len, sequence.feature_len)

    def _chunks(self, budget: int) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        for sequence in self.shares.prefill_order(self.active):
            if sequence.status is SequenceStatus.PREFILLING and sequence.paused_at is None and budget > 0:
                stop = min(sequence.cached_len + budget, sequence.committed_len)
                budget -= stop - sequence.cached_len
                chunks.append(PrefillChunk(sequence, sequence.cached_len, stop))
        return chunks

    def _vacate(self, sequence: Sequence) -> None:
        """Free the slot. Rounds in flight still process the slot, but their results for it are void."""
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        sequence.tokens_ahead = sequence.passes_ahead = 0

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            cached = sequence.tokens[: sequence.cached_len]
            self.prefixes.end(sequence.lease, cached, sequence.feature_len)
            sequence.lease = None

    def _missing(self, sequence: Sequence, committed_upper: int) -> int:
        """Return the number of pages that a lease lacks for a round that starts at `committed_upper` tokens.

        A negative number is the number of spare pages.
        """
        assert sequence.lease is not None
        return self._pages(committed_upper + sequence.node_bound) - len(sequence.lease.pages)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def _queue_key(sequence: Sequence) -> tuple[int, int]:
    return (-sequence.request.priority, sequence.arrival)


def _decodes(sequence: Sequence) -> bool:
    """Return True if the sequence runs, is not paused, and may go on after the passes in flight."""
    return (
        sequence.status is SequenceStatus.RUNNING
        and sequence.paused_at is None
        and sequence.remaining > sequence.passes_ahead
    )
