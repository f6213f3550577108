"""A queue is limited only while requests keep arriving faster than they are answered."""

from __future__ import annotations

import heapq
import random

import pytest

from outrider.services.gateway.admission import Admission, Slot
from outrider.services.gateway.queue_growth import BURST_S, REST_S
from outrider.shared.base.errors import OverloadedError

SLOTS, ANSWER_S, PREFILL_S = 16, 0.8, 0.05
CAPACITY = SLOTS / (ANSWER_S + PREFILL_S)
"""Requests per second that the simulated targets answer."""


class Targets:
    """Simulated targets with 16 slots, in simulated time, behind admission control.

    Attributes:
        now: The time in seconds.
        waits: Seconds until the first token, for each admitted request.
        refused: Number of refused requests.
        clients: Number of clients that send a request after each answer.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.admission = Admission(512, 10**6, lambda: self.now, max_wait_s=None, slots=lambda: SLOTS)
        self.waits: list[float] = []
        self.refused = 0
        self._events: list[tuple[float, int, str, tuple[Slot, float] | None]] = []
        self._queue: list[tuple[Slot, float]] = []
        self._running = self._number = 0
        self._random = random.Random(1)
        self.clients = 0

    def offer(self, times: list[float]) -> None:
        """Let requests arrive at these times, and run until all are answered."""
        for time in times:
            self._at(time, "arrive")
        while self._events:
            self.now, _, event, request = heapq.heappop(self._events)
            if request is None:
                self._arrive()
            elif event == "first token":
                request[0].started(0)
                self.waits.append(self.now - request[1])
                self._at(self.now + self._random.uniform(0.2, 1.8) * ANSWER_S, "end", request)
            else:
                request[0].__exit__(None, None, None)
                self._running -= 1
                self._begin()
                if self.clients and len(self.waits) < 600:
                    self._at(self.now + 0.002, "arrive")

    def poisson(self, share: float, requests: int) -> list[float]:
        """Return random times of arrival, at a share of the capacity."""
        times = [self.now]
        for _ in range(requests):
            times.append(times[-1] + self._random.expovariate(share * CAPACITY))
        return times

    def _at(self, time: float, event: str, request: tuple[Slot, float] | None = None) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, event, request))

    def _arrive(self) -> None:
        try:
            slot = self.admission.admit(1)
        except OverloadedError:
            self.refused += 1
            return
        slot.add_prompts([10])
        self._queue.append((slot, self.now))
        self._begin()

    def _begin(self) -> None:
        if self._queue and self._running < SLOTS:
            self._running += 1
            self._at(self.now + PREFILL_S, "first token", self._queue.pop(0))


@pytest.mark.parametrize("share", [1.2, 1.5, 3.0])
def test_waits_stay_bounded_if_requests_arrive_faster_than_they_are_answered(share: float) -> None:
    targets = Targets()
    targets.offer(targets.poisson(share, 2000))
    # Without a limit, the last request of the 1.5-fold load would wait for 34 s.
    assert max(targets.waits) < (share - 1) * BURST_S + 2 * ANSWER_S
    answered = len(targets.waits) / targets.now
    assert answered > 0.9 * CAPACITY, "the limit must not leave slots empty"
    assert targets.refused > 0.5 * (1 - 1 / share) * 2000


@pytest.mark.parametrize(("requests", "seconds"), [(40, 0.3), (200, 0.0), (200, 0.6), (500, 2.0)])
def test_bursts_are_answered(requests: int, seconds: float) -> None:
    targets = Targets()
    for _ in range(2):
        targets.offer([targets.now + seconds * number / requests for number in range(requests)])
        assert (len(targets.waits), targets.refused) == (requests, 0)
        targets.waits.clear()
        targets.now += 10


@pytest.mark.parametrize("clients", [SLOTS + 3, 3 * SLOTS, 400])
def test_clients_that_wait_for_their_answers_are_never_refused(clients: int) -> None:
    targets = Targets()
    targets.clients = clients
    targets.offer([0.001 * number for number in range(clients)])
    assert targets.refused == 0
    assert len(targets.waits) >= 600


def test_neither_several_answers_nor_cancelled_requests_lead_to_refusals() -> None:
    """Clients ask for up to four answers, and send the next request before a cancelled one has ended."""
    clock, choose = [0.0], random.Random(2)
    admission = Admission(512, 10**6, lambda: clock[0], max_wait_s=None, slots=lambda: SLOTS)

    def send() -> Slot:
        slot = admission.admit(answers := choose.randint(1, 4))
        slot.add_prompts([10] * answers)
        return slot

    slots = [send() for _ in range(60)]
    for step in range(2000):
        clock[0] += 0.1
        for slot in slots[: SLOTS // 2]:
            slot.started(0)
        cancelled = step > 200 and step % 3 == 0
        if cancelled:
            slots += [send(), send()]
            slots.pop(0).__exit__(None, None, None)
            slots.pop(0).__exit__(None, None, None)
        else:
            slots.pop(0).__exit__(None, None, None)
            slots.append(send())
    assert admission.waiting > 100, "the queue was long"
    _close(slots)


def test_few_requests_are_refused_below_the_capacity() -> None:
    targets = Targets()
    targets.offer(targets.poisson(0.8, 2000))
    assert targets.refused <= 0.02 * 2000


def _growing(admission: Admission, clock: list[float], model: str | None = None, key: str = "") -> list[Slot]:
    """Return 16 running and 26 waiting sequences of a queue that keeps growing, and is full."""
    slots = [admission.admit(1, key, model=model) for _ in range(40)]
    for slot in slots:
        slot.add_prompts([1])
    for slot in slots[:24]:
        slot.started(0)
    for slot in slots[:8]:
        slot.__exit__(None, None, None)
    clock[0] += BURST_S
    for _ in range(10):
        slots.append(admission.admit(1, key, model=model))
        slots[-1].add_prompts([1])
    return slots[8:]


def _close(slots: list[Slot]) -> None:
    for slot in slots:
        slot.__exit__(None, None, None)


def test_only_the_model_with_the_growing_queue_refuses() -> None:
    clock = [0.0]
    admission = Admission(512, 10**6, lambda: clock[0], max_wait_s=None)
    slots = _growing(admission, clock)
    with pytest.raises(OverloadedError, match="26 sequences are waiting") as caught:
        admission.admit(1)
    assert caught.value.retry_after_s is not None
    slots.append(admission.admit(1, model="other"))
    slots.append(admission.admit(1, priority=1))
    _close(slots)


def test_a_key_with_few_requests_is_admitted_while_another_floods() -> None:
    clock = [0.0]
    admission = Admission(512, 10**6, lambda: clock[0], max_wait_s=None)
    slots = _growing(admission, clock, key="flood")
    with pytest.raises(OverloadedError):
        admission.admit(1, "flood")
    slots += [admission.admit(1, "light") for _ in range(12)]
    with pytest.raises(OverloadedError):
        slots += [admission.admit(1, "light") for _ in range(15)]
    _close(slots)


def test_the_limit_ends_when_the_queue_has_been_short_for_a_while() -> None:
    clock = [0.0]
    admission = Admission(512, 10**6, lambda: clock[0], max_wait_s=None)
    _close(_growing(admission, clock))
    clock[0] += REST_S
    with admission.admit(100), admission.admit(50):
        pass


@pytest.mark.parametrize("limit", [0.0, 1000.0])
def test_a_set_limit_replaces_the_limit_of_growth(limit: float) -> None:
    clock = [0.0]
    admission = Admission(512, 10**6, lambda: clock[0], max_wait_s=limit)
    slots = _growing(admission, clock)
    slots.append(admission.admit(1))
    _close(slots)
