"""Limits of an API key, with a simulated clock: per minute, at once, and what requests may set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.services.gateway.keys.caller import Caller
from outrider.services.gateway.keys.entry import ALL_MODES, KeyEntry
from outrider.services.gateway.keys.key_metrics import KeyMetrics
from outrider.services.gateway.keys.rate_limits import MinuteBucket
from outrider.shared.base.errors import ErrorCode, InvalidRequestError, OutriderError, OverloadedError
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.obs.metrics import Metrics


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def caller_of(clock: Clock | None = None, **limits: object) -> Caller:
    return Caller(KeyEntry("app", b"", **limits), clock or Clock(), KeyMetrics(Metrics()))


def test_requests_per_minute_refill_with_time() -> None:
    clock = Clock()
    caller = caller_of(clock, requests_per_minute=6)
    for left in range(5, -1, -1):
        caller.count_request()
        assert caller.headers()["x-ratelimit-remaining-requests"] == str(left)
    with pytest.raises(OverloadedError, match="6 requests per minute") as caught:
        caller.count_request()
    assert (caught.value.reason, caught.value.retry_after_s) == ("rate_limit_exceeded", 10.0)
    clock.now += 9.9
    with pytest.raises(OverloadedError):
        caller.count_request()
    clock.now += 0.2
    caller.count_request()
    assert caller.headers() == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "59.900s",
    }


def test_generated_tokens_make_a_debt_that_delays_the_next_request() -> None:
    clock = Clock()
    caller = caller_of(clock, tokens_per_minute=600)
    with caller.admit(1):
        caller.charge_prompt(100)
        caller.charge_output(700)
    with pytest.raises(OverloadedError, match="600 tokens per minute") as caught, caller.admit(1):
        pass
    assert caught.value.retry_after_s == pytest.approx(20.1)
    clock.now += 20.1
    with caller.admit(1):
        # Room for one token is no room for a prompt of 50.
        with pytest.raises(OverloadedError):
            caller.charge_prompt(50)
        clock.now += 5
        caller.charge_prompt(50)


def test_a_prompt_above_the_limit_runs_once_the_bucket_is_full() -> None:
    clock = Clock()
    caller = caller_of(clock, tokens_per_minute=60)
    caller.charge_prompt(90)
    with pytest.raises(OverloadedError) as caught:
        caller.charge_prompt(90)
    assert caught.value.retry_after_s == 60.0, "90 seconds are missing, but clients wait a minute at most"
    clock.now += 90
    caller.charge_prompt(90)


def test_sequences_at_once() -> None:
    caller = caller_of(max_concurrent=3)
    with caller.admit(2):
        with pytest.raises(OverloadedError, match="3 sequences at once, 2 are active"), caller.admit(2):
            pass
        with caller.admit(1):
            assert caller.active == 3
    assert caller.active == 0
    with pytest.raises(InvalidRequestError, match="may run 3 at once"), caller.admit(4):
        pass
    with pytest.raises(ZeroDivisionError), caller.admit(3):
        raise ZeroDivisionError
    assert caller.active == 0


@pytest.mark.parametrize(
    ("allowed", "asked", "got"), [((0, 0), 0, 0), ((-9, -2), 0, -2), ((2, 9), 0, 2), ((-5, 5), 5, 5)]
)
def test_priorities_within_the_range(allowed: tuple[int, int], asked: int, got: int) -> None:
    assert caller_of(priority=allowed).priority(asked) == got


@pytest.mark.parametrize(("allowed", "asked"), [((0, 0), 1), ((0, 0), -1), ((-9, -2), 1), ((1, 3), 4)])
def test_priorities_outside_the_range_are_refused(allowed: tuple[int, int], asked: int) -> None:
    with pytest.raises(OutriderError, match=f"not {asked}") as caught:
        caller_of(priority=allowed).priority(asked)
    assert (caught.value.code, caught.value.field) == (ErrorCode.PERMISSION_DENIED, "priority")


def test_modes_of_speculation() -> None:
    assert [caller_of().mode(mode) for mode in ALL_MODES] == list(ALL_MODES)
    plain = caller_of(modes=(SpeculationMode.OFF,))
    assert plain.mode(SpeculationMode.AUTO) is SpeculationMode.OFF
    with pytest.raises(OutriderError, match="modes off, not on") as caught:
        plain.mode(SpeculationMode.ON)
    assert caller_of().mode(None, SpeculationMode.ON) is SpeculationMode.ON
    assert caller_of().mode(SpeculationMode.AUTO, SpeculationMode.ON) is SpeculationMode.AUTO
    assert plain.mode(None, SpeculationMode.ON) is SpeculationMode.OFF, "the key may not draft"
    assert (caught.value.code, caught.value.field) == (ErrorCode.PERMISSION_DENIED, "speculation.mode")


def test_models() -> None:
    caller = caller_of(models=frozenset(["alpha"]))
    caller.check_model("alpha")
    with pytest.raises(OutriderError) as caught:
        caller.check_model("beta")
    assert (caught.value.code, caught.value.field) == (ErrorCode.PERMISSION_DENIED, "model")


@given(st.text(max_size=12), st.text(max_size=12), st.text(min_size=1, max_size=12))
def test_no_request_can_have_the_salt_of_another_key(own: str, asked: str, salt: str) -> None:
    salted = caller_of(cache_salt=salt)
    assert caller_of().salt(asked) != salted.salt(own)
    assert caller_of().salt("") == ""


def test_a_smaller_limit_keeps_what_was_used() -> None:
    bucket = MinuteBucket(100, Clock())
    bucket.take(30)
    bucket.resize(50)
    assert bucket.level == 20
    bucket.resize(100)
    assert bucket.level == 70


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), max_size=60))
def test_no_schedule_exceeds_the_limit_over_time(arrivals: list[tuple[float, int]]) -> None:
    """Over any time, at most the limit times the minutes and one full bucket pass."""
    clock = Clock()
    bucket, start, used = MinuteBucket(40, clock), clock.now, 0
    for pause, amount in arrivals:
        clock.now += pause
        if not bucket.wait_s(amount):
            bucket.take(amount)
            used += amount
        assert used <= 40 + (clock.now - start) * 40 / 60 + 1e-6
