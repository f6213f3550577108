"""Shares the target fairly between tenants: decides which sequence is admitted next, and which makes room.

Each tenant with live sequences has a counter of its tokens: prompt tokens at admission, and emitted tokens.
Sequences of the tenant with the lowest counter are admitted first (deficit round-robin with tokens as the
unit). A tenant that arrives starts with the lowest counter of the other tenants. Its absence therefore earns
it no credit.

Requests of one tenant could still occupy all slots until their answers end. A waiting sequence may therefore
take a slot from another tenant, but only if its own tenant then has no more slots than the other tenant.

With a single tenant, nothing is counted, and sequences are ordered by priority, then by arrival.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from outrider.services.target.scheduling.sequence import Sequence, SequenceStatus


class TokenShares:
    """The counters of all tenants with live sequences. Engine thread only."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._live: Counter[str] = Counter()

    @property
    def contended(self) -> bool:
        """True if sequences of several tenants are live."""
        return len(self._served) > 1

    def served(self, tenant: str) -> int:
        """Return the tokens that a tenant was served, relative to other tenants."""
        return self._served.get(tenant, 0)

    def enter(self, sequence: Sequence, others: Iterable[Sequence]) -> None:
        """Count a new live sequence. `others` are the sequences that were live before."""
        tenant = sequence.request.tenant
        if tenant not in self._served:
            lowest = min(self._served.values(), default=0)
            if len(self._served) == 1:
                # Until now, nothing was counted. Count the prompts that are being computed from here on.
                for other in others:
                    other.charged_len = other.committed_len
                    if other.status is SequenceStatus.PREFILLING:
                        self._served[other.request.tenant] += other.committed_len - other.cached_len
            self._served[tenant] = lowest
        self._live[tenant] += 1

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        tenant = sequence.request.tenant
        self._collect(sequence)
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant], self._served[tenant]

    def admitted(self, sequence: Sequence) -> None:
        """Charge a tenant for a sequence's prompt tokens that were not cached, at the first admission.

        Later admissions of the same sequence are not charged.
        """
        if self.contended and not sequence.resumptions:
            self._served[sequence.request.tenant] += sequence.prompt_len - sequence.cached_prompt

    def collect(self, active: Iterable[Sequence]) -> None:
        """Charge the tokens that sequences have emitted since the last call."""
        if self.contended:
            for sequence in active:
                self._collect(sequence)

    def _collect(self, sequence: Sequence) -> None:
        emitted = sequence.committed_len - sequence.charged_len
        sequence.charged_len = sequence.committed_len
        self._served[sequence.request.tenant] += emitted

    def candidates(self, waiting: Seq[Sequence], active: Seq[Sequence]) -> Iterator[Sequence]:
        """Yield waiting sequences in the order of admission: by priority, then tenant, then arrival.

        The caller may admit and retract sequences between two steps of the iteration.

        Args:
            waiting: The waiting sequences, ordered by priority and arrival. Paused sequences are not yielded.
            active: The admitted sequences.
        """
        ready = [sequence for sequence in waiting if sequence.paused_at is None]
        if not self.contended:
            yield from ready
            return
        queues: dict[str, deque[Sequence]] = {}
        for sequence in ready:
            queues.setdefault(sequence.request.tenant, deque()).append(sequence)
        while queues:
            slots = slots_of(active)
            heads = [queue[0] for queue in queues.values()]
            first = min(
                heads,
                key=lambda head: (
                    -head.request.priority,
                    self._served[head.request.tenant],
                    slots[head.request.tenant],
                    head.arrival,
                ),
            )
            queue = queues[first.request.tenant]
            queue.popleft()
            if not queue:
                del queues[first.request.tenant]
            yield first

    def prefill_order(self, active: Seq[Sequence]) -> Seq[Sequence]:
        """Return the admitted sequences in the order in which their prompts are computed."""
        if not self.contended:
            return active
        return sorted(active, key=lambda one: (-one.request.priority, self._served[one.request.tenant]))

    def makes_room(
        self, waiting: Sequence, active: Iterable[Sequence], admitted: Seq[Sequence]
    ) -> Sequence | None:
        """Return the admitted sequence that makes room for a waiting sequence, or None.

        There are two kinds of candidates:

        - If admitted sequences have a lower priority than the waiting sequence, the candidates are the
          sequences of the lowest priority.
        - Otherwise, a candidate has the same priority as the waiting sequence. The candidate's tenant was
          served at least as many tokens as the waiting sequence's tenant, and has at least two more slots.

        The youngest candidate of the tenant with the most slots makes room. The oldest sequence of the
        highest priority is never chosen.

        Args:
            waiting: The sequence that is to be admitted next.
            active: The admitted sequences.
            admitted: Sequences that were admitted in this step. They are not chosen.
        """
        mine = waiting.request
        slots = slots_of(active)
        others = [one for one in active if one not in admitted and one.request.priority <= mine.priority]
        lower = [one for one in others if one.request.priority < mine.priority]
        if lower:
            return max(lower, key=lambda one: _latest(one, slots if self.contended else None))
        above = [
            one
            for one in others
            if self.contended
            and slots[one.request.tenant] >= slots[mine.tenant] + 2
            and self._served[one.request.tenant] >= self._served[mine.tenant]
        ]
        return max(above, key=lambda one: _latest(one, slots), default=None)

    def victim(self, active: Iterable[Sequence]) -> Sequence:
        """Return the sequence to retract if a decoding sequence needs a page and none is free.

        Paused sequences are chosen first, then sequences of the lowest priority. Among these, the youngest
        sequence of the tenant with the most slots is chosen.
        """
        slots = slots_of(active) if self.contended else None
        return max(active, key=lambda one: (one.paused_at is not None, _latest(one, slots)))


def slots_of(active: Iterable[Sequence]) -> Counter[str]:
    """Return the number of admitted sequences of each tenant."""
    return Counter(sequence.request.tenant for sequence in active)


def _latest(sequence: Sequence, slots: Counter[str] | None) -> tuple[int, int, int]:
    """Return a sort key that is largest for the sequence to retract first."""
    request = sequence.request
    return (-request.priority, slots[request.tenant] if slots else 0, sequence.arrival)
