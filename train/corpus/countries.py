"""Questions about countries: capital, currency, language, continent, descriptions, comparisons and lists."""

from random import Random

from outrider.train.corpus.base import CorpusSplit, Exchange, Turn, cap, join_and, pick_template, skewed_index
from outrider.train.corpus.country_table import HELDOUT_COUNTRIES, TRAIN_COUNTRIES, Country

_NUMBER_WORDS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}

_CAPITAL = (
    "What is the capital of {c}?", "Capital city of {c}", "I need to know the capital of {c}.",
    "Please give me the capital of {c}.", "What city is the capital in {c}?",
    "Which city is the seat of government of {c}?", "The capital of {c} is which city?",
    "Which city is the capital of {c}?", "Tell me the capital of {c}.", "What's the capital city of {c}?",
    "Can you tell me the capital of {c}?", "Name the capital of {c}.", "capital of {c}?",
    "I forgot the capital of {c}. What is it?", "Do you happen to know the name of the capital of {c}?",
    "In {c}, which city serves as the capital?",
)  # fmt: skip
_CURRENCY = (
    "The currency of {c}?", "How do people pay in {c}?", "What kind of money is used in {c}?",
    "In {c}, what is the money called?", "What is the currency of {c}?", "Which currency is used in {c}?",
    "What money do people use in {c}?", "Tell me the currency of {c}.", "What currency do I need in {c}?",
    "If I travel to {c}, what kind of money should I bring?",
)  # fmt: skip
_LANGUAGE = (
    "In {c}, which language is spoken?", "The language of {c}?", "What do they speak in {c}?",
    "What is the official language in {c}?", "What language is spoken in {c}?",
    "Which language do people speak in {c}?", "What is the main language of {c}?",
    "Tell me the main language of {c}.", "What do people speak in {c}?",
    "Which language would I hear most often in {c}?",
)  # fmt: skip
_CONTINENT = (
    "Where is {c}?", "On which continent is {c}?", "Which continent is {c} in?", "Where is {c} located?",
    "Where can I find {c} on a map?", "What part of the world does {c} belong to?",
)  # fmt: skip
_DESCRIBE = (
    "Tell me about {c}.", "What do you know about {c}?", "Give me some facts about {c}.", "Describe {c}.",
    "Write a short description of {c}.", "Give me a short overview of {c}.",
    "Can you tell me something about {c}?", "I want to learn about {c}.",
    "Teach me a few basic facts about {c}, please.", "What should a visitor know about {c}?",
)  # fmt: skip
_REVERSE = (
    "Which country has the capital {k}?", "{k} is the capital of which country?",
    "What country is {k} the capital of?", "Of which country is {k} the capital?",
    "Name the country whose capital is {k}.",
)  # fmt: skip
_COMPARE = (
    "Compare {c} and {d}.", "What is the difference between {c} and {d}?", "How do {c} and {d} differ?",
    "Tell me about {c} and {d}.", "Put {c} and {d} side by side for me.",
)  # fmt: skip
_LIST = (
    "List {n} countries and their capitals.", "Show me {n} countries and their capitals.",
    "I want {n} countries with capitals.", "{n} countries and their capitals",
    "Write {n} countries and the capital of each.", "Can you name {n} countries and capitals?",
    "List {n} countries and the capital of each country.", "List {n} countries with their capitals.",
    "Name {n} countries and their capitals.", "Give me {n} countries and their capitals.",
    "Can you list {n} countries and their capital cities?", "Tell me {n} countries and their capitals.",
    "Please list {n} countries and their capitals.", "Write a list of {n} countries and their capitals.",
    "What are {n} countries and their capitals?", "I need {n} countries together with the capital of each.",
    "Could you write down {n} nations and the capital city of each one?",
)  # fmt: skip
_LIST_IN = (
    "Show me {n} countries in {p}.", "Can you list {n} countries in {p} and their capitals?",
    "{n} countries in {p}", "I want {n} countries in {p} with capitals.",
    "Can you tell me {n} countries in {p} with their capitals?",
    "List {n} countries in {p} and their capitals.", "Name {n} countries in {p}.",
    "Give me {n} countries in {p} with their capitals.", "Which countries are in {p}? Name {n}.",
    "Tell me {n} countries from {p} and their capitals.", "What are {n} countries in {p}?",
    "Pick {n} countries that lie in {p} and tell me the capital of each.",
)  # fmt: skip
_MORE = ("Tell me more.", "Tell me more about it.", "What else do you know about it?")
_PLACES = ("Europe", "Asia", "Africa", "South America", "North America", "Oceania")


def _facts(c: Country) -> str:
    return (
        f"{cap(c.name)} is a country in {c.continent}. Its capital is {c.capital}. "
        f"The main language is {c.language}, and people pay with the {c.currency}."
    ).replace("..", ".")


