"""Common code of the corpus topics: the split rule, choice helpers and text helpers.

Each topic has a function ``make(rng, split) -> Exchange``. An exchange is one or more questions with their
answers. A *template* is a phrasing of a question, and an *entity* is the subject of a question. A held-out
exchange has no template and no entity in common with any training exchange. The name of its entity may still
occur elsewhere in the training text. In topics whose entities are numbers (units, sums), a held-out exchange
has new numbers, but the same units and operations.
"""

import enum
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

T = TypeVar("T")
Turn = tuple[str, str]  # (user's message, assistant's answer)
Exchange = list[Turn]  # Turns about one subject. The first turn can be understood without earlier text.


class CorpusSplit(enum.Enum):
    """The templates and entities that an exchange may use."""

    TRAIN = "train"
    HELDOUT = "heldout"  # Templates and entities that no training exchange uses.
    REPHRASED = "rephrased"  # Held-out templates about training entities. The model can answer them.


@dataclass(frozen=True, slots=True)
class Topic:
    """One subject of the corpus.

    Attributes:
        name: Label of the topic in the file of held-out prompts.
        weight: Relative frequency of the topic's exchanges in conversations.
        make: Generates an exchange for a split.
    """

    name: str
    weight: float
    make: Callable[[Random, CorpusSplit], Exchange]


def is_heldout_key(key: str, one_in: int = 10) -> bool:
    """Return True if an entity is held out. The result depends only on the entity's key."""
    return zlib.crc32(key.encode()) % one_in == 3


def pick_template(rng: Random, templates: Sequence[str], split: CorpusSplit) -> str:
    """Draw a phrasing for the split. The last fifth of ``templates``, but at least one, is held out."""
    held = max(1, len(templates) // 5)
    return rng.choice(templates[:-held] if split is CorpusSplit.TRAIN else templates[-held:])


def split_entities(entities: Sequence[T], split: CorpusSplit, key: Callable[[T], str]) -> list[T]:
    """Return at least one entity: those that belong to the split, in the given order."""
    held = [e for e in entities if is_heldout_key(key(e))] or [entities[-1]]
    return held if split is CorpusSplit.HELDOUT else [e for e in entities if e not in held]


def pick_number(rng: Random, low: int, high: int, split: CorpusSplit, salt: str) -> int:
    """Draw an integer in [low, high] whose (salt, value) key belongs to the split."""
    while True:
        value = rng.randint(low, high)
        if is_heldout_key(f"{salt}:{value}", 8) == (split is CorpusSplit.HELDOUT):
            return value


def skewed_index(rng: Random, size: int, decay: float = 0.6) -> int:
    """Draw an index with geometrically falling weights, which keep the entropy of the text low."""
    index = 0
    while rng.random() > 1.0 - decay and index < size - 1:
        index += 1
    return index


def cap(text: str) -> str:
    """Upper-case only the first letter."""
    return text[:1].upper() + text[1:]


def join_and(items: Sequence[str]) -> str:
    """Join items as in English: ``a``, ``a and b``, ``a, b and c``."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def a_an(noun: str) -> str:
    """Put the indefinite article before a noun."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun
