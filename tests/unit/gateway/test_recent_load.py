"""`RecentLoad`: the last two minutes of load, second by second."""

from __future__ import annotations

from outrider.services.gateway.recent_load import SECONDS, RecentLoad


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_each_complete_second_has_its_tokens_and_its_largest_number_of_sequences() -> None:
    clock = Clock()
    load = RecentLoad(clock)
    clock.now += 1
    load.began()
    load.began()
    load.add_tokens(3)
    load.add_tokens(2)
    clock.now += 0.9
    load.ended()
    clock.now += 1.0
    load.add_tokens(7)
    assert load.as_json() == {"tokens": [0, 5], "running": [0, 2], "accept_length": [None, None]}
    clock.now += 2.0
    load.ended()
    clock.now += 1.0
    assert load.as_json()["tokens"] == [0, 5, 7, 0, 0]
    assert load.as_json()["running"] == [0, 2, 1, 1, 1]
    assert load.throughput() == 7
    assert RecentLoad(clock).throughput() == 0


def test_the_accept_length_belongs_to_the_sequences_that_ended_in_a_second() -> None:
    clock = Clock()
    load = RecentLoad(clock)
    load.add_rounds(accepted=6, drafted_rounds=2.0)
    load.add_rounds(accepted=0, drafted_rounds=1.0)
    clock.now += 2
    assert load.as_json()["accept_length"] == [3.0, None]


def test_older_seconds_are_forgotten() -> None:
    clock = Clock()
    load = RecentLoad(clock)
    load.add_tokens(9)
    clock.now += SECONDS
    assert load.as_json()["tokens"] == [9] + [0] * (SECONDS - 1)
    clock.now += 1
    assert load.as_json()["tokens"] == [0] * SECONDS
    clock.now += 1e6
    load.add_tokens(4)
    clock.now += 1
    assert load.as_json()["tokens"] == [0] * (SECONDS - 1) + [4]
