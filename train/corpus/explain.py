"""Short explanations of scientific and everyday concepts, with follow-up questions."""

from random import Random

from outrider.train.corpus.base import CorpusSplit, Exchange, Turn, cap, pick_template, split_entities
from outrider.train.corpus.explain_table import rows

_WHAT = (
    "Define {t}.", "What does the word mean: {t}?", "Could you explain what {t} is?",
    "I want to understand {t}.", "{t}, what is that?", "Help me understand {t}.", "Teach me about {t}.",
    "What is {t} and how does it work?", "Give me a brief introduction to {t}.", "What is {t}?",
    "Explain {t}.", "Can you explain {t}?", "Explain {t} in simple terms.", "Tell me about {t}.",
    "Explain {t} to a child.", "What do you know about {t}?", "Please explain {t}.",
    "Give me a short explanation of {t}.", "I do not understand {t}. Can you help?",
    "Describe {t} in a few sentences.", "In plain words, tell me what is meant by {t}.",
    "How would you introduce {t} to a beginner?",
)  # fmt: skip
_HOW = (
    "In what way does {t} work?", "Tell me how {t} works.", "What happens with {t}?", "How does {t} work?",
    "Explain how {t} works.", "How does it work with {t}?", "Walk me through the way {t} works.",
)  # fmt: skip
_WHY = (
    "Why does {t} matter?", "Why do we need {t}?", "What is {t} good for?", "Why is {t} important?",
    "Give me an example of {t}.", "Why should I care about {t}?", "What makes {t} relevant in daily life?",
)  # fmt: skip
_FOLLOW_HOW = (
    "In what way does {t} work?", "Tell me how {t} works.", "What happens with {t}?", "How does it work?",
    "And how does it work?",
)  # fmt: skip
_FOLLOW_WHY = (
    "Why does {t} matter?",
    "Why do we need {t}?",
    "What is {t} good for?",
    "Why does it matter?",
    "Why is it important?",
)
_SHORT = ("Can you say that in one sentence?", "Please say it in one sentence.")


def make(rng: Random, split: CorpusSplit) -> Exchange:
    """Generate a question about a concept with its explanation, sometimes with follow-up questions."""
    term, what, how, why = rng.choice(split_entities(rows(), split, lambda r: r[0]))
    plural = term in ("the seasons", "the tides")
    kind = rng.random()
    turns: list[Turn]
    if kind < 0.72 or plural:
        ask = (
            pick_template(rng, _WHAT, split)
            .replace("What is", "What are" if plural else "What is")
            .format(t=term)
        )
        turns = [(cap(ask), f"{what} {how} {why}")]
    elif kind < 0.86:
        turns = [(cap(pick_template(rng, _HOW, split).format(t=term)), f"{how} {why}")]
    else:
        turns = [(cap(pick_template(rng, _WHY, split).format(t=term)), f"{why} {what}")]
    roll = rng.random()
    if roll < 0.15:
        turns.append((rng.choice(_FOLLOW_HOW), how))
    elif roll < 0.3:
        turns.append((rng.choice(_FOLLOW_WHY), why))
    elif roll < 0.45:
        turns.append((rng.choice(_SHORT), what))
    return turns
