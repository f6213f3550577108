"""Plain words for states of the draft, decisions and rounds without a draft, as `outrider top` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DRAFT_STATES = {
    "none": "none",
    "connecting": "connecting",
    "on": "ready",
    "late": "slow",
    "draft_down": "does not answer",
}
"""Words for each state of the draft."""

DECISIONS = {
    "pays": "drafting is estimated to be faster than plain decoding",
    "does_not_pay": "plain decoding is estimated to be faster than drafting",
    "probing": "it is trying another choice in order to measure its speed",
    "unmeasured": "it has not measured enough rounds to compare the speeds",
    "draft_away": "the draft is unavailable at the moment",
    "idle": "there has been no request in mode “auto” yet",
}
"""Words for each reason of the controller's last decision."""

FALLBACKS = {
    "awaited": "the tree had not arrived yet",
    "backing_off": "the draft had not answered, and the target waited before it asked again",
    "bad_tree": "the draft sent an invalid tree",
    "budget": "the round had no room for more draft tokens",
    "connecting": "the target was still connecting to the draft",
    "controller": "the controller chose plain decoding",
    "draft_down": "the draft was down",
    "empty_tree": "the draft proposed no token",
    "forbidden": "the form of the answer allowed none of the drafted tokens",
    "half_open": "the draft had failed before and was being tested with one request",
    "joined": "the request joined a round whose trees were already requested",
    "kv_full": "the KV cache of the draft was full",
    "late": "the draft answered too late",
    "length": "the answer was too short",
    "misfit": "the draft does not fit this target",
    "no_draft": "there is no draft",
    "no_features": "the hidden states that the draft needs were missing",
    "no_proposal": "the draft proposed no tree",
    "not_followed": "the draft did not follow this request",
    "rejected": "the draft refused this request",
    "resync": "the draft had to receive this request again",
    "shape_above_draft": "the tree was larger than the draft can propose",
    "user": "the request turned drafting off",
    "warming": "the draft was still preparing",
}
"""Words for each reason why a round had no draft."""


def draft_state(state: str) -> str:
    """Return the state of the draft in words. Unknown states are returned unchanged."""
    return DRAFT_STATES.get(state, state.replace("_", " "))


def why_decided(auto: Mapping[str, Any]) -> str:
    """Return the reason of the controller's decision in words. Unknown reasons are returned unchanged."""
    reason = str(auto["reason"])
    return DECISIONS.get(reason, reason.replace("_", " "))


def why_no_draft(reason: str) -> str:
    """Return the reason of a round without a draft in words. Unknown reasons are returned unchanged."""
    return FALLBACKS.get(reason, reason.replace("_", " "))


def chosen(auto: Mapping[str, Any]) -> str:
    """Return what the controller chose, e.g. ``1 × chain of 3, 2 × plain decoding``.

    Args:
        auto: The field `auto` of a target in the reply of ``GET /status.json``.
    """
    parts = []
    for one in auto["shapes"]:
        shape = f"chain of {one['depth']}"
        if one["topk"] != 1:
            shape = f"tree of depth {one['depth']}, topk {one['topk']}, {one['max_nodes']} nodes"
        parts.append(f"{one['rows']} × {shape}")
    if auto["plain_rows"]:
        parts.append(f"{auto['plain_rows']} × plain decoding")
    return ", ".join(parts) or "nothing yet"
