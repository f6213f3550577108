"""Fairness between tenants, counted in scheduled tokens, and priorities that preempt."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import multiple, rule
from support.engine.scheduled import PAGE_SIZE, execute, make_sequence
from test_scheduler_machine import SchedulerMachine

from outrider.services.target.scheduling.limits import SchedulerLimits
from outrider.services.target.scheduling.queue_gate import QueueGate
from outrider.services.target.scheduling.scheduler import Scheduler
from outrider.services.target.scheduling.sequence import Sequence, SequenceStatus
from outrider.shared.base.errors import OverloadedError
from outrider.shared.kv.pages import PageAllocator

SLOTS = 4


def sequence_of(
    tenant: str,
    number: int,
    prompt_len: int = 4,
    new_tokens: int = 20,
    priority: int = 0,
    token: int | None = None,
) -> Sequence:
    sequence = make_sequence(number, prompt_len, new_tokens, priority=priority, token=token)
    sequence.request = replace(sequence.request, tenant=tenant)
    return sequence


def add(scheduler: Scheduler, sequence: Sequence) -> Sequence:
    scheduler.gate.enter(sequence.prompt_len, sequence.request.tenant)
    scheduler.add(sequence)
    return sequence


def make_scheduler(num_pages: int = 1000, max_running: int = SLOTS, chunk: int = 512) -> Scheduler:
    limits = SchedulerLimits(max_running=max_running, max_queued=10_000, prefill_chunk=chunk)
    return Scheduler(PageAllocator(num_pages), PAGE_SIZE, limits)


class Traffic:
    """Tenants that keep a number of requests live, on a scheduler that counts what it schedules."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.served: Counter[str] = Counter()
        self._numbers = iter(range(1, 1_000_000))
        self._counted: dict[Sequence, int] = {}

    def keep(self, tenant: str, live: int, prompt_len: int, new_tokens: int) -> None:
        missing = live - sum(one.request.tenant == tenant for one in self.scheduler)
        for _ in range(missing):
            sequence = sequence_of(tenant, next(self._numbers), prompt_len, new_tokens)
            add(self.scheduler, sequence)
            self._counted[sequence] = 0

    def step(self) -> None:
        execute(self.scheduler, self.scheduler.schedule(0.0))
        self.scheduler.check()
        for sequence, counted in list(self._counted.items()):
            # A prompt counts when its first token comes. What is computed again counts only once.
            done = sequence.status in (SequenceStatus.RUNNING, SequenceStatus.ENDED)
            now = sequence.committed_len if done or counted else 0
            self.served[sequence.request.tenant] += now - counted
            self._counted[sequence] = now
            if sequence.status is SequenceStatus.ENDED:
                del self._counted[sequence]


def serve(steps: int, *tenants: tuple[str, int, int, int]) -> Counter[str]:
    """Return the tokens that each tenant got, where a tenant is (name, live requests, prompt, answer)."""
    traffic = Traffic(make_scheduler())
    for _ in range(steps):
        for tenant in tenants:
            traffic.keep(*tenant)
        traffic.step()
    return traffic.served


def test_a_flood_of_one_tenant_leaves_another_its_share() -> None:
    """A tenant within its share gets at least 0.8 of the tokens that it would get alone."""
    light = ("light", 2, 8, 30)
    alone = serve(400, light)["light"]
    both = serve(400, light, ("flood", 200, 20, 200))
    assert both["light"] >= 0.8 * alone
    assert both["flood"] >= 0.8 * serve(400, ("flood", 200, 20, 200))["flood"] / 2


def test_two_floods_get_equal_tokens_although_their_requests_differ() -> None:
    served = serve(600, ("long", 50, 40, 60), ("short", 50, 4, 10))
    assert 0.85 <= served["long"] / served["short"] <= 1.18


def test_three_tenants_on_two_slots_all_advance() -> None:
    traffic = Traffic(make_scheduler(max_running=2))
    for _ in range(600):
        for tenant in ("a", "b", "c"):
            traffic.keep(tenant, 20, 6, 12)
        traffic.step()
    assert min(traffic.served.values()) >= 0.7 * max(traffic.served.values())


def test_a_tenant_that_was_away_has_no_credit() -> None:
    """Otherwise its first requests would stop all others until they were even."""
    scheduler = make_scheduler(max_running=1)
    for number in range(10):
        add(scheduler, sequence_of("busy", number, new_tokens=8))
    for _ in range(20):
        execute(scheduler, scheduler.schedule(0.0))
    for number in range(10, 15):
        add(scheduler, sequence_of("back", number, new_tokens=8))
    order: list[str] = []
    while any(scheduler):
        plan = scheduler.schedule(0.0)
        order += [one.request.tenant for one in plan.admitted]
        execute(scheduler, plan)
    assert order[0] == "back"
    assert 2 <= order[:6].count("busy") <= 4


def test_a_waiting_tenant_takes_a_slot_of_the_tenant_with_the_most() -> None:
    scheduler = make_scheduler()
    flood = [add(scheduler, sequence_of("flood", number)) for number in range(1, 9)]
    execute(scheduler, scheduler.schedule(0.0))
    assert scheduler.active == flood[:SLOTS]
    light = [add(scheduler, sequence_of("light", number)) for number in range(20, 24)]
    plan = scheduler.schedule(0.0)
    assert (plan.admitted, plan.retracted) == ([light[0]], [flood[3]]), "the latest arrival makes room"
    assert set(plan.decodes) == set(flood[:3])
    for _ in range(3):
        execute(scheduler, plan)
        plan = scheduler.schedule(0.0)
    assert set(scheduler.active) == {*flood[:2], *light[:2]}
    for _ in range(5):
        execute(scheduler, plan)
        plan = scheduler.schedule(0.0)
        assert not plan.retracted, "equal shares are stable"
    scheduler.check()


