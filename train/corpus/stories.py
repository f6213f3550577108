"""Short stories and descriptions. The request provides most of their details."""

from random import Random

from outrider.train.corpus.base import (
    CorpusSplit,
    Exchange,
    Turn,
    a_an,
    cap,
    pick_template,
    skewed_index,
    split_entities,
)

_NAMES = (
    "Mila", "Tom", "Nora", "Oscar", "Lily", "Max", "Ruby", "Theo", "Luna", "Felix", "Ella", "Hugo", "Iris",
    "Jonas", "Kira", "Liam", "Maya", "Nico", "Pia", "Remy", "Sara", "Toby", "Uma", "Viktor", "Wanda", "Yusuf",
)  # fmt: skip
_HEROES = (
    "fox", "dog", "cat", "rabbit", "bear", "owl", "mouse", "horse", "turtle", "penguin", "elephant", "robot",
    "dragon", "duck", "squirrel", "boy", "girl", "frog",
)  # fmt: skip
_PLACES = (
    "forest",
    "village",
    "mountain",
    "harbour",
    "garden",
    "city",
    "island",
    "valley",
    "farm",
    "castle",
    "desert",
    "lighthouse",
)
_TREASURES = (
    "key",
    "map",
    "lantern",
    "letter",
    "bell",
    "book",
    "coin",
    "feather",
    "stone",
    "box",
    "flute",
    "mirror",
)
_HELPERS = ("bird", "child", "baker", "sailor", "deer", "gardener", "bee", "shepherd")
_ASK = (
    "A story about {h} named {n}, please.", "Create a story about {h} called {n}.",
    "I would like a story with {h} named {n}.", "Story about {h} called {n}.",
    "Give me a story about {h} whose name is {n}.", "Write me a fairy tale about {h} named {n}.",
    "Tell me a short story about {h} named {n}.", "Write a short story about {h} called {n}.",
    "Tell me a story about {h} named {n}.", "Can you tell me a story about {h} called {n}?",
    "I want to hear a story about {h} named {n}.", "Write a story about {h} named {n}.",
    "Please tell me a bedtime story about {h} named {n}.",
    "Make up a tale in which the hero is {h} named {n}.", "Invent a little tale about {h} whose name is {n}.",
)  # fmt: skip
_FREE = (
    "Tell me a story.",
    "Tell me a short story.",
    "Write a short story.",
    "Can you tell me a story?",
    "Please tell me a story.",
)
_DESCRIBE = (
    "Tell me about a {p} in the {s}.", "How does a {p} look in the {s}?", "Imagine a {p} in the {s}.",
    "What is a {p} like in the {s}?", "Describe a {p} in the {s}.",
    "Write a description of a {p} in the {s}.", "What does a {p} look like in the {s}?",
    "Paint a picture of a {p} in the {s} with words.", "How would you picture a {p} in the {s}?",
)  # fmt: skip
_SEASONS = {
    "spring": ("the first flowers open and the birds sing", "fresh and mild", "everything begins again"),
    "summer": ("the sun is high and the days are long", "warm and bright", "people stay outside until late"),
    "autumn": ("the leaves turn red and gold", "cool and clear", "the year slows down"),
    "winter": ("snow covers the ground and the nights are long", "cold and quiet", "a warm room feels best"),
}


def make(rng: Random, split: CorpusSplit) -> Exchange:
    """Generate a story or a description."""
    place = rng.choice(split_entities(_PLACES, split, str))
    if rng.random() < 0.25:
        season = rng.choice(list(_SEASONS))
        sight, air, end = _SEASONS[season]
        text = (
            f"In the {season}, the {place} is a special place. All around, {sight}. The air is {air}. "
            f"When you walk through the {place} in the {season}, you can feel that {end}."
        )
        return [(pick_template(rng, _DESCRIBE, split).format(p=place, s=season), text)]
    names, heroes = split_entities(_NAMES, split, str), split_entities(_HEROES, split, str)
    if split is CorpusSplit.TRAIN and rng.random() < 0.2:
        name, hero, ask = (
            names[skewed_index(rng, len(names))],
            heroes[skewed_index(rng, len(heroes))],
            pick_template(rng, _FREE, split),
        )
    else:
        name, hero = rng.choice(names), rng.choice(heroes)
        ask = pick_template(rng, _ASK, split).format(h=a_an(hero), n=name)
    where = _PLACES[skewed_index(rng, len(_PLACES), 0.5)]
    thing = _TREASURES[skewed_index(rng, len(_TREASURES), 0.5)]
    helper = _HELPERS[skewed_index(rng, len(_HELPERS), 0.5)]
    text = (
        f"Once upon a time, there was {a_an(hero)} named {name} who lived near a {where}. "
        f"One day, {name} found an old {thing} under a tree. "
        f"{name} wanted to know whose {thing} it was, so {name} went to the {where} and asked a {helper}. "
        f'"This {thing} is mine," said the {helper}. "I lost it many years ago. '
        'Thank you for bringing it back!" '
        f"From that day on, {name} and the {helper} were good friends, "
        f"and they met at the {where} every evening."
    )
    turns: list[Turn] = [(ask, text)]
    roll = rng.random()
    if roll < 0.15:
        turns.append((f"What did {name} find?", f"{name} found an old {thing} under a tree."))
    elif roll < 0.3:
        turns.append(("Who was the owner?", f"The {thing} belonged to the {helper}."))
    elif roll < 0.4:
        turns.append(("Give the story a title.", f'The title could be "{name} and the Old {cap(thing)}".'))
    return turns
