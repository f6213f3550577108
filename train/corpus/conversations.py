"""Whole conversations from the topics: a chain of exchanges long enough that text always goes on sensibly after an answer."""

from collections.abc import Iterator
from random import Random

from outrider.train.corpus import arithmetic, code, countries, dialogue, explain, lists, notes, stories, units
from outrider.train.corpus.base import Exchange, Split, Topic, Turn

TOPICS = (
    Topic("countries", 0.30, countries.make),
    Topic("lists", 0.12, lists.make),
    Topic("explain", 0.14, explain.make),
    Topic("arithmetic", 0.10, arithmetic.make),
    Topic("units", 0.07, units.make),
    Topic("code", 0.09, code.make),
    Topic("dialogue", 0.08, dialogue.make),
    Topic("stories", 0.06, stories.make),
    Topic("notes", 0.06, notes.make),
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are Outrider, a helpful assistant.", "Answer shortly and clearly.", "You are a friendly teacher.",
    "You are a helpful assistant. Answer in full sentences.",
)
_THANKS_RATE = 0.3


def conversation(rng: Random, split: Split, min_chars: int, gsm8k: list[Turn], gsm8k_rate: float) -> tuple[str | None, list[Turn]]:
    """Generate (system prompt or None, turns) of at least ``min_chars`` characters.

    Args:
        rng: Source of all choices; the same state gives the same text.
        split: Which templates and entities may be used.
        min_chars: Length at which no further exchange is added.
        gsm8k: Turns of GSM8K's training split; may be empty.
        gsm8k_rate: Fraction of exchanges taken from ``gsm8k``.
    """
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.25 else None
    weights = [t.weight for t in TOPICS]
    turns: list[Turn] = []
    chars = 0
    while chars < min_chars:
        exchange: Exchange
        if gsm8k and rng.random() < gsm8k_rate:
            exchange = [rng.choice(gsm8k)]
        else:
            exchange = rng.choices(TOPICS, weights)[0].make(rng, split)
        if rng.random() < _THANKS_RATE:
            exchange = [*exchange, dialogue.thanks(rng, split)]
        turns += exchange
        chars += sum(len(q) + len(a) + 12 for q, a in exchange)
    return system, turns


def heldout_prompts(seed: int, per_topic: int) -> Iterator[tuple[str, str]]:
    """Yield distinct (topic, prompt) pairs made of held-out templates and entities only, ``per_topic`` of each topic."""
    rng = Random(seed)
    for topic in TOPICS:
        seen: set[str] = set()
        attempts = 0
        while len(seen) < per_topic and attempts < 10_000:
            attempts += 1
            prompt = topic.make(rng, Split.HELDOUT)[0][0]
            if prompt not in seen:
                seen.add(prompt)
                yield topic.name, prompt
