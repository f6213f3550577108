"""Admission control: limits the sequences and prompt tokens that wait for a target, and their waiting time.

A request above a limit is refused immediately with status 429. The waiting time has either a fixed limit, or
no limit, or a limit that begins when requests keep arriving faster than they are answered (`queue_growth`).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType

from outrider.services.gateway.queue_growth import QueueGrowth
from outrider.shared.base.errors import OverloadedError
from outrider.shared.base.queue_share import exceeds_share

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
# Sequences leave the queue in bursts, because several answers may end in one step of the target. The time
# between two departures is therefore a mean over this many departures.
DRAIN_WINDOW = 16
# Number of departures of a busy queue from which their mean replaces that of an earlier busy queue.
ENOUGH_DEPARTURES = 8


class Admission:
    """Admission control: the queue of sequences that wait for a target, and its limits.

    A sequence waits from its admission until its first token. Use the object on the event loop only.

    Args:
        max_requests: Maximum number of waiting sequences.
        max_prompt_tokens: Maximum number of prompt tokens of waiting sequences.
        clock: Function that returns the time in seconds.
        max_wait_s: Maximum expected wait of a new request, in seconds. 0 sets no limit. With None, a queue
            that keeps growing is limited (`QueueGrowth`).
        slots: Function that returns the number of sequences that the targets can run at the same time.
    """

    def __init__(
        self,
        max_requests: int,
        max_prompt_tokens: int,
        clock: Callable[[], float],
        max_wait_s: float | None = 0.0,
        slots: Callable[[], int] = lambda: 0,
    ) -> None:
        self._max_requests = max_requests
        self._max_prompt_tokens = max_prompt_tokens
        self._max_wait_s = max_wait_s or math.inf
        self._limits_growth = max_wait_s is None
        self._growth: dict[str | None, QueueGrowth] = {}
        self._clock = clock
        self._slots = slots
        # Mean time between two departures from an earlier busy queue, and the latest departures from the
        # present one. The list is cleared when the queue is empty, because a gap that includes a time without
        # a queue would not measure how fast the queue drains.
        self._earlier_interval_s: float | None = None
        self._departures: deque[float] = deque(maxlen=DRAIN_WINDOW)
        self.waiting = 0
        self.waiting_tokens = 0
        self.active = 0
        # Waiting sequences and their prompt tokens, by tenant. Entries of 0 are removed.
        self._waiting_of: Counter[str] = Counter()
        self._tokens_of: Counter[str] = Counter()

    def admit(
        self,
        sequences: int,
        tenant: str = "",
        *,
        deadline_s: float = math.inf,
        priority: int = 0,
        model: str | None = None,
    ) -> Slot:
        """Reserve room in the queue for the sequences of one request.

        A tenant is the name of an API key. Each tenant may fill only a share of the queue, so that other
        tenants find room. Requests without a tenant may fill the whole queue.

        Use the returned slot as a context manager around the whole request.

        Args:
            sequences: Number of sequences of the request.
            tenant: Name of the tenant. Empty for a request without a tenant.
            deadline_s: Seconds until the client's deadline. A request whose expected wait is longer is
                refused.
            priority: Priority of the request. A request with a priority above 0 overtakes other requests. Its
                expected wait is therefore not limited.
            model: The model of the request. None for the default model.

        Raises:
            OverloadedError: If the queue or the tenant's share is full, if the request would probably wait
                too long for its first token, or if the queue of its model keeps growing.
        """
        if self.waiting and self.waiting + sequences > self._max_requests:
            raise self._overloaded(
                f"{self.waiting} sequences are already waiting (limit {self._max_requests})"
            )
        held = self._waiting_of[tenant]
        if tenant and held and exceeds_share(held + sequences, self.waiting, self._max_requests):
            raise self._overloaded(f"{held} sequences of this API key are already waiting, its share")
        limit = min(self._max_wait_s, deadline_s)
        if priority <= 0 and (expected := self._expected_wait_s(tenant)) > limit:
            raise self._overloaded(
                f"the first token would arrive in about {expected:.1f} s (limit {limit:.1f} s)"
            )
        growth = self._growth.setdefault(model, QueueGrowth(self._clock))
        if (
            self._limits_growth
            and priority <= 0
            and growth.full
            and self._ahead_of(tenant) >= self.waiting  # the tenant has its share of the queue
        ):
            raise self._overloaded(
                f"{growth.waiting} sequences are waiting, and requests arrive faster than they are answered"
            )
        return Slot(self, growth, sequences, tenant)

    def _overloaded(self, why: str) -> OverloadedError:
        return OverloadedError(
            f"The server is overloaded: {why}. Retry later.", retry_after_s=self.retry_after_s()
        )

    def retry_after_s(self) -> float:
        """Return a retry delay in whole seconds: the time to drain half of the queue at the measured rate."""
        expected = (self._drain_interval_s() or MIN_RETRY_S) * max(1, self.waiting) / 2
        return float(min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(expected))))

    def _drain_interval_s(self) -> float | None:
        """Return the mean time between two departures from the queue, or None before it is known."""
        count = len(self._departures)
        if count < 2 or (self._is_new and self._earlier_interval_s is not None):
            return self._earlier_interval_s
        first, last = self._departures[0], self._departures[-1]
        # If nothing leaves the queue for long, the mean must grow.
        return max((last - first) / (count - 1), (self._clock() - first) / count)

    def _expected_wait_s(self, tenant: str) -> float:
        """Return the time that a new request of a tenant will probably wait for its first token.

        The target serves tenants in turn, so a tenant waits only for its own requests and for the same number
        of requests of each other tenant. The result is 0 until the speed of the queue is known.
        """
        waiting = self.waiting
        if self._is_new:
            # The known speed is that of an earlier queue, in which sequences waited for slots.
            waiting = max(0, min(waiting, self.active - self._slots()))
        ahead = min(waiting, self._ahead_of(tenant))
        # The new request leaves the queue after those ahead of it.
        return (ahead + 1) * (self._drain_interval_s() or 0.0) if ahead else 0.0

    def _ahead_of(self, tenant: str) -> int:
        """Return the largest number of sequences for which a new request of a tenant may wait."""
        return self._waiting_of[tenant] * (1 + len(self._waiting_of.keys() - {tenant}))

    @property
    def _is_new(self) -> bool:
        """Whether too few sequences have left the present queue to know its speed."""
        return len(self._departures) < ENOUGH_DEPARTURES

    def _enter_tokens(self, tokens: int, tenant: str) -> None:
        # Admit a prompt above the limit if no other prompt waits. Otherwise a long prompt could never run.
        if self.waiting_tokens and self.waiting_tokens + tokens > self._max_prompt_tokens:
            raise self._overloaded(
                f"{self.waiting_tokens} prompt tokens are already waiting (limit {self._max_prompt_tokens})"
            )
        held = self._tokens_of[tenant]
        if tenant and held and exceeds_share(held + tokens, self.waiting_tokens, self._max_prompt_tokens):
            raise self._overloaded(f"{held} prompt tokens of this API key are already waiting, its share")
        self._count(tenant, 0, tokens)

    def _count(self, tenant: str, sequences: int, tokens: int) -> None:
        self.waiting += sequences
        self.waiting_tokens += tokens
        for counts, change in ((self._waiting_of, sequences), (self._tokens_of, tokens)):
            counts[tenant] += change
            if not counts[tenant]:
                del counts[tenant]

    def _leave(self, tenant: str, sequences: int, tokens: int, served: bool) -> None:
        self._count(tenant, -sequences, -tokens)
        if served:
            self._departures.append(self._clock())
        if not self.waiting:
            self._earlier_interval_s = self._drain_interval_s()
            self._departures.clear()


class Slot:
    """Room that one request has reserved for its sequences in the queue of admission control.

    Leaving the context releases the room of all sequences that have not left the queue.
    """

    def __init__(self, admission: Admission, growth: QueueGrowth, sequences: int, tenant: str) -> None:
        self._admission = admission
        self._growth = growth
        self._tenant = tenant
        self._sequences = sequences
        self._tokens: dict[int, int] = {}
        self._waiting = sequences
        admission._count(tenant, sequences, 0)
        admission.active += sequences
        growth.enter(sequences)

    def add_prompts(self, lengths: list[int]) -> None:
        """Count the prompt tokens. Call this method once after tokenization, with one length per sequence.

        Raises:
            OverloadedError: If too many prompt tokens are waiting.
        """
        self._admission._enter_tokens(sum(lengths), self._tenant)
        self._tokens = dict(enumerate(lengths))

    def started(self, index: int) -> None:
        """Record that sequence `index` has left the queue: its first token has arrived, or it has ended."""
        tokens = self._tokens.pop(index, None)
        if tokens is not None:
            self._waiting -= 1
            self._growth.start()
            self._admission._leave(self._tenant, 1, tokens, served=True)

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tokens = sum(self._tokens.values())
        self._admission._leave(self._tenant, self._waiting, tokens, served=False)
        self._admission.active -= self._sequences
        self._growth.end(self._sequences, self._waiting)
        self._tokens.clear()
        self._waiting = 0
