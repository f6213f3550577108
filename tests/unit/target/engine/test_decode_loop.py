"""The decode loop alone: what runs ahead, the order of effects, void results, and failures."""

from __future__ import annotations

import pytest
from support.engine.loop_world import LoopWorld, passes

from outrider.services.target.drafting.draft_source import ProposalWait
from outrider.services.target.model.outcome import FAILED_TOKEN
from outrider.services.target.policy.cost_model import DraftPath
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

CHAIN, TREE = DraftShape(2, 1, 3), DraftShape(4, 2, 9)


def test_without_lookahead_each_round_is_read_before_the_next_is_launched() -> None:
    world = LoopWorld(0)
    sequence = world.sequence(1)
    for _ in range(2):
        world.step(sequence)
    assert passes(world.log) == ["launch 1", "read 1", "launch 2", "read 2"]
    assert not world.loop.active


def test_with_lookahead_a_round_is_launched_before_the_last_is_read() -> None:
    world = LoopWorld(1)
    sequence = world.sequence(1)
    for _ in range(3):
        world.step(sequence)
    assert passes(world.log) == ["launch 1", "launch 2", "read 1", "launch 3", "read 2"]
    assert world.loop.active
    assert (sequence.passes_ahead, sequence.tokens_ahead) == (1, 1)


def test_an_open_round_is_completed_between_the_commit_and_the_delivery_of_the_previous_one() -> None:
    world = LoopWorld(1)
    world.opens = True
    sequence = world.sequence(1)
    world.step(sequence)
    assert passes(world.log) == ["launch 1", "complete 1"], "the host knows all tokens"
    world.log.clear()
    world.step(sequence)
    steps = [one for one in world.log if one.split()[0] in ("launch", "read", "accept", "complete", "emit")]
    assert steps == ["launch 2", "read 1", "accept 1", "complete 2", "emit 1 [7]"]
    world.loop.drain()
    assert passes(world.log)[-1] == "read 2"


def test_an_open_round_is_completed_after_the_first_tokens_behind_it() -> None:
    world = LoopWorld(1)
    world.opens = True
    old, new = world.sequence(1), world.sequence(2)
    world.step(old)
    world.log.clear()
    world.step(old, prefills=[PrefillChunk(new, 0, new.committed_len)])
    assert [one for one in passes(world.log) if not one.startswith("hold")][-1] == "complete 2"
    assert not any(one == "read 2" for one in world.log)


def test_without_lookahead_an_open_round_is_completed_and_read_at_once() -> None:
    world = LoopWorld(0)
    world.opens = True
    world.step(world.sequence(1))
    assert passes(world.log) == ["launch 1", "complete 1", "read 1"]


def test_when_nothing_is_launched_the_rounds_in_flight_are_read() -> None:
    world = LoopWorld(1)
    world.step(world.sequence(1))
    world.step()
    assert passes(world.log) == ["launch 1", "read 1"]
    assert not world.loop.active


def test_draining_reads_everything() -> None:
    world = LoopWorld(1)
    world.step(world.sequence(1))
    world.loop.drain()
    assert passes(world.log) == ["launch 1", "read 1"]


def test_effects_have_one_order() -> None:
    """All tokens are committed first, then the drafter may begin, and only then anything is delivered."""
    world = LoopWorld(0)
    sequences = [world.sequence(index) for index in range(2)]
    world.shapes[0] = CHAIN
    world.emits[0] = [[8, 9]]
    world.step(*sequences)
    assert world.log == [
        "prepare 0 1",
        "hold 0",
        "hold 1",
        "launch 1",
        "launched",
        "receive trees",
        "read 1",
        "accept 0",
        "committed 0 [8, 9]",
        "accept 1",
        "committed 1 [7]",
        "drafts read []",
        "emit 0 [8, 9]",
        "emit 1 [7]",
        "observe",
        "metrics",
    ]
    assert world.loop.num_rounds == 1


def test_a_sequence_that_ends_is_no_news_to_the_drafter() -> None:
    world = LoopWorld(0)
    ending, going_on = world.sequence(1, max_new_tokens=2), world.sequence(2)
    world.step(ending, going_on)
    assert [line for line in world.log if line.startswith(("committed", "drafts", "emit"))] == [
        "committed 2 [7]",
        "drafts read [1]",
        "emit 1 [7]",
        "emit 2 [7]",
    ]


def test_lengths_advance_with_a_round() -> None:
    world = LoopWorld(1)
    sequence = world.sequence(1)
    sequence.feature_len = sequence.cached_len
    world.shapes[1] = CHAIN
    world.emits[1] = [[8, 9, 10]]
    world.step(sequence)
    assert (sequence.tokens_ahead, sequence.passes_ahead, sequence.fresh_columns) == (3, 1, 3)
    assert sequence.committed_upper == sequence.committed_len + 3
    world.shapes[1] = NO_DRAFT
    world.step(sequence)
    assert (sequence.tokens_ahead, sequence.passes_ahead, sequence.fresh_columns) == (1, 1, 1)
    assert sequence.tokens[-3:] == [8, 9, 10]
    assert sequence.cached_len == sequence.feature_len == sequence.committed_len - 1


@pytest.mark.parametrize("change", ["left", "came back"])
def test_results_of_a_sequence_that_has_left_are_dropped(change: str) -> None:
    world = LoopWorld(1)
    gone, stays = world.sequence(1), world.sequence(2)
    world.step(gone, stays)
    gone.residence += change == "came back"
    gone.slot = -1 if change == "left" else gone.slot
    gone.tokens_ahead = gone.passes_ahead = 0
    before = list(gone.tokens)
    world.step(stays)
    assert gone.tokens == before
    assert (gone.tokens_ahead, gone.passes_ahead) == (0, 0)
    assert [line for line in world.log if line.startswith("emit")] == ["emit 2 [7]"]
    assert [len(step.entries) for step in world.observed] == [1]


def test_a_round_whose_sequences_have_all_left_teaches_nothing() -> None:
    world = LoopWorld(1)
    gone = world.sequence(1)
    world.step(gone)
    gone.slot = -1
    world.step()
    assert world.loop.num_rounds == 1
    assert not world.observed
    assert "drafts read []" in world.log


def test_invalid_logits_fail_one_sequence() -> None:
    world = LoopWorld(0)
    bad, good = world.sequence(1), world.sequence(2)
    world.emits[1] = [[FAILED_TOKEN]]
    world.step(bad, good)
    assert [line for line in world.log if line.startswith(("committed", "emit", "drafts"))] == [
        "committed 2 [7]",
        "drafts read []",
        "emit 2 [7]",
    ]


def test_trees_from_the_host_wait_until_the_round_in_flight_is_read() -> None:
    world = LoopWorld(1)
    world.waits = True
    world.may_run_ahead = True
    sequence = world.sequence(1)
    world.step(sequence)
    world.shapes[1] = CHAIN
    world.log.clear()
    world.step(sequence)
    assert "postponed" in world.log
    assert passes(world.log) == ["read 1"]
    world.may_run_ahead = False
    world.step(sequence)
    assert passes(world.log) == ["read 1", "launch 2", "read 2"], "a round with such trees is read at once"
    world.shapes[1] = NO_DRAFT
    world.may_run_ahead = True
    world.step(sequence)
    assert passes(world.log)[3:] == ["launch 3"]


def test_a_sequence_joins_the_round_after_its_prompt() -> None:
    world = LoopWorld(1)
    old, new = world.sequence(1), world.sequence(2)
    del new.tokens[-1]
    world.step(old)
    chunk = PrefillChunk(new, 0, new.committed_len)
    world.log.clear()
    world.step(old, prefills=[chunk])
    assert passes(world.log) == ["prefill", "launch 2", "read 1", "prefilled"]
    assert "prepare 1 2" in world.log
    assert (new.passes_ahead, new.tokens_ahead) == (1, 1)


def test_a_sequence_whose_tree_waits_for_the_host_sits_out_the_round_after_its_prompt() -> None:
    world = LoopWorld(0)
    world.waits = True
    world.shapes = {1: CHAIN, 2: CHAIN}
    old, new = world.sequence(1), world.sequence(2)
    del new.tokens[-1]
    world.step(old, prefills=[PrefillChunk(new, 0, new.committed_len)])
    assert "prepare 1" in world.log
    world.step(old, new)
    assert "prepare 1 2" in world.log


@pytest.mark.parametrize(("max_new_tokens", "paused"), [(1, False), (20, True)])
def test_a_sequence_that_cannot_go_on_does_not_join(max_new_tokens: int, paused: bool) -> None:
    world = LoopWorld(1)
    new = world.sequence(2, max_new_tokens=max_new_tokens)
    del new.tokens[-1]
    new.paused_at = 1.0 if paused else None
    world.step(prefills=[PrefillChunk(new, 0, new.committed_len)])
    assert passes(world.log) == ["prefill", "prefilled"]


def test_a_sequence_without_a_free_page_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    world = LoopWorld(1)
    new = world.sequence(2)
    del new.tokens[-1]
    monkeypatch.setattr(world, "reserve_ahead", lambda sequence, upper: False)
    world.step(prefills=[PrefillChunk(new, 0, new.committed_len)])
    assert passes(world.log) == ["prefill", "prefilled"]


def test_a_launch_that_fails_is_told_to_the_drafter_and_the_rest_forgotten() -> None:
    world = LoopWorld(1)
    sequence = world.sequence(1)
    world.step(sequence)
    world.fails = RuntimeError("out of memory")
    world.log.clear()
    with pytest.raises(RuntimeError, match="out of memory"):
        world.step(sequence)
    assert world.log[-1] == "launched", "a drafter may wait for the host's part"
    world.loop.abandon()
    assert world.log[-1] == "abandon"
    assert not world.loop.active
    world.loop.finish()
    assert passes(world.log) == []


def test_rounds_without_the_host_are_learnt_as_a_whole() -> None:
    world = LoopWorld(0)
    world.shapes[1] = CHAIN
    world.emits[1] = [[8, 9]]
    world.step(world.sequence(1), world.sequence(2))
    (step,) = world.observed
    assert (step.requested, step.draft_s, step.verify_s, step.round_s) == ({CHAIN: 1}, 0.25, 0.75, 1.5)
    assert (step.path, step.catches_up) == (DraftPath.DEVICE, False)
    assert [(one.num_nodes, one.shape, one.accepted) for one in step.entries] == [
        (3, CHAIN, 1),
        (1, NO_DRAFT, 0),
    ]


def test_a_round_that_catches_up_is_marked_for_the_controller() -> None:
    world = LoopWorld(1)
    world.shapes[1] = CHAIN
    one = world.sequence(1)
    world.catches_up = True
    world.step(one)
    world.catches_up = False
    world.step(one)
    world.loop.drain()
    assert [step.catches_up for step in world.observed] == [True, False]


def test_a_measured_wait_is_learnt_apart() -> None:
    world = LoopWorld(0)
    world.shapes[1] = CHAIN
    world.wait = ProposalWait(0.5, 0.6, {TREE: 1}, 0.3)
    world.step(world.sequence(1))
    (step,) = world.observed
    assert (step.path, step.requested) == (DraftPath.HOST, {TREE: 1})
    assert (step.draft_s, step.verify_s, step.round_s) == (0.5, 1.5, 2.0)


@pytest.mark.parametrize(
    ("wait", "draft_ms"), [(None, 250.0), (ProposalWait(0.5, 0.6, {CHAIN: 1}, 0.3), 300.0)]
)
def test_a_trace_tells_times_and_tree(wait: ProposalWait | None, draft_ms: float) -> None:
    world = LoopWorld(0)
    world.shapes[1] = CHAIN
    world.emits[1] = [[8, 9]]
    world.wait = wait
    traced, plain = world.sequence(1, trace=True), world.sequence(2, trace=True)
    base = traced.committed_len
    world.step(traced, plain, world.sequence(3))
    first, second = world.traces
    assert (first.round, first.base_len, list(first.accepted), list(first.emitted)) == (1, base, [1], [8, 9])
    assert (len(first.nodes), first.draft_ms, first.verify_ms) == (3, pytest.approx(draft_ms), 750.0)
    assert (len(second.nodes), second.draft_ms) == (1, 0.0)


@pytest.mark.parametrize("saved_s", [0.0, 0.25])
def test_the_source_of_the_trees_learns_how_much_time_they_have_saved(saved_s: float) -> None:
    world = LoopWorld(0)
    world.saved_s = saved_s
    world.step(world.sequence(1))
    assert ("saved 0.25" in world.log) is (saved_s > 0)