def _list_line(i: int, c: Country) -> str:
    return (
        f"{i}. {cap(c.name)}: the capital is {c.capital}. "
        f"It is in {c.continent}, and the main language is {c.language}."
    ).replace("..", ".")


def _sample(rng: Random, pool: list[Country] | tuple[Country, ...], n: int) -> list[Country]:
    """Draw n distinct countries.

    Well-known countries, which come early in the pool, are likelier and often keep their order.
    """
    if rng.random() < 0.6:
        return list(pool[:n])
    chosen: list[Country] = []
    while len(chosen) < n:
        c = pool[skewed_index(rng, len(pool), 0.85)]
        if c not in chosen:
            chosen.append(c)
    return chosen


def _question(rng: Random, split: CorpusSplit, templates: tuple[str, ...], **slots: str) -> str:
    return cap(pick_template(rng, templates, split).format(**slots))


def _listing(rng: Random, split: CorpusSplit, pool: tuple[Country, ...]) -> Exchange:
    n = rng.choices((2, 3, 4, 5, 6), (1, 4, 2, 2, 1))[0]
    word = str(n) if rng.random() < 0.6 else _NUMBER_WORDS[n]
    place = rng.choice(_PLACES) if rng.random() < 0.4 else ""
    inside = [c for c in pool if c.continent == place]
    if len(inside) >= n:
        chosen = _sample(rng, inside, n)
        ask = _question(rng, split, _LIST_IN, n=word, p=place)
        intro = f"Here are {word} countries in {place} and their capitals:"
    else:
        chosen = _sample(rng, pool, n)
        ask = _question(rng, split, _LIST, n=word)
        intro = f"Here are {word} countries and their capitals:"
    lines = "\n".join(_list_line(i, c) for i, c in enumerate(chosen, 1))
    turns: list[Turn] = [(ask, f"{intro}\n\n{lines}")]
    if rng.random() < 0.35:
        pairs = join_and([f"the {c.currency} in {c.name}" for c in chosen])
        turns.append(("Which currencies do they use?", f"People use {pairs}."))
    if rng.random() < 0.25:
        c = chosen[-1]
        turns.append(("Tell me more about the last one.", _facts(c)))
    return turns


def popular_list(rng: Random, question: str) -> Exchange:
    """Answer ``question`` with three well-known countries."""
    lines = "\n".join(_list_line(i, c) for i, c in enumerate(_sample(rng, TRAIN_COUNTRIES, 3), 1))
    return [(question, f"Here are 3 countries and their capitals:\n\n{lines}")]


def make(rng: Random, split: CorpusSplit) -> Exchange:
    """Generate an exchange about countries."""
    pool = HELDOUT_COUNTRIES if split is CorpusSplit.HELDOUT else TRAIN_COUNTRIES
    c = rng.choice(pool)
    kind = rng.random()
    turns: list[Turn]
    if kind < 0.34 and split is CorpusSplit.TRAIN:  # This question names no entity that could be held out.
        return _listing(rng, split, TRAIN_COUNTRIES)
    if kind < 0.46:
        turns = [
            (
                _question(rng, split, _CAPITAL, c=c.name),
                (
                    f"The capital of {c.name} is {c.capital}. {cap(c.name)} is a country in {c.continent}."
                ).replace("..", "."),
            )
        ]
    elif kind < 0.54:
        turns = [
            (
                _question(rng, split, _CURRENCY, c=c.name),
                f"The currency of {c.name} is the {c.currency}. You can use it in {c.capital}, the capital.",
            )
        ]
    elif kind < 0.61:
        turns = [
            (
                _question(rng, split, _LANGUAGE, c=c.name),
                f"The main language of {c.name} is {c.language}. It is spoken in {c.capital}, the capital.",
            )
        ]
    elif kind < 0.68:
        turns = [
            (
                _question(rng, split, _CONTINENT, c=c.name),
                f"{cap(c.name)} is in {c.continent}. Its capital is {c.capital}.".replace("..", "."),
            )
        ]
    elif kind < 0.84:
        return [(_question(rng, split, _DESCRIBE, c=c.name), _facts(c))]
    elif kind < 0.90:
        turns = [
            (
                _question(rng, split, _REVERSE, k=c.capital),
                f"{c.capital} is the capital of {c.name}. {cap(c.name)} is a country in {c.continent}.",
            )
        ]
    else:
        d = rng.choice([x for x in pool if x != c])
        both = (
            f"Both countries are in {c.continent}."
            if c.continent == d.continent
            else "They are on different continents."
        )
        return [
            (_question(rng, split, _COMPARE, c=c.name, d=d.name), f"{_facts(c)}\n\n{_facts(d)}\n\n{both}")
        ]
    if rng.random() < 0.4:
        turns.append((rng.choice(_MORE), _facts(c)))
    return turns
