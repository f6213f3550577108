"""Limits how long a round waits for the proposals of its `auto` entries that come through the host."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.services.target.policy.controller_inputs import EntryBound
from outrider.services.target.policy.cost_model import StepCosts
from outrider.services.target.policy.expectations import expected_tokens

WAIT_SHARE = 1.5
"""Maximum wait for proposals, as a multiple of the time that the proposals can save.

The multiple is larger than 1, because the estimated saving follows the fastest rounds. Other work on the
machine prolongs the wait, but also the plain rounds that the proposal replaces. `WaitBudget` limits the total
time of waits in vain."""
P99_MULTIPLE = 2.0
"""Maximum wait for proposals, as a multiple of the 99th percentile of measured proposal times."""
UNMEASURED_WAIT_S = 0.1
"""Maximum wait in seconds while fewer than `ANSWERS_TO_JUDGE` proposals have been measured."""
ANSWERS_TO_JUDGE = 8
"""Number of proposals that are measured before the measured times limit the wait.

The first proposals are slow because caches and buffers of target and draft are cold.
"""


def wait_cap_s(entries: Sequence[EntryBound], batch_size: int, costs: StepCosts, *, known: bool) -> float:
    """Return the maximum time in seconds that a round waits for the trees of its `auto` requests.

    The limit is the smaller of two values:

    - `P99_MULTIPLE` times the 99th percentile of the measured times from a request for trees to the arrival
      of the trees.
    - `WAIT_SHARE` times the time that the trees can save. Trees that yield n tokens save the time of n plain
      rounds minus the time of the verify pass. The assumed saving is at least the time of one plain round.

    Args:
        entries: The `auto` requests of the round.
        batch_size: Number of sequences of the round.
        costs: The measured costs.
        known: True if the drafter's acceptance is known. If not, all nodes are assumed to be accepted, so
            that rounds wait and acceptance is measured.
    """
    plain_s = costs.plain(batch_size)
    if plain_s is None or costs.num_answers < ANSWERS_TO_JUDGE:
        return UNMEASURED_WAIT_S
    gain = plain_s
    for entry in {
        (entry.forms, entry.useful_depth, entry.state.acceptance.level): entry for entry in entries
    }.values():
        tokens = expected_tokens(entry)
        for bound in entry.forms:
            expected = tokens.get(bound, 1.0) if known else 1.0 + min(bound.depth, entry.useful_depth)
            gain = max(gain, expected * plain_s - costs.verify(batch_size, batch_size + bound.max_nodes - 1))
    return min(P99_MULTIPLE * (costs.answer_p99 or 0.0), WAIT_SHARE * gain)
