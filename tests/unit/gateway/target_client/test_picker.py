"""The choice of a target: least work, prefix affinity, and the bound on affinity."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.services.gateway.target_client.picker import BLOCK_TOKENS, MAX_PREFIXES, Picker


@dataclass
class Target:
    address: str
    load: int = 0
    placed: int = 0


def test_without_a_known_prefix_the_target_with_the_least_work_is_chosen() -> None:
    targets = [Target("a", load=10), Target("b", load=5), Target("c", load=7)]
    assert Picker().pick(targets, range(500)).address == "b"


def test_idle_targets_take_turns() -> None:
    picker, targets = Picker(), [Target("a"), Target("b")]
    chosen = []
    for first in range(4):
        target = picker.pick(targets, [first])
        target.placed += 1
        chosen.append(target.address)
    assert chosen == ["a", "b", "a", "b"]


def test_the_longest_known_prefix_decides() -> None:
    picker, a, b = Picker(), Target("a"), Target("b", load=1)
    shared = list(range(2 * BLOCK_TOKENS))
    mine, theirs = [*shared, *[1] * BLOCK_TOKENS], [*shared, *[2] * BLOCK_TOKENS]
    assert picker.pick([a, b], mine) is a
    a.load = 1000
    assert picker.pick([a, b], theirs) is b
    a.load = b.load = 0
    # Both have the shared prefix, and each has the rest of one prompt.
    assert picker.pick([a, b], [*mine, 5]) is a
    assert picker.pick([a, b], [*theirs, 5]) is b


def test_a_busy_target_loses_its_prefix() -> None:
    picker, a, b = Picker(), Target("a"), Target("b", load=1)
    prompt = list(range(BLOCK_TOKENS))
    assert picker.pick([a, b], prompt) is a
    # The mean is 1,000: the bound is 1,250 and the 64 tokens that the cache saves.
    a.load, b.load = 1_314 - 500, 2_000 - 1_314 + 500
    assert picker.pick([a, b], prompt) is a
    a.load, b.load = 1_314, 686
    assert picker.pick([a, b], prompt) is a
    a.load, b.load = 1_316, 684
    assert picker.pick([a, b], prompt) is b


def test_different_groups_share_no_prefix() -> None:
    picker, a, b = Picker(), Target("a"), Target("b", load=1)
    prompt = list(range(BLOCK_TOKENS))
    assert picker.pick([a, b], prompt, "one") is a
    a.load = 2
    assert picker.pick([a, b], prompt, "other") is b
    assert picker.pick([a, b], prompt, "one") is a


def test_a_target_that_left_is_not_chosen_and_memory_is_bounded() -> None:
    picker, a, b = Picker(), Target("a"), Target("b", load=1)
    prompt = list(range(BLOCK_TOKENS))
    assert picker.pick([a, b], prompt) is a
    assert picker.pick([b, Target("c", load=2)], prompt) is b
    for first in range(MAX_PREFIXES // 100):
        picker.pick([a, b], [first] * 128 * BLOCK_TOKENS)
    assert len(picker._last) == MAX_PREFIXES
