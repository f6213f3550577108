"""The words for the controller's decisions: complete, and the same in the terminal and on the pages."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.services.gateway.playground import pages
from outrider.services.target.metrics import FALLBACK_REASONS
from outrider.services.target.policy.verdict import AutoReason
from outrider.services.terminal.reasons import (
    DECISIONS,
    DRAFT_STATES,
    FALLBACKS,
    chosen,
    draft_state,
    why_decided,
    why_no_draft,
)
from outrider.shared.spec.drafter import DrafterState


def words_of(name: str) -> dict[str, str]:
    """Return a list of words of the pages."""
    text = Path(pages.FOLDER, "reasons.js").read_text()
    [block] = re.findall(rf"export const {name} = {{(.*?)\n}};", text, re.DOTALL)
    return dict(re.findall(r"^  (\w+): '(.*)',$", block, re.MULTILINE))


def test_pages_and_terminal_use_the_same_words() -> None:
    assert words_of("DRAFT_STATES") == DRAFT_STATES
    assert words_of("DECISIONS") == DECISIONS
    assert words_of("FALLBACKS") == FALLBACKS


def test_every_reason_of_the_target_has_words() -> None:
    assert {one.value for one in DrafterState} == DRAFT_STATES.keys()
    assert {one.value for one in AutoReason} == DECISIONS.keys()
    assert {*FALLBACK_REASONS, "user", "length", "controller"} <= FALLBACKS.keys()


def test_a_choice_is_in_words() -> None:
    shapes = [
        {"depth": 3, "topk": 1, "max_nodes": 4, "rows": 2},
        {"depth": 5, "topk": 4, "max_nodes": 16, "rows": 1},
    ]
    auto = {"reason": "does_not_pay", "shapes": shapes, "plain_rows": 4}
    assert chosen(auto) == "2 × chain of 3, 1 × tree of depth 5, topk 4, 16 nodes, 4 × plain decoding"
    assert why_decided(auto) == "plain decoding is estimated to be faster than drafting"
    assert chosen({"shapes": [], "plain_rows": 0}) == "nothing yet"


def test_an_unknown_reason_is_shown_as_it_is() -> None:
    assert why_no_draft("out_of_luck") == "out of luck"
    assert draft_state("gone_fishing") == "gone fishing"