def test_prompts_of_a_tenant_do_not_delay_those_of_another() -> None:
    scheduler = make_scheduler(chunk=10)
    add(scheduler, sequence_of("long", 1, prompt_len=100))
    execute(scheduler, scheduler.schedule(0.0))
    quick = add(scheduler, sequence_of("quick", 2, prompt_len=6))
    plan = scheduler.schedule(0.0)
    assert [(chunk.sequence.request.tenant, chunk.stop) for chunk in plan.prefills] == [
        ("quick", 6),
        ("long", 14),
    ]
    execute(scheduler, plan)
    assert quick.status is SequenceStatus.RUNNING


@pytest.mark.parametrize("tenant", ["", "other"])
def test_a_higher_priority_takes_the_slot_of_the_youngest_of_the_lowest(tenant: str) -> None:
    scheduler = make_scheduler(max_running=3)
    low = [add(scheduler, sequence_of("", number, priority=-1)) for number in (1, 2)]
    normal = add(scheduler, sequence_of("", 3))
    execute(scheduler, scheduler.schedule(0.0))
    urgent = add(scheduler, sequence_of(tenant, 4, priority=5))
    plan = scheduler.schedule(0.0)
    assert (plan.admitted, plan.retracted) == ([urgent], [low[1]])
    assert set(plan.decodes) == {low[0], normal}
    assert low[1].committed_len > low[1].prompt_len, "emitted tokens are kept"
    execute(scheduler, plan)
    assert not scheduler.schedule(0.0).retracted, "equal or higher priorities are not pushed out"
    scheduler.check()


def test_a_higher_priority_takes_pages() -> None:
    scheduler = make_scheduler(num_pages=8)
    low = [add(scheduler, sequence_of("", number, new_tokens=4)) for number in (1, 2, 3)]
    execute(scheduler, scheduler.schedule(0.0))
    urgent = add(scheduler, sequence_of("", 4, prompt_len=16, priority=1))
    plan = scheduler.schedule(0.0)
    assert plan.admitted == [urgent]
    assert plan.retracted == [low[2], low[1]][: len(plan.retracted)]
    scheduler.check()


def test_without_tenants_and_priorities_nobody_is_pushed_out() -> None:
    scheduler = make_scheduler(max_running=2)
    for number in range(6):
        add(scheduler, sequence_of("one", number))
    while any(scheduler):
        plan = scheduler.schedule(0.0)
        assert not plan.retracted
        execute(scheduler, plan)
    assert not scheduler.shares.contended


def test_a_resumed_prompt_is_charged_once() -> None:
    scheduler = make_scheduler(max_running=1)
    low = add(scheduler, sequence_of("a", 1, prompt_len=8))
    waiting = add(scheduler, sequence_of("b", 2))
    execute(scheduler, scheduler.schedule(0.0))
    assert (low.slot >= 0, waiting.slot) == (True, -1)
    assert scheduler.shares.served("a") == 8
    scheduler._retract(low)
    scheduler.shares.collect([low])
    served = scheduler.shares.served("a")
    low.request = replace(low.request, priority=1)
    scheduler.waiting.sort(key=lambda one: -one.request.priority)
    execute(scheduler, scheduler.schedule(0.0))
    assert low.resumptions == 1
    assert low.slot >= 0
    assert scheduler.shares.served("a") == served == 9


def test_a_flood_cannot_fill_the_queue() -> None:
    gate = QueueGate(SchedulerLimits(max_queued=100, max_queued_tokens=1000))
    for _ in range(75):
        gate.enter(1, "flood")
    with pytest.raises(OverloadedError, match="its share"):
        gate.enter(1, "flood")
    gate.enter(1, "light")
    for _ in range(75):
        gate.leave(1, 0.0, "flood")
    gate.leave(1, 0.0, "light")
    for tokens in (700, 60):
        gate.enter(tokens, "flood")
    with pytest.raises(OverloadedError, match="its share"):
        gate.enter(60, "flood")
    gate.enter(60, "light")
    for tokens, tenant in ((700, "flood"), (60, "flood"), (60, "light")):
        gate.leave(tokens, 0.0, tenant)
    assert (gate.requests, gate._requests_of, gate._tokens_of) == (0, {}, {})


class TenantMachine(SchedulerMachine):
    """Submits for several tenants. All invariants of the scheduler hold."""

    @rule(
        target=SchedulerMachine.live,
        tenant=st.sampled_from(["", "a", "b"]),
        prompt_len=st.integers(1, 20),
        max_new_tokens=st.integers(1, 14),
        priority=st.integers(-1, 1),
        token=st.sampled_from([2, None]),
    )
    def submit(
        self, tenant: str, prompt_len: int, max_new_tokens: int, priority: int, token: int | None
    ) -> object:
        sequence = sequence_of(tenant, self.next_id, prompt_len, max_new_tokens, priority, token)
        try:
            self.scheduler.gate.enter(prompt_len, tenant)
        except OverloadedError:
            return multiple()
        self.next_id += 1
        self.scheduler.add(sequence)
        return sequence

    def teardown(self) -> None:
        super().teardown()
        assert self.scheduler.shares._live == self.scheduler.shares._served == {}


TestTenants = TenantMachine.TestCase
TestTenants.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
