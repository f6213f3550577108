"""Chats with a common system prompt: what the embedded pair finds with and without speculation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.target_harness import Harness, load_toy, make_harness
from support.suite.compute_device import DEVICE

from outrider.bench.load.shared_prefix import Chats
from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.base.generation import SpeculationMode

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
TARGET, HEAD = ROOT / "models" / "demo" / "target", ROOT / "models" / "demo" / "eagle3"
CHATS = Chats(count=4, turns=3, system=400, turn=20, answer=16, vocab=1000)


def hits(harness: Harness, mode: SpeculationMode) -> tuple[int, int]:
    """Run the chats side by side, and return how many prompt tokens were found and how many could be."""
    found = possible = 0
    before: dict[int, list[int]] = {chat: [] for chat in range(CHATS.count)}
    for turn in range(CHATS.turns):
        prompts = {chat: CHATS.prompt(chat, turn, before[chat]) for chat in before}
        for chat, prompt in prompts.items():
            name = f"{chat} {turn}"
            harness.submit(prompt, CHATS.answer, request_id=name, mode=mode, ignore_eos=True)
        harness.run()
        for chat, prompt in prompts.items():
            found += harness.sink.finished[f"{chat} {turn}"].cached_tokens
            possible += CHATS.possible(chat, turn, before[chat])
            before[chat] = [*prompt, *harness.sink.tokens[f"{chat} {turn}"]]
    return found, possible


def test_hit_rates_with_and_without_speculation_are_equal_and_near_the_best_possible() -> None:
    decoder = load_toy(TARGET)
    settings = DraftSettings.load({"draft": HEAD, "device": str(DEVICE), "kv_tokens": 8192})
    counts = []
    for mode in (SpeculationMode.OFF, SpeculationMode.ON):
        drafter = drafter_beside(decoder, settings)
        harness = make_harness(decoder, drafter, plan=LoopPlan(drafts_on_device=True))
        counts.append(hits(harness, mode))
        drafter.shutdown()
    (found_off, possible), (found_on, _) = counts
    assert found_off == found_on
    assert found_on >= 0.95 * possible


@pytest.mark.parametrize(("chat", "turn", "expected"), [(0, 0, 0), (1, 0, 400), (0, 1, 435)])
def test_what_is_possible(chat: int, turn: int, expected: int) -> None:
    before = [] if turn == 0 else [*CHATS.prompt(chat, 0, []), *range(CHATS.answer)]
    assert CHATS.possible(chat, turn, before) == expected
    prompt = CHATS.prompt(chat, turn, before)
    assert prompt[: CHATS.system] == CHATS.tokens("system", CHATS.system)
    assert len(prompt) == (len(before) or CHATS.system) + CHATS.turn
