"""What every corpus topic shares: the split rule, choice helpers and text helpers.

A topic is a function ``make(rng, split) -> Exchange``. The split holds out templates (phrasings of a question) *and* entities (what is
asked about): a held-out exchange uses no template of a training exchange and is about nothing that one asks about. The words of a held-out
entity may occur elsewhere in the training text; where entities are numbers (units, sums), only the numbers are new.
"""

import enum
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

T = TypeVar("T")
Turn = tuple[str, str]  # (what the user says, what the assistant answers)
Exchange = list[Turn]  # turns about one thing; the first one stands alone


class Split(enum.Enum):
    """Which part of templates and entities may be used."""

    TRAIN = "train"
    HELDOUT = "heldout"  # no training exchange uses the template or asks about the entity
    REPHRASED = "rephrased"  # held-out templates about entities of the training part: can be answered


@dataclass(frozen=True, slots=True)
class Topic:
    """One subject of the corpus.

    Attributes:
        name: Label used in the held-out prompt file.
        weight: Relative frequency among exchanges.
        make: Generates one exchange for a split.
    """

    name: str
    weight: float
    make: Callable[[Random, Split], Exchange]


def is_heldout_key(key: str, one_in: int = 10) -> bool:
    """Say whether an entity belongs to the held-out part; stable across runs and machines."""
    return zlib.crc32(key.encode()) % one_in == 3


def pick_template(rng: Random, templates: Sequence[str], split: Split) -> str:
    """Draw a phrasing: the last fifth (at least one) of ``templates`` is held out."""
    held = max(1, len(templates) // 5)
    return rng.choice(templates[:-held] if split is Split.TRAIN else templates[-held:])


def split_entities(entities: Sequence[T], split: Split, key: Callable[[T], str]) -> list[T]:
    """Return the entities of one split, in their given order; never empty."""
    held = [e for e in entities if is_heldout_key(key(e))] or [entities[-1]]
    return held if split is Split.HELDOUT else [e for e in entities if e not in held]


def pick_number(rng: Random, low: int, high: int, split: Split, salt: str) -> int:
    """Draw an integer in [low, high] whose (salt, value) key belongs to the split."""
    while True:
        value = rng.randint(low, high)
        if is_heldout_key(f"{salt}:{value}", 8) == (split is Split.HELDOUT):
            return value


def skewed_index(rng: Random, size: int, decay: float = 0.6) -> int:
    """Draw an index with geometric weights, so that free choices have a likely favourite (low entropy text)."""
    index = 0
    while rng.random() > 1.0 - decay and index < size - 1:
        index += 1
    return index


def cap(text: str) -> str:
    """Upper-case the first letter only."""
    return text[:1].upper() + text[1:]


def join_and(items: Sequence[str]) -> str:
    """Join as English does: ``a``, ``a and b``, ``a, b and c``."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def a_an(noun: str) -> str:
    """Prefix the indefinite article."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun
