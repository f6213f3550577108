"""Prompt chunks between rounds: order of the work, first tokens, void results, and measured times."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engine.slot_sequences import seated_sequence
from support.engine.target_harness import load_toy, make_harness
from support.models.toys import make_toy_target

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine import prefill as prefill_module
from outrider.services.target.engine.prefill import Prefill
from outrider.services.target.model.outcome import FAILED_TOKEN
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence, SequenceStatus
from outrider.shared.kv.pool import KVPool


class Chosen:
    """The first tokens of a pass; waiting for them takes a second."""

    def __init__(self, kitchen: Kitchen, tokens: list[int]) -> None:
        self._kitchen, self._tokens = kitchen, tokens
        self.on_device = torch.tensor(tokens)
        self.logprobs, self.prompts, self.states = None, (), ()

    def wait(self) -> list[int]:
        self._kitchen.now += 1.0
        return self._tokens


class Kitchen:
    """A `Prefill` whose neighbours note their calls in one log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, captures: bool = False) -> None:
        self.log: list[str] = []
        self.tokens = [7]
        self.now = 100.0
        self.measured: list[tuple[int, int, float]] = []
        monkeypatch.setattr(prefill_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.pool = KVPool(256, 4, 1, 1, 2, torch.float32, "cpu")
        self.recorded: int | None = None
        runner: Any = SimpleNamespace(
            begin_prefill=self._begin, captures=captures, recorded_rows=self._recorded_rows
        )
        table: Any = SimpleNamespace(
            hold=lambda one: self.log.append(f"hold {one.session_id}"),
            seat=lambda ones, tokens: self.log.append(
                f"seat {[one.session_id for one in ones]} {tokens.tolist()}"
            ),
        )
        drafts: Any = SimpleNamespace(
            prefilled=lambda chunk: self.log.append(f"prefilled {chunk.sequence.session_id}"),
            first_token=lambda one, token: self.log.append(f"first {one.session_id} {token}"),
        )
        committer: Any = SimpleNamespace(
            accept=self._accept,
            emit=lambda one, step, logprobs: self.log.append(f"emit {one.session_id} {step.kept}"),
        )
        budget: Any = SimpleNamespace(
            observe=lambda *given: self.measured.append(given), tokens=lambda context: 100 + context
        )
        self.prefill = Prefill(runner, table, drafts, committer, budget)

    def _recorded_rows(self, most: int) -> int | None:
        return None if self.recorded is None or self.recorded > most else self.recorded

    def _begin(self, chunks: list[PrefillChunk], rules: None, allowed: None) -> Chosen:
        self.log.append("begin")
        return Chosen(self, self.tokens)

    def _accept(self, sequence: Sequence, emitted: list[int]) -> object:
        return None if emitted[-1] == FAILED_TOKEN else sequence.advance(emitted)

    def waiting(self, session_id: int, length: int, **options: Any) -> Sequence:
        """Return an admitted sequence whose prompt is not stored yet."""
        made = seated_sequence(self.pool, session_id, session_id, prompt=[1] * length, **options)
        made.status, made.cached_len = SequenceStatus.PREFILLING, 0
        return made


@pytest.fixture
def kitchen(monkeypatch: pytest.MonkeyPatch) -> Kitchen:
    return Kitchen(monkeypatch)


def test_a_complete_prompt_is_seated_before_the_drafter_gets_its_rows(kitchen: Kitchen) -> None:
    done, part = kitchen.waiting(1, 5), kitchen.waiting(2, 9)
    kitchen.prefill.launch([PrefillChunk(done, 0, 5), PrefillChunk(part, 0, 4)])
    assert kitchen.log == ["begin", "hold 1", "seat [1] [7]", "prefilled 1", "prefilled 2"]
    assert (done.status, part.status) == (SequenceStatus.RUNNING, SequenceStatus.PREFILLING)
    assert (done.cached_len, part.cached_len) == (5, 4)
    assert (done.tokens_ahead, done.passes_ahead, done.fresh_columns) == (1, 1, 1)
    assert (part.tokens_ahead, part.passes_ahead) == (0, 0)


def test_first_tokens_are_committed_to_the_drafter_before_they_are_delivered(kitchen: Kitchen) -> None:
    sequence = kitchen.waiting(1, 5)
    launched = kitchen.prefill.launch([PrefillChunk(sequence, 0, 5)])
    kitchen.log.clear()
    kitchen.prefill.finish(launched, 0.0)
    assert kitchen.log == ["first 1 7", "emit 1 [7]"]
    assert sequence.tokens[-1] == 7
    assert (sequence.tokens_ahead, sequence.passes_ahead) == (0, 0)


def test_a_sequence_that_ends_with_its_first_token_is_no_news_to_the_drafter(kitchen: Kitchen) -> None:
    launched = kitchen.prefill.launch([PrefillChunk(kitchen.waiting(1, 5, max_new_tokens=1), 0, 5)])
    kitchen.log.clear()
    kitchen.prefill.finish(launched, 0.0)
    assert kitchen.log == ["emit 1 [7]"]


def test_invalid_logits_fail_one_prompt(kitchen: Kitchen) -> None:
    kitchen.tokens = [FAILED_TOKEN, 8]
    bad, good = kitchen.waiting(1, 5), kitchen.waiting(2, 5)
    launched = kitchen.prefill.launch([PrefillChunk(bad, 0, 5), PrefillChunk(good, 0, 5)])
    kitchen.log.clear()
    kitchen.prefill.finish(launched, 0.0)
    assert kitchen.log == ["first 2 8", "emit 2 [8]"]


@pytest.mark.parametrize("change", ["left", "came back"])
def test_the_first_token_of_a_sequence_that_has_left_is_dropped(kitchen: Kitchen, change: str) -> None:
    sequence = kitchen.waiting(1, 5)
    launched = kitchen.prefill.launch([PrefillChunk(sequence, 0, 5)])
    kitchen.log.clear()
    if change == "left":
        sequence.slot = -1
    else:
        sequence.residence += 1
    sequence.tokens_ahead = sequence.passes_ahead = 0
    kitchen.prefill.finish(launched, 0.0)
    assert kitchen.log == []
    assert (sequence.committed_len, sequence.passes_ahead) == (5, 0)


def test_stored_features_count_only_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    kitchen = Kitchen(monkeypatch, captures=True)
    followed, gap, unfollowed = (
        kitchen.waiting(1, 9),
        kitchen.waiting(2, 9),
        kitchen.waiting(3, 9, follow=False),
    )
    gap.cached_len = 3  # the first rows were stored before a draft was connected
    kitchen.prefill.launch(
        [PrefillChunk(followed, 0, 4), PrefillChunk(gap, 3, 4), PrefillChunk(unfollowed, 0, 4)]
    )
    assert [one.feature_len for one in (followed, gap, unfollowed)] == [4, 0, 0]
    kitchen.prefill.launch([PrefillChunk(followed, 4, 9)])
    assert followed.has_features


@pytest.mark.parametrize(("previous_end", "seconds"), [(50.0, 1.5), (100.25, 1.25)])
def test_a_pass_is_timed_from_the_end_of_the_pass_before_it(
    kitchen: Kitchen, previous_end: float, seconds: float
) -> None:
    first, second = kitchen.waiting(1, 30), kitchen.waiting(2, 8)
    kitchen.tokens = [7]
    launched = kitchen.prefill.launch([PrefillChunk(first, 10, 30), PrefillChunk(second, 0, 4)])
    kitchen.now += 0.5
    kitchen.prefill.finish(launched, previous_end)
    assert kitchen.measured == [(24, 30, seconds)]


@pytest.mark.parametrize(
    ("stored", "waiting", "recorded", "limit"),
    [
        ([7], 0, None, 107),
        ([7, 50], 0, None, 107),
        ([], 1, None, 100),
        ([], 0, None, None),
        ([30], 0, 128, 128),
        ([27], 0, 128, 127),
        ([], 1, 64, 64),
    ],
)
def test_the_limit_is_the_largest_recorded_size_within_the_budget(
    kitchen: Kitchen, stored: list[int], waiting: int, recorded: int | None, limit: int | None
) -> None:
    kitchen.recorded = recorded
    running = kitchen.waiting(1, 5)
    running.status = SequenceStatus.RUNNING
    prefilling = [kitchen.waiting(2 + index, 90) for index in range(len(stored))]
    for sequence, length in zip(prefilling, stored, strict=True):
        sequence.cached_len = length
    scheduler: Any = SimpleNamespace(active=[running, *prefilling], waiting=[None] * waiting)
    assert kitchen.prefill.limit(scheduler) == limit


def test_the_first_chunk_of_a_prompt_keeps_to_the_budget_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_toy(make_toy_target(tmp_path, vocab_size=64, seed=3))
    harness = make_harness(decoder, NoDrafter(), prefill_chunk=64)
    monkeypatch.setattr(harness.engine._budget, "tokens", lambda context: 5)
    begin, spans = harness.runner.begin_prefill, []

    def noted(chunks: list[PrefillChunk], rules: Any, allowed: Any) -> Any:
        spans.append([(chunk.start, chunk.stop) for chunk in chunks])
        return begin(chunks, rules, allowed)

    monkeypatch.setattr(harness.runner, "begin_prefill", noted)
    harness.submit([1] * 20, 30, request_id="first")
    harness.step()
    harness.submit([2] * 12, 2, request_id="second")
    harness.run()
    assert spans == [[(0, 20)], [(0, 5)], [(5, 10)], [(10, 12)]]
