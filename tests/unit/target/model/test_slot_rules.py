"""Rules of slots on the device: who writes them, what they contain, and that they end with their sequence."""

from __future__ import annotations

import pytest
import torch
from support.engine.slot_sequences import seated_sequence

from outrider.kernels.logit_rules import COUNT_MASK, ENDS, FORBIDDEN, IN_PROMPT
from outrider.services.target.model.slot_rules import SlotRules
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.generation import SamplingParams
from outrider.shared.base.logit_rules import LogitRules
from outrider.shared.kv.pool import KVPool

VOCAB = 20
ALL = LogitRules(
    presence_penalty=0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.5,
    logit_bias=((9, 2.0), (4, -1.0)),
    min_tokens=3,
    allowed_token_ids=tuple(range(12)),
    bad_words=((7,), (1, 2), (3, 4, 5)),
)


@pytest.fixture
def pool() -> KVPool:
    return KVPool(64, 4, 1, 1, 2, torch.float32, "cpu")


@pytest.fixture
def rules() -> SlotRules:
    return SlotRules(3, VOCAB, torch.device("cpu"))


def ruled(pool: KVPool, session_id: int, slot: int, given: LogitRules | None) -> Sequence:
    sampling = SamplingParams(temperature=0.0, rules=given or LogitRules())
    made = seated_sequence(pool, session_id, slot, prompt=(3, 1, 3), sampling=sampling)
    made.stop_ids = frozenset({2, 99})
    return made


def test_a_sequence_writes_all_its_rules(rules: SlotRules, pool: KVPool) -> None:
    rules.hold(ruled(pool, 1, 1, ALL))
    assert rules.state.active.tolist() == [0, 0, 0], "numbers are uploaded together"
    rules.flush()
    state = rules.state
    assert state.active.tolist() == [0, 1, 0]
    assert (float(state.presence[1]), float(state.frequency[1]), float(state.repetition[1])) == (
        0.5,
        0.25,
        1.5,
    )
    assert (int(state.starts[1]), int(state.first_ends[1])) == (3, 6)
    assert state.bias_tokens[1, : int(state.num_biases[1])].tolist() == [4, 9]
    assert state.bias_values[1, :2].tolist() == [-1.0, 2.0]
    assert int(state.num_phrases[1]) == 2
    assert state.phrase_starts[1, :3].tolist() == [0, 2, 5]
    assert state.phrase_tokens[1, :5].tolist() == [1, 2, 3, 4, 5]
    words = state.words[1].tolist()
    assert [token for token, word in enumerate(words) if word & IN_PROMPT] == [1, 3]
    assert [token for token, word in enumerate(words) if word & ENDS] == [2]
    assert [token for token, word in enumerate(words) if word & FORBIDDEN] == [7, *range(12, VOCAB)]
    assert not any(word & COUNT_MASK for word in words)
    assert not rules.state.words[0].any()


def test_the_output_of_a_sequence_that_resumes_is_counted(rules: SlotRules, pool: KVPool) -> None:
    sequence = ruled(pool, 1, 0, ALL)
    sequence.tokens += [5, 8, 5]
    rules.hold(sequence)
    counts = (rules.state.words[0] & COUNT_MASK).tolist()
    assert {token: count for token, count in enumerate(counts) if count} == {5: 2, 8: 1}
    assert rules.state.tail[0, 3:6].tolist() == [5, 8, 5]
    rows = rules.prompt_rows([sequence])
    assert rows.num_banned.tolist() == [0]
    sequence.tokens += [1]
    assert rules.prompt_rows([sequence]).banned[0, :1].tolist() == [2]


def test_the_first_token_is_counted_on_the_device(rules: SlotRules, pool: KVPool) -> None:
    with_rules, without, failed = (
        ruled(pool, 1, 0, ALL),
        ruled(pool, 2, 1, None),
        ruled(pool, 3, 2, LogitRules(1.0)),
    )
    for sequence in (with_rules, without, failed):
        rules.hold(sequence)
    rules.flush()
    rules.count_first([with_rules, without, failed], torch.tensor([6, 6, -1]))
    assert [(rules.state.words[slot] & COUNT_MASK).sum().item() for slot in range(3)] == [1, 0, 0]
    assert int(rules.state.tail[0, 3]) == 6


def test_the_next_owner_of_a_slot_inherits_nothing(rules: SlotRules, pool: KVPool) -> None:
    rules.hold(ruled(pool, 1, 0, ALL))
    rules.flush()
    rules.hold(ruled(pool, 2, 0, None))
    rules.flush()
    assert int(rules.state.active[0]) == 0
    rules.hold(ruled(pool, 3, 0, LogitRules(frequency_penalty=1.0)))
    rules.flush()
    assert int(rules.state.active[0]) == 1
    assert int(rules.state.num_biases[0]) == int(rules.state.num_phrases[0]) == 0
    assert [word & ~ENDS for word in rules.state.words[0].tolist()] == [0] * VOCAB


def test_rules_are_written_once(rules: SlotRules, pool: KVPool) -> None:
    sequence = ruled(pool, 1, 0, ALL)
    rules.hold(sequence)
    rules.flush()
    rules.count_first([sequence], torch.tensor([6]))
    rules.hold(sequence)
    rules.flush()
    assert int(rules.state.words[0, 6] & COUNT_MASK) == 1, "writing again would drop the device's counts"
