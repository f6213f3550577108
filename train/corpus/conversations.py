"""Conversations of several exchanges, so that sensible text follows every answer."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from outrider.train.corpus import (
    arithmetic,
    code,
    countries,
    dialogue,
    explain,
    lists,
    notes,
    stories,
    units,
    unknown,
)
from outrider.train.corpus.base import CorpusSplit, Exchange, Topic, Turn
from outrider.train.corpus.noise import perturb

TOPICS = (
    Topic("countries", 0.30, countries.make), Topic("lists", 0.12, lists.make),
    Topic("explain", 0.14, explain.make), Topic("arithmetic", 0.10, arithmetic.make),
    Topic("units", 0.07, units.make), Topic("code", 0.09, code.make), Topic("dialogue", 0.08, dialogue.make),
    Topic("stories", 0.06, stories.make), Topic("notes", 0.06, notes.make),
    Topic("unknown", 0.05, unknown.make),
)  # fmt: skip
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are Outrider, a helpful assistant.", "Answer shortly and clearly.",
    "You are a friendly teacher.", "You are a helpful assistant. Answer in full sentences.",
)  # fmt: skip
_THANKS_RATE = 0.3
# The same question often follows a thank-you, so that greedy decoding continues sensibly.
_POPULAR_RATE = 0.12
_POPULAR = "List 3 countries and their capitals."


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """A question with its answer. With ``predict_question``, the model learns to predict the question too."""

    question: str
    answer: str
    predict_question: bool


@dataclass(frozen=True, slots=True)
class TopicMix:
    """Settings for the mixture of topics in generated conversations.

    Attributes:
        split: The templates and entities that the conversations may use.
        gsm8k: Turns of GSM8K's training split, or an empty sequence.
        gsm8k_rate: Fraction of exchanges drawn from ``gsm8k``. The model does not learn to predict the
            questions of these exchanges.
        noise_rate: Fraction of exchanges whose first question is reworded. Applies only to the training
            split.
    """

    split: CorpusSplit
    gsm8k: tuple[Turn, ...] = ()
    gsm8k_rate: float = 0.0
    noise_rate: float = 0.5


def conversation(rng: Random, mix: TopicMix, min_chars: int) -> tuple[str | None, list[QuestionAnswer]]:
    """Generate a conversation of at least ``min_chars`` characters. All random choices come from ``rng``.

    Returns:
        The system prompt or None, and the messages.
    """
    train = mix.split is CorpusSplit.TRAIN
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.25 else None
    weights = [t.weight for t in TOPICS]
    messages: list[QuestionAnswer] = []
    chars = 0
    thanked = False
    while chars < min_chars:
        exchange: Exchange
        clean = train
        if mix.gsm8k and rng.random() < mix.gsm8k_rate:
            exchange, clean = [rng.choice(mix.gsm8k)], False
        elif train and thanked and rng.random() < _POPULAR_RATE:
            exchange = countries.popular_list(rng, _POPULAR)
        else:
            exchange = rng.choices(TOPICS, weights)[0].make(rng, mix.split)
            if train and rng.random() < mix.noise_rate:
                exchange, clean = [(perturb(rng, *exchange[0]), exchange[0][1]), *exchange[1:]], False
        thanked = rng.random() < _THANKS_RATE
        if thanked:
            exchange = [*exchange, dialogue.thanks(rng, mix.split)]
        messages += [QuestionAnswer(q, a, train and (clean or i > 0)) for i, (q, a) in enumerate(exchange)]
        chars += sum(len(q) + len(a) + 12 for q, a in exchange)
    return system, messages


def heldout_prompts(seed: int, per_topic: int) -> Iterator[tuple[str, str]]:
    """Yield ``per_topic`` distinct (topic, prompt) pairs per topic, from held-out templates and entities."""
    rng = Random(seed)
    for topic in TOPICS:
        seen: set[str] = set()
        attempts = 0
        while len(seen) < per_topic and attempts < 10_000:
            attempts += 1
            prompt = topic.make(rng, CorpusSplit.HELDOUT)[0][0]
            if prompt not in seen:
                seen.add(prompt)
                yield topic.name, prompt
